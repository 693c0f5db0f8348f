"""What ranks import to have CPUs watched as GPUs are, to get stuck as those do, and to be patient
for a few seconds only.

As soon as a file is there, rank 0 stops in the call that would wait for its device.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import unet3d.config
from unet3d.config import Config
from unet3d.distributed import device_watch

STUCK = os.environ.get("UNET3D_TEST_STUCK")


class StuckProgress:
    """A device that is as far as its main thread, until that stops."""

    def __init__(self, device: torch.device) -> None:
        self._number = 0

    def queue(self, number: int) -> None:
        if os.environ["RANK"] == "0" and STUCK is not None and Path(STUCK).exists():
            Path(STUCK).with_suffix(".0").touch()
            while True:
                time.sleep(1000)
        self._number = number

    def reached(self) -> int:
        return self._number


if STUCK is not None:
    device_watch.PROGRESS["cpu"] = StuckProgress

if limit := os.environ.get("UNET3D_TEST_LIMIT"):  # for commands that have no option for it
    load_config = unet3d.config.load_config

    def with_limit(path: Path | None, changes: Sequence[str] = ()) -> Config:
        return load_config(path, [*changes, f"parallel.timeout_seconds={limit}"])

    unet3d.config.load_config = with_limit
