"""The one interface between a network spread over devices and the jobs that use it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from unet3d.errors import ConfigError
from unet3d.model import BlockNetwork
from unet3d.parallel.placement import Slot

ActionKind = Literal["forward", "loss", "backward"]


class Loss(Protocol):
    """A scalar to minimise, and perhaps what it is made of."""

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


@dataclass(frozen=True, kw_only=True)
class ScalarLoss:
    """A :class:`Loss` that is made of nothing else."""

    total: Tensor
    """What is minimised, a scalar."""

    def weighted(self, weight: float) -> "ScalarLoss":
        """Return it times a weight."""
        return ScalarLoss(total=self.total * weight)

    def detached(self) -> "ScalarLoss":
        """Return the value without its graph."""
        return ScalarLoss(total=self.total.detach())

    def __add__(self, other: "ScalarLoss") -> "ScalarLoss":
        return ScalarLoss(total=self.total + other.total)


LossFunction = Callable[[Any, Tensor], Loss | Tensor]
"""From logits (with several results, a sequence of them) and target to a mean over the samples.

It returns a :class:`Loss`, or a plain scalar as :func:`torch.nn.functional.cross_entropy` does.
Steps are only captured as CUDA graphs if it is the same object in each of them.
"""


def as_loss(returned: Loss | Tensor) -> Loss:
    """Return a :class:`Loss`, whichever of both a loss function returns.

    Args:
        returned: By a :data:`LossFunction`.

    Raises:
        ConfigError: A tensor that is no scalar.
    """
    if not isinstance(returned, Tensor):
        return returned
    if returned.dim() != 0:
        raise ConfigError(
            f"the loss function returned a tensor of shape {tuple(returned.shape)}; return a "
            "scalar, the mean over the samples"
        )
    return ScalarLoss(total=returned)


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
            image: (N, C, X, Y, Z), or what else the network takes, on the input device.
            target: (N, ...) on the output device, such as class indices (N, X, Y, Z).
            loss_fn: A mean over samples; called where the logits are.
            scale: Factor of the loss before backward (of a gradient scaler); not in the result.

        Returns:
            The batch's :class:`Loss`, detached, on the output device: a plain scalar is its
            ``total``. Nothing waits for it.
        """
        ...

    def predict(self, image: Tensor) -> Tensor:
        """Return logits (N, K, ...) on the output device, without gradients.

        Whoever asks calls ``executor.module.eval()`` first, as for any module, where there is
        batch normalisation or dropout.

        Args:
            image: (N, C, X, Y, Z), or what else the network takes, on the input device.
        """
        ...
