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

from collections.abc import Callable, Sequence
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
class TotalOfReplicas:
    """Adds up over replicas; equal where the exchange and the factor are, as captured steps ask."""

    exchange: NoExchange
    factor: float
    """Of this replica's sums: 0 where its samples are no part of the batch."""

    def __call__(self, own: Tensor) -> Tensor:
        """Return sums over the batch."""
        return self.exchange.total(own * self.factor)


def parts_of_whole(
    batch: Sequence[MicroBatch], total: Callable[[Tensor], Tensor], scale: float
) -> list[MicroBatch]:
    """Return micro-batches of a loss of sums, whose gradients add up to those of the whole batch.

    ``total`` returns the sums over the batch; it is given those of a micro-batch. ``scale`` is the
    factor of the loss before backward.
    """
    # Each micro-batch has the value of the whole, so their weighted values add up to that. Of its
    # gradient each has its own part, without a weight.
    return [
        replace(one, loss_fn=_PartOfBatch(loss=one.loss_fn, total=total), scale=scale / one.weight)
        for one in batch
    ]


@dataclass(frozen=True, kw_only=True)
class _PartOfBatch:
    """The loss of the batch as a function of what one part contributes."""

    loss: Any
    total: Callable[[Tensor], Tensor]

    def __call__(self, logits: Any, target: Tensor) -> Loss:
        own = self.loss.sums(logits, target)
        others = self.total(own.detach()) - own.detach()
        whole: Loss = self.loss.from_sums(own + others)
        return whole
