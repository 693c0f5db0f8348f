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
    """A scalar to minimise, and perhaps its terms."""

    @property
    def total(self) -> Tensor:
        """The scalar that is minimised."""
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
    """The scalar that is minimised."""

    def weighted(self, weight: float) -> "ScalarLoss":
        """Return it times a weight."""
        return ScalarLoss(total=self.total * weight)

    def detached(self) -> "ScalarLoss":
        """Return the value without its graph."""
        return ScalarLoss(total=self.total.detach())

    def __add__(self, other: "ScalarLoss") -> "ScalarLoss":
        return ScalarLoss(total=self.total + other.total)


LossFunction = Callable[[Any, Tensor], Loss | Tensor]
"""Maps logits (a sequence of them, for several results) and target to a mean over the samples; or
to a loss of the batch as one, if it is a :class:`~unet3d.parallel.whole_batch.LossOfSums`.

It returns a :class:`Loss`, or a plain scalar as :func:`torch.nn.functional.cross_entropy` does.
Steps are only captured as CUDA graphs if it is the same object in each of them.
"""


def as_loss(returned: Loss | Tensor) -> Loss:
    """Return a :class:`Loss`, whichever of both a loss function returns.

    Args:
        returned: The result of a :data:`LossFunction`.

    Raises:
        ConfigError: It is a tensor but not a scalar.
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
    """Observes the actions that an executor launches; for measurements.

    Actions that are replayed from CUDA graphs make no tensors, so they are not reported.
    """

    def during(
        self, slot: Slot, kind: ActionKind, micro_batch: int
    ) -> AbstractContextManager[None]:
        """Return a context for one action of a slot on a micro-batch."""
        ...

    def resized(self, tensor: Tensor) -> None:
        """Note that a tensor's memory was freed, or allocated again; others may share it."""
        ...


class NoObserver:
    """Observes nothing."""

    def during(self, slot: Slot, kind: str, micro_batch: int) -> AbstractContextManager[None]:
        """Do nothing around an action."""
        return nullcontext()

    def resized(self, tensor: Tensor) -> None:
        """Do nothing."""


class Executor(Protocol):
    """A network that is placed on devices, for training and prediction.

    Every placement is transparent: the loss and the gradients are those of
    the plain network on the whole batch.
    """

    @property
    def module(self) -> BlockNetwork:
        """The network; its parameters have their plain names, whatever the devices."""
        ...

    input_device: torch.device
    """The device where images are expected."""
    output_device: torch.device
    """The device where targets are expected and logits are returned."""
    slots: Sequence[Slot]
    """The slots; the memory report has a row for each."""
    observer: Observer
    """Receives every action of :meth:`forward_backward` that is launched."""

    def forward_backward(
        self,
        image: Tensor,
        target: Tensor,
        loss_fn: LossFunction,
        scale: float = 1.0,
        *,
        weight: float = 1.0,
        planes: int | None = None,
    ) -> Any:
        """Add the gradients of one batch to the module's.

        Args:
            image: (N, C, X, Y, Z), or another input of the network, on the input device.
            target: (N, ...) on the output device, such as class indices (N, X, Y, Z).
            loss_fn: A mean over samples, or a loss of the batch as one; called where the logits
                are.
            scale: Factor of the loss before backward (of a gradient scaler); not in the result.
            weight: The share of the batch's samples that this replica has, over the mean share; see
                :attr:`unet3d.patches.patches.Batch.weight`. 0: the samples do not count. It is
                not in the result.
            planes: Planes along X of the whole volume, where image and target are the slab of it
                that belongs to this process; None: they are whole. Others than
                :class:`~unet3d.parallel.spatial.executor.SpatialExecutor` take no slabs.

        Returns:
            The batch's :class:`Loss`, detached, on the output device: a plain scalar is its
            ``total``. Nothing waits for it.
        """
        ...

    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return logits (N, K, ...) on the output device, without gradients.

        With batch normalisation or dropout, call ``executor.module.eval()`` first, as usual.

        Args:
            image: (N, C, X, Y, Z), or another input of the network, on the input device.
            precision: What it is computed in, resolved, such as ``float32``; None: that of
                training.
        """
        ...
