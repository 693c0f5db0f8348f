"""Blur and loss of resolution: separable linear filters, a matrix of weights for each axis.

The matrices are computed by the process that cuts a patch: on a GPU that would take more launches
than all other changes.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.images.image import Box
from unet3d.kernels.affine.noise import independent_of_threads
from unet3d.patches.augment.cut import start_of
from unet3d.patches.augment.draw import BLUR_SIGMA_VOXELS, LOW_RESOLUTION_RANGE, Axes, DrawnChannel
from unet3d.patches.augment.intensity import Part

BLUR_DEVIATIONS = 4.0
"""Radius at which a Gaussian is truncated, in standard deviations."""

CHUNK = 64
"""Voxels of an axis that a CPU computes at once: matrices are banded, so chunks skip zeros."""
GPU_CHUNK = 256
"""Voxels of an axis that a GPU computes at once: a launch costs more than multiplying zeros."""

CPU = torch.device("cpu")

Matrices = tuple[Tensor | None, ...]
"""For each of X, Y and Z, float32 (channels, voxels, voxels): one matrix per channel; None: the
axis is not filtered."""


def blur_matrices(sigmas: Sequence[Axes], size: Shape) -> Matrices:
    """Return convolutions with Gaussians, mirrored at the faces; ``sigmas`` are in voxels."""
    return tuple(
        torch.stack([_blur_matrix(voxels, sigma[axis]) for sigma in sigmas]) if voxels > 1 else None
        for axis, voxels in enumerate(size)
    )


def coarsening_matrices(resolutions: Sequence[Axes], size: Shape) -> Matrices:
    """Return filters that lower the resolution, by factors of the number of voxels.

    Each large voxel is the mean over its box, as in a scanner, which does not shift the image; the
    nearest voxel would shift it by up to half a large voxel. The result is interpolated linearly.
    """
    matrices: list[Tensor | None] = []
    for axis, voxels in enumerate(size):
        fewer = [_fewer(voxels, factor[axis]) for factor in resolutions]
        changes = min(fewer) < voxels
        each = [_coarsening_matrix(voxels, number) for number in fewer] if changes else []
        matrices.append(torch.stack(each) if changes else None)
    return tuple(matrices)


def reach_of(drawn: DrawnChannel, size: Shape) -> Shape:
    """Return the reach of a channel's filters along each axis, in voxels."""
    x, y, z = (
        math.ceil(BLUR_DEVIATIONS * sigma) + _coarsening_reach(voxels, factor)
        for sigma, factor, voxels in zip(
            drawn.blur_sigma or (0, 0, 0), drawn.resolution, size, strict=True
        )
    )
    return x, y, z


def with_margin(part: Box, channels: Sequence[DrawnChannel], size: Shape) -> Box:
    """Return a part of a patch with the voxels around it that its intensities depend on."""
    margins = np.max([(0, 0, 0), *(reach_of(channel, size) for channel in channels)], axis=0)
    x, y, z = (
        slice(max(0, one.start - margin), min(voxels, one.stop + margin))
        for one, margin, voxels in zip(part, margins.tolist(), size, strict=True)
    )
    return x, y, z


def farthest_reach(voxels: int) -> int:
    """Return the largest reach of any filter along an axis of a patch, in voxels."""
    blur = math.ceil(BLUR_DEVIATIONS * BLUR_SIGMA_VOXELS[1])
    return blur + _coarsening_reach(voxels, LOW_RESOLUTION_RANGE[0])


def _blur_matrix(voxels: int, sigma: float) -> Tensor:
    """Return (voxels, voxels): a Gaussian around each voxel, mirrored at the ends of the axis."""
    place = torch.arange(voxels, dtype=torch.float64)
    row, column = place[:, None], place[None]

    def gaussian(distance: Tensor) -> Tensor:
        value = torch.exp(distance.square() / (-2 * sigma**2))
        return value.masked_fill_(distance.abs() > BLUR_DEVIATIONS * sigma, 0)

    weights = gaussian(row - column)
    # A face is a mirror through the centre of its voxel, so that voxel is not mirrored itself.
    weights[:, 1:] += gaussian(row + column[:, 1:])
    weights[:, :-1] += gaussian(2 * (voxels - 1) - row - column[:, :-1])
    return weights.div_(weights.sum(dim=1, keepdim=True)).float()


def _fewer(voxels: int, factor: float) -> int:
    """Return the number of large voxels."""
    return max(1, round(voxels * factor))


def _coarsening_reach(voxels: int, factor: float) -> int:
    """Return the reach of a voxel: up to the far faces of the two large voxels it is made from."""
    fewer = _fewer(voxels, factor)
    return math.ceil(1.5 * voxels / fewer) if fewer < voxels else 0


def _coarsening_matrix(voxels: int, fewer: int) -> Tensor:
    """Return (voxels, voxels): means over ``fewer`` equal parts, then their interpolation."""
    ratio = voxels / fewer
    large = torch.arange(fewer, dtype=torch.float64)[:, None]
    small = torch.arange(voxels, dtype=torch.float64)
    begin, end = torch.maximum(large * ratio, small), torch.minimum((large + 1) * ratio, small + 1)
    means = (end - begin).clamp_(min=0).div_(ratio)
    position = ((small + 0.5) / ratio - 0.5).clamp_(0, fewer - 1)
    interpolation = (1 - (position[:, None] - large.T).abs()).clamp_(min=0)
    with independent_of_threads(CPU):
        return (interpolation @ means).float()


def filtered(channels: Tensor, part: Part, matrices: Matrices) -> Tensor:
    """Return a part (R, X, Y, Z) of channels, filtered.

    Voxels within a filter's reach of a face of the part are wrong, if that face is inside the
    patch.
    """
    for matrix, first in zip(matrices, start_of(part.extent.made), strict=True):
        number, voxels, *others = channels.shape
        lines = channels.flatten(2).transpose(1, 2)
        if matrix is not None:
            inside = slice(first, first + voxels)
            lines = _multiplied(lines, matrix[:, inside, inside].transpose(1, 2))
        # The filtered axis is always the last one; three permutations restore the order.
        channels = lines.reshape(number, *others, voxels)
    return channels


def _multiplied(lines: Tensor, matrices: Tensor) -> Tensor:
    """Multiply (R, V, voxels) by (R, voxels, voxels), which are zero beyond a filter's reach."""
    voxels = lines.shape[2]
    chunk = CHUNK if lines.device.type == "cpu" else GPU_CHUNK
    if voxels <= chunk:
        return torch.bmm(lines, matrices)
    result = lines.new_empty(lines.shape)
    reach = farthest_reach(voxels)
    for first in range(0, voxels, chunk):
        last = min(first + chunk, voxels)
        near = slice(max(0, first - reach), min(voxels, last + reach))
        result[:, :, first:last] = torch.bmm(lines[:, :, near], matrices[:, near, first:last])
    return result
