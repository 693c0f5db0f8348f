"""Dice plus cross-entropy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.config import TrainingSettings
from unet3d.kernels import dice_ce_sums, region_sums
from unet3d.kernels.sharding import sum_of_losses

SMOOTH = 1e-5

Regions = tuple[tuple[int, ...], ...]
"""Indices of the classes that each region is made of."""


class LossTerms(NamedTuple):
    """A loss and its terms: scalars, on the device of the logits."""

    total: Tensor
    """Dice plus cross-entropy, which training minimises."""
    dice: Tensor
    """One minus the soft Dice: the mean over foreground classes or regions, and over samples unless
    they are joined."""
    cross_entropy: Tensor
    """Mean in nats over the voxels that count, and over regions if there are any: first in each
    sample, then over samples; if samples are joined, over all voxels of the batch at once."""


@dataclass(frozen=True, kw_only=True)
class SegmentationLoss:
    """Soft Dice loss plus cross-entropy, made of sums over voxels.

    The sums over parts of a volume add up to the sums over the volume, so slabs can compute the
    loss. The Dice is V-Net's (arXiv 1606.04797) with nnU-Net's smoothing, for each foreground class
    or region. By default the Dice is computed per sample. Then the loss of a batch is the mean over
    its samples, and the sum over micro-batches, weighted by their sizes, is exact. The loss is
    computed in float32 or higher.
    """

    joins_samples: bool = False
    """Whether the sums are added up over the batch before the Dice is computed, as in nnU-Net's
    batch Dice. So false positives count also in samples without a voxel of the class."""
    regions: Regions = ()
    """Indices of the classes in each region; every class but the background is in at least one.
    With regions, which may overlap, there is a logit for each region; probabilities are sigmoids,
    and the cross-entropy is the binary one. Empty: there is a logit for each class."""

    @classmethod
    def of(cls, settings: TrainingSettings, regions: Regions) -> "SegmentationLoss":
        """Return the loss that settings ask for.

        Args:
            settings: Where ``batch_dice`` is still ``auto``, it counts as false.
            regions: As :attr:`regions`.
        """
        return cls(joins_samples=settings.batch_dice is True, regions=regions)

    def __call__(self, logits: Tensor | Sequence[Tensor], target: Tensor) -> LossTerms:
        """Return the loss of a batch.

        Args:
            logits: (N, K, X, Y, Z), one for each class or region; with deep supervision a sequence,
                full resolution first, whose losses are weighted 1, 1/2, 1/4, ... and normalised.
            target: Class indices (N, X, Y, Z) of any integer type, on the device of the logits.
                Voxels with an index above all classes do not count.
        """
        return self.from_sums(self.sums(logits, target))

    def sums(self, logits: Tensor | Sequence[Tensor], target: Tensor) -> Tensor:
        """Return the sums over voxels that the loss is made of.

        Sums of parts of a volume add up to the sums of the volume. Sums of different samples are
        concatenated along N, or added with :attr:`joins_samples`. If the logits are a slab, the
        sums are over the whole volume (:mod:`unet3d.kernels.sharding`).

        Args:
            logits: As for the loss. The sizes of a coarser level must divide the target's; every
                n-th voxel of the target is compared with it.
            target: As for the loss.

        Returns:
            (levels, 4, N, K) in float32 at least, through which backward reaches the logits; N is 1
            with :attr:`joins_samples`. The four numbers of each class, with p its softmax: the sum
            of -log p over its voxels, the sum of p over its voxels, the sum of p over all voxels,
            and the number of its voxels. With regions (levels, 5, N, R): see
            :func:`unet3d.kernels.region_sums`.
        """
        levels = [logits] if isinstance(logits, Tensor) else logits
        sums = torch.stack([self._sums(level, _coarser(target, level)) for level in levels])
        if self.joins_samples:
            sums = sums.sum(2, keepdim=True)
        return sum_of_losses(sums)

    def from_sums(self, sums: Tensor) -> LossTerms:
        """Return the loss.

        Args:
            sums: As :meth:`sums` returns them, over whole volumes and, with
                :attr:`joins_samples`, over the whole batch.
        """
        surprise, common, predicted = sums[:, :3].unbind(1)
        # The voxels of each class or region, and the voxels that count.
        truth, counted = sums[:, 3].detach(), sums[:, -1].detach()
        # A sample without a voxel that counts has the best loss: both of its terms are 0.
        cross_entropy = (surprise.sum(2) / counted.sum(2).clamp_min(1)).mean(1)
        overlap = (2 * common + SMOOTH) / (predicted + truth + SMOOTH)
        first = 0 if self.regions else 1  # the background is no region
        dice = 1 - overlap[..., first:].mean((1, 2))
        return LossTerms(
            total=_mean_over_levels(dice + cross_entropy),
            dice=_mean_over_levels(dice),
            cross_entropy=_mean_over_levels(cross_entropy),
        )

    def _sums(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.regions:
            return region_sums(logits, target, self.regions)
        return dice_ce_sums(logits, target)


dice_cross_entropy = SegmentationLoss()
"""The loss with the Dice of each sample."""


def _mean_over_levels(values: Tensor) -> Tensor:
    """Return the mean of losses (levels,), full resolution first, weighted 1, 1/2, 1/4, ..."""
    weights = [0.5**level for level in range(len(values))]
    parts = [value * weight for value, weight in zip(values.unbind(), weights, strict=True)]
    return sum(parts[1:], start=parts[0]) / sum(weights)


def _coarser(target: Tensor, logits: Tensor) -> Tensor:
    """Take every n-th voxel of the target, as nearest-neighbour resampling does."""
    x, y, z = (
        full // coarse for full, coarse in zip(target.shape[1:], logits.shape[2:], strict=True)
    )
    return target[:, ::x, ::y, ::z]
