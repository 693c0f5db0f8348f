"""Which micro-batch runs where, and when: pure functions that know no device.

A schedule is a list of actions in the order in which one process queues them. Devices work
asynchronously, so two actions on different stages overlap as far as their data allow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    stage: int


def one_after_another(num_micro_batches: int, num_stages: int) -> Iterator[Action]:
    """Yield each micro-batch's whole forward and backward before the next begins.

    One stage works at a time, and one micro-batch's activations are kept. Two stages, two
    micro-batches (F0 is micro-batch 0 forward)::

        stage 0   F0 .. .. B0 F1 .. .. B1
        stage 1   .. F0 B0 .. .. F1 B1 ..
    """
    for micro_batch in range(num_micro_batches):
        for stage in range(num_stages):
            yield Action("forward", micro_batch, stage)
        for stage in reversed(range(num_stages)):
            yield Action("backward", micro_batch, stage)
