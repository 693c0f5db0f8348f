"""Loss functions, and how losses of the parts of a batch are added.

A loss is a mean over samples, or a loss of the whole batch, such as batch Dice. A loss of the whole
batch is f(T), where T are sums over all voxels of the batch. Its gradient with respect to the sums
S of one part (a micro-batch, or a replica's share) depends on T only. So the loss of a part is f(S
+ (T - S)), where the difference is a constant. It has the value of the loss of the batch, and the
gradients of all parts add up to the gradient of the batch.

Before the first backward, T must be known. Replicas with one micro-batch exchange their sums
between forward and loss; in a captured step the message is part of the graph. Several micro-batches
first run forward without gradients. This keeps no activations, so it takes the time of a forward
pass but no more memory. Such a step is not captured.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unet3d.errors import ConfigError
from unet3d.parallel.exchange import NoExchange

LossFunction = Callable[[Any, Tensor], Any]
"""Maps logits (a sequence of them, for several results) and target to a mean over the samples: a
scalar as of :func:`torch.nn.functional.cross_entropy`, or a named tuple of scalars whose ``total``
is minimised, such as :class:`~unet3d.model.loss.LossTerms`.

A loss of the whole batch sets ``joins_samples``. Its ``sums(logits, target)`` adds over samples,
and its ``from_sums`` takes the sums of the whole batch, like
:class:`~unet3d.model.loss.SegmentationLoss`. Steps are captured as CUDA graphs only if all of them
get the same loss object.
"""


class ScalarLoss(NamedTuple):
    """The loss of a function that returns a plain scalar."""

    total: Tensor
    """The scalar that is minimised."""


def as_loss(returned: Any) -> Any:
    """Return the result of a loss function, a scalar or a named tuple, as a named tuple."""
    if not isinstance(returned, Tensor):
        return returned
    if returned.dim() != 0:
        raise ConfigError(
            f"the loss function returned a tensor of shape {tuple(returned.shape)}; return a "
            "scalar, the mean over the samples"
        )
    return ScalarLoss(total=returned)


def weighted(loss: Any, weight: float) -> Any:
    """Return all terms times a weight, without a graph."""
    return type(loss)(*(term.detach() * weight for term in loss))


def total_of(losses: Sequence[Any]) -> Any:
    """Return the sum of weighted losses, term by term."""
    return type(losses[0])(*map(added, zip(*losses, strict=True)))


def added(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, in their order."""
    return functools.reduce(torch.add, values)


def joins_samples(loss_fn: LossFunction) -> bool:
    """Return whether a loss is computed over the whole batch, not as a mean over samples."""
    return bool(getattr(loss_fn, "joins_samples", False))


@dataclass(frozen=True, kw_only=True)
class PartOfBatch:
    """The loss of the whole batch as a function of the sums of one part.

    Captured steps compare instances: they are equal if their fields are.
    """

    loss: Any
    """A loss of the whole batch; see :data:`LossFunction`."""
    exchange: NoExchange
    """Adds up sums over replicas."""
    factor: float
    """Weight of this replica's sums; 0 if its samples do not count."""
    known: Tensor | None = None
    """The sums over the batch; None: the sums of this part and of the other replicas, added."""

    def total(self, own: Tensor) -> Tensor:
        """Return the sums over the batch from the sums over this replica's samples."""
        return self.exchange.total(own * self.factor)

    def __call__(self, logits: Any, target: Tensor) -> Any:
        """Return the loss of the batch."""
        own = self.loss.sums(logits, target)
        total = self.total(own.detach()) if self.known is None else self.known
        return self.loss.from_sums(own + (total - own.detach()))
