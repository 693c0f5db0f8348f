"""The sums over voxels that the Dice and the binary cross-entropy of regions are made of.

Autograd would keep several float32 tensors of the logits' size for backward; here only the logits
and the target are kept, and the probabilities are computed again, in PyTorch's own operations.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from unet3d.kernels.dice_ce.api import rows_of, summed


def region_sums(logits: Tensor, target: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Return the sums over voxels from which Dice and binary cross-entropy of regions follow.

    Logits are (N, R, X, Y, Z), one for each region; the probability p is their sigmoid. The target
    is (N, X, Y, Z), class indices of any integer type, and a region those of its classes. Voxels
    whose index is above that of every region's classes are left out, and the gradient of their
    logits is 0. The sums are (5, N, R) in float32 at least, over the voxels that are not: of the
    binary cross-entropy, of p over the region, of p over all voxels, the number of the region's
    voxels, and the number of all.
    """
    return summed(
        logits, target, partial(_sums, regions=regions), partial(_gradient, regions=regions)
    )


def _sums(logits: Tensor, target: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    values = rows_of(logits)
    is_counted, is_truth = _masks(target, regions, values.dtype)
    surprise = functional.softplus(values).addcmul_(values, is_truth, value=-1)
    surprise = surprise.mul_(is_counted).sum(2)
    chance = torch.sigmoid(values).mul_(is_counted)
    common = (chance * is_truth).sum(2)
    num_voxels = is_counted.sum(2).expand_as(common)
    return torch.stack((surprise, common, chance.sum(2), is_truth.sum(2), num_voxels))


def _gradient(
    gradient: Tensor, logits: Tensor, target: Tensor, regions: Sequence[Sequence[int]]
) -> Tensor:
    chance = torch.sigmoid(rows_of(logits))
    is_counted, is_truth = _masks(target, regions, chance.dtype)
    surprise, common, predicted, *_ = gradient.unsqueeze(-1).unbind(0)
    # The derivative of the chance c by its logit is c * (1 - c), that of the binary cross-entropy
    # c - t.
    wanted = torch.addcmul(predicted, is_truth, common).mul_(chance).mul_(1 - chance)
    wanted.addcmul_(chance.sub_(is_truth), surprise).mul_(is_counted)
    # One copy brings them to the type and layout of the logits.
    return torch.empty_like(logits).copy_(wanted.view(logits.shape))


def _masks(
    target: Tensor, regions: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return 1 at each voxel that counts (N, 1, V), and 1 in each region (N, R, V); else 0."""
    classes = target.flatten(1)
    is_counted = (classes <= max(map(max, regions))).to(dtype).unsqueeze(1)
    is_truth = is_counted.new_zeros((len(classes), len(regions), classes.shape[1]))
    for index, region in enumerate(regions):
        for label in region:
            is_truth[:, index] += classes == label
    return is_counted, is_truth
