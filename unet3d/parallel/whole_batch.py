"""Losses of the whole batch as one, such as batch Dice, where parts of it are computed apart.

Such a loss is f(T), where T are sums over all voxels of the batch. Its gradient with respect to the
sums S of one part, a micro-batch or a replica's share, depends on T only. So the part's own loss is
f(S + (T - S)), where the difference is taken as a constant: it has the value of the whole batch's,
and the gradients of all parts add up to the whole batch's.

Before the first backward, T must be known. Replicas with one micro-batch tell one another their
sums between forward and loss, in a captured step by a message that is part of its graph. Several
micro-batches pass forward once before, without gradients: their activations are not kept, so it
takes no more memory, but the time of the forward pass, and such a step is launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.executor import Loss, LossFunction
from unet3d.parallel.step import MicroBatch


class LossOfSums(Protocol):
    """A loss function that is made of sums over voxels."""

    @property
    def joins_samples(self) -> bool:
        """Whether the sums are added up over the batch, so that it is no mean over samples."""
        ...

    def sums(self, logits: Any, target: Tensor) -> Tensor:
        """Return sums over the samples, which may be differentiated.

        Logits and target are those of a :data:`~unet3d.parallel.executor.LossFunction`.
        """
        ...

    def from_sums(self, sums: Tensor) -> Loss:
        """Return the loss of sums over the whole batch."""
        ...

    def __call__(self, logits: Any, target: Tensor) -> Loss:
        """Return the loss of a whole batch."""
        ...


def joins_samples(loss_fn: LossFunction | LossOfSums) -> TypeGuard[LossOfSums]:
    """Return whether a loss is that of the batch as one, and not a mean over the samples."""
    return bool(getattr(loss_fn, "joins_samples", False))


@dataclass(frozen=True, kw_only=True)
class PartOfBatch:
    """The loss of the batch as one, as a function of what one part of it contributes.

    Two are equal where their fields are, as captured steps ask.
    """

    loss: Any
    """A :class:`LossOfSums`."""
    exchange: NoExchange
    """Adds up over replicas."""
    factor: float
    """Of this replica's sums: 0 where its samples are no part of the batch."""
    known: Tensor | None = None
    """The sums over the batch; None: those of the part and of other replicas."""

    def total(self, own: Tensor) -> Tensor:
        """Return the sums over the batch from those over this replica's samples."""
        return self.exchange.total(own * self.factor)

    def of(self, batch: Sequence[MicroBatch], scale: float) -> list[MicroBatch]:
        """Return micro-batches whose gradients add up to those of the whole batch, times a scale.

        Each has the value of the whole, so their weighted values add up to that. Of its gradient
        each has its own part, without a weight; the exchange takes the mean over replicas.
        """
        factor = scale * self.factor * self.exchange.num_replicas
        return [replace(one, loss_fn=self, scale=factor / one.weight) for one in batch]

    def __call__(self, logits: Any, target: Tensor) -> Loss:
        """Return the loss of the batch."""
        own = self.loss.sums(logits, target)
        total = self.total(own.detach()) if self.known is None else self.known
        whole: Loss = self.loss.from_sums(own + (total - own.detach()))
        return whole
