"""The one interface between a network spread over devices and the jobs that use it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from unet3d.model import BlockNetwork
from unet3d.parallel.placement import Slot

ActionKind = Literal["forward", "loss", "backward"]


class Loss(Protocol):
    """What a loss function returns: a scalar to minimise, and perhaps what it is made of."""

    @property
    def total(self) -> Tensor:
        """What is minimised, a scalar."""
        ...

    def weighted(self, weight: float) -> Self:
        """Return every term times a weight."""
        ...

    def detached(self) -> Self:
        """Return the values without their graph."""
        ...

    def __add__(self, other: Any) -> Self: ...


LossFunction = Callable[[Any, Tensor], Any]
"""From logits (with several results, a sequence of them) and target to a :class:`Loss`: a mean over
the samples."""


class Observer(Protocol):
    """What is told of the actions that an executor launches; for measurements.

    Actions that are replayed from CUDA graphs make no tensors, so nobody is told of them.
    """

    def during(
        self, slot: Slot, kind: ActionKind, micro_batch: int
    ) -> AbstractContextManager[None]:
        """Return what is entered around one action.

        Args:
            slot: Which acts.
            kind: What it does.
            micro_batch: With which portion of the batch.
        """
        ...

    def resized(self, tensor: Tensor) -> None:
        """Take note that a tensor's memory was given back, or taken again.

        Args:
            tensor: Others may share its memory.
        """
        ...


class NoObserver:
    """Looks at nothing."""

    def during(self, slot: Slot, kind: str, micro_batch: int) -> AbstractContextManager[None]:
        """Do nothing around an action."""
        return nullcontext()

    def resized(self, tensor: Tensor) -> None:
        """Do nothing."""


class Executor(Protocol):
    """A network that is placed somewhere and can be trained and asked.

    Every way of spreading the network is transparent: the loss and the gradients are those of
    the plain network on the whole batch.
    """

    @property
    def module(self) -> BlockNetwork:
        """The network; its parameters have their plain names, whatever the devices."""
        ...

    input_device: torch.device
    """Where images are wanted."""
    output_device: torch.device
    """Where targets are wanted and logits come out."""
    slots: Sequence[Slot]
    """What the memory report has a row for."""
    observer: Observer
    """Is told of every action of :meth:`forward_backward` that is launched."""

    def forward_backward(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float = 1.0
    ) -> Any:
        """Add the gradients of one batch to the module's.

        Args:
            image: (N, C, X, Y, Z) on the input device.
            target: Class indices (N, X, Y, Z) on the output device.
            loss_fn: A mean over samples; called where the logits are.
            scale: Factor of the loss before backward (of a gradient scaler); not in the result.

        Returns:
            The batch's :class:`Loss`, detached, on the output device. Nothing waits for it.
        """
        ...

    def predict(self, image: Tensor) -> Tensor:
        """Return logits (N, K, X, Y, Z) on the output device, without gradients.

        Args:
            image: (N, C, X, Y, Z) on the input device.
        """
        ...
