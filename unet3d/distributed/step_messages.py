"""The message that every rank sends after each step, and reads one step later.

::

    step        1          2          3
    send        flags 1    flags 2    flags 3
    read                   flags 1    flags 2

So no rank waits for another, and a rank that is lost is noticed within a step.
"""

from typing import Any

import torch
import torch.distributed as dist

from unet3d.distributed.rank_watch import RankWatch


class StepMessages:
    """Flags of all ranks, reduced over them while the next step runs."""

    def __init__(self, watch: RankWatch) -> None:
        """Start without a message under way."""
        self._watch = watch
        self._flags: torch.Tensor | None = None
        self._work: Any = None

    def all_reduce_flags(self, stop: int, save: bool) -> tuple[int, bool]:
        """Send the flags of this step, and return the largest ones of the step before."""
        reduced = [0, 0]
        if self._flags is not None:
            self.wait()
            reduced = self._flags.tolist()
            self._flags = None
        if not reduced[0]:
            self._flags = torch.tensor([stop, int(save and not reduced[1])])
            with self._watch.translate_dist_errors():
                self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
        return reduced[0], bool(reduced[1])

    def wait(self) -> None:
        """Wait for the message that is under way, if there is one."""
        if self._flags is not None:
            with self._watch.translate_dist_errors():
                self._work.wait(self._watch.timeout)
