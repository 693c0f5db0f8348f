"""What ranks import to have CPUs watched as GPUs are, and to get stuck as those do.

As soon as a file is there, rank 0 stops in the call that would wait for its device.
"""

import os
import time
from pathlib import Path

import torch

from unet3d.distributed import device_watch
from unet3d.distributed.group import Group

STUCK = Path(os.environ["UNET3D_TEST_STUCK"])


class StuckProgress:
    """A device that is as far as its main thread, until that stops."""

    def __init__(self, device: torch.device) -> None:
        self._number = 0

    def queue(self, number: int) -> None:
        if os.environ["RANK"] == "0" and STUCK.exists():
            STUCK.with_suffix(".0").touch()
            while True:
                time.sleep(1000)
        self._number = number

    def reached(self) -> int:
        return self._number


device_watch.PROGRESS["cpu"] = StuckProgress

if limit := os.environ.get("UNET3D_TEST_LIMIT"):  # for commands that have no setting for it
    open_group = Group.open

    def open_with_limit(self: Group, timeout_seconds: float) -> None:
        open_group(self, float(limit))

    Group.open = open_with_limit  # type: ignore[method-assign]
