"""Dice plus cross-entropy."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unet3d.kernels import dice_ce_sums
from unet3d.kernels.sharding import sum_of_losses

SMOOTH = 1e-5


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """A loss and its terms: scalars, on the device of the logits."""

    total: Tensor
    """Dice plus cross-entropy, which training minimises."""
    dice: Tensor
    """One minus the soft Dice: the mean over samples and foreground classes."""
    cross_entropy: Tensor
    """Mean over samples and voxels, in nats."""

    def weighted(self, weight: float) -> "LossTerms":
        """Return every term times a weight."""
        return LossTerms(
            total=self.total * weight,
            dice=self.dice * weight,
            cross_entropy=self.cross_entropy * weight,
        )

    def detached(self) -> "LossTerms":
        """Return the values without their graph."""
        return LossTerms(
            total=self.total.detach(),
            dice=self.dice.detach(),
            cross_entropy=self.cross_entropy.detach(),
        )

    def __add__(self, other: "LossTerms") -> "LossTerms":
        return LossTerms(
            total=self.total + other.total,
            dice=self.dice + other.dice,
            cross_entropy=self.cross_entropy + other.cross_entropy,
        )


def loss_sums(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sums over voxels that the loss is made of.

    Sums of parts of a volume add up to those of the volume, and sums of other samples are joined to
    these along N. Where the logits are a slab, the sums are those of the volume
    (:mod:`unet3d.kernels.sharding`).

    Args:
        logits: (N, K, X, Y, Z).
        target: Class indices (N, X', Y', Z') of any integer type, on the device of the logits; X',
            Y', Z' are multiples of X, Y, Z, and every n-th voxel is taken.

    Returns:
        (4, N, K) in float32 at least, through which backward reaches the logits. With p
        the softmax of the logits: the sum of -log p over the voxels of each class, that of p over
        them, that of p over all voxels, and their number.
    """
    return sum_of_losses(dice_ce_sums(logits, _coarser(target, logits)))


def loss_from_sums(sums: Tensor) -> LossTerms:
    """Return the sum of soft Dice loss and cross-entropy.

    Args:
        sums: (4, N, K), as :func:`loss_sums` returns them, over whole volumes.
    """
    surprise, common, predicted, counted = sums.unbind(0)
    cross_entropy = surprise.sum() / counted.detach().sum()
    per_class = 1 - (2 * common + SMOOTH) / (predicted + counted + SMOOTH)
    dice = per_class[:, 1:].mean()
    return LossTerms(total=dice + cross_entropy, dice=dice, cross_entropy=cross_entropy)


def mean_over_levels(levels: Sequence[LossTerms]) -> LossTerms:
    """Return the mean of losses at several resolutions, weighted 1, 1/2, 1/4, ...

    Args:
        levels: Full resolution first.
    """
    weights = [0.5**level for level in range(len(levels))]
    terms = [
        level.weighted(weight / sum(weights)) for level, weight in zip(levels, weights, strict=True)
    ]
    return sum(terms[1:], start=terms[0])


def dice_cross_entropy(logits: Tensor | Sequence[Tensor], target: Tensor) -> LossTerms:
    """Return the sum of soft Dice loss and cross-entropy.

    The Dice is taken per sample and per foreground class (V-Net, arXiv 1606.04797, with the
    smoothing of nnU-Net), so the loss of a batch is the mean of the losses of its samples: a sum
    over micro-batches, weighted by their sizes, is exact. Computed in float32 at least.

    Args:
        logits: (N, K, X, Y, Z); with deep supervision a sequence, full resolution first, whose
            losses are weighted 1, 1/2, 1/4, ... and normalised.
        target: Class indices (N, X, Y, Z) of any integer type, on the device of the logits.
    """
    levels = [logits] if isinstance(logits, Tensor) else logits
    return mean_over_levels([loss_from_sums(loss_sums(level, target)) for level in levels])


def _coarser(target: Tensor, logits: Tensor) -> Tensor:
    """Take every n-th voxel of the target, as nearest-neighbour resampling does."""
    x, y, z = (
        full // coarse for full, coarse in zip(target.shape[1:], logits.shape[2:], strict=True)
    )
    return target[:, ::x, ::y, ::z]
