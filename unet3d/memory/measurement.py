"""Measuring what the slots of an executor hold while it takes training steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from unet3d.memory.meter import MemoryMeter, NetworkLike, SlotLike


class Observed(Protocol):
    """What this module needs to know about an executor."""

    observer: Any
    """Receives every action; it is replaced while steps are measured."""

    @property
    def slots(self) -> Sequence[SlotLike]:
        """The slots that the network's blocks are on."""
        ...

    @property
    def module(self) -> NetworkLike:
        """The network."""
        ...


@contextmanager
def measured_steps(executor: Observed, optimizer: torch.optim.Optimizer) -> Iterator[MemoryMeter]:
    """Measure all training steps in the context; read the meter after it.

    Args:
        executor: The executor that takes the steps; its observer is restored at the end.
        optimizer: The optimizer of the executor's network.
    """
    meter = MemoryMeter(executor.slots, executor.module)
    before = executor.observer
    meter.start()
    executor.observer = meter
    hooks = (
        optimizer.register_step_pre_hook(lambda *_: meter.note_gradients()),
        optimizer.register_step_post_hook(lambda *_: meter.end_step()),
    )
    try:
        yield meter
    finally:
        for hook in hooks:
            hook.remove()
        executor.observer = before
