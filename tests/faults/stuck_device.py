"""Ranks on CPUs that are watched like GPUs, and get stuck like GPUs."""

import os
import time
from functools import partial

from tests.trainings import run_bare
from unet3d.distributed import watch
from unet3d.inference.request import PredictionRequest


class StuckProgress:
    """A device that is as far as its main thread, which hangs in rank 0 once the file is there."""

    def __init__(self, stuck, device):
        self._stuck = stuck
        self._number = 0

    def queue(self, number):
        if os.environ["RANK"] == "0" and self._stuck.exists():
            self._stuck.with_suffix(".0").touch()
            while True:
                time.sleep(1000)
        self._number = number

    def reached(self):
        return self._number


def run(words, stuck, limit=None):
    """Run ``unet3d WORDS``, with a time limit for ranks, for which predictions have no option.

    As soon as the file ``stuck`` is there, rank 0 stops in the call that would wait for its device.
    If ``stuck`` is None, no device is watched.
    """
    placement = PredictionRequest.placement.fget

    def with_limit(request):
        return placement(request).model_copy(update={"timeout_seconds": limit})

    if limit is not None:
        PredictionRequest.placement = property(with_limit)  # type: ignore[assignment]
    if stuck is not None:
        watch.PROGRESS["cpu"] = partial(StuckProgress, stuck)
    run_bare(words)
