"""Blur and loss of resolution: separable linear filters, a matrix of weights for each axis.

The matrices are worked out where a patch is cut: on a GPU that takes more launches than all else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.patches.augment.draw import (
    BLUR_SIGMA_VOXELS,
    LOW_RESOLUTION_RANGE,
    STILL,
    Axes,
    DrawnChannel,
)
from unet3d.patches.augment.threads import independent_of_threads

BLUR_DEVIATIONS = 4.0
"""Where a Gaussian ends."""

CHUNK = 64
"""Rows of a matrix that a CPU multiplies at a time: only few columns beside them are not zero."""
GPU_CHUNK = 256
"""The same for a GPU, where a launch costs more than zeros."""

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class Filter:
    """A linear filter of each axis."""

    matrices: tuple[Tensor | None, Tensor | None, Tensor | None]
    """For X, Y, Z float32 (voxels, voxels), by which that axis of a patch is multiplied; None: it
    stays as it is."""
    reach: Shape
    """From how many voxels away each axis takes; the matrices are zero beyond."""

    def each(self, move: Callable[[Tensor], Tensor]) -> "Filter":
        """Return the filter with its matrices elsewhere.

        Args:
            move: Returns a copy of a matrix.
        """
        x, y, z = (None if matrix is None else move(matrix) for matrix in self.matrices)
        return Filter(matrices=(x, y, z), reach=self.reach)

    def applied(self, channel: Tensor, start: Shape) -> Tensor:
        """Return a box of a channel, filtered.

        Args:
            channel: float32 (X, Y, Z): the box. Where it ends within the patch, what lies closer to
                that face than :attr:`reach` is wrong.
            start: First voxel of the box along X, Y, Z in the patch.
        """
        for axis, (matrix, reach) in enumerate(zip(self.matrices, self.reach, strict=True)):
            if matrix is not None:
                inside = slice(start[axis], start[axis] + channel.shape[axis])
                channel = _multiplied(channel, matrix[inside, inside], axis, reach)
        return channel


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelFilters:
    """The filters of one channel."""

    blur: Filter | None
    """None: it is not blurred."""
    coarsening: Filter | None
    """None: it keeps its resolution."""

    @staticmethod
    def of(drawn: DrawnChannel, size: Shape) -> "ChannelFilters":
        """Return the filters that were drawn.

        Args:
            drawn: What happens to the channel.
            size: Voxels of the patch along X, Y, Z.
        """
        return ChannelFilters(
            blur=None if drawn.blur_sigma is None else blur_filter(drawn.blur_sigma, size),
            coarsening=(
                None if drawn.resolution == STILL else coarsening_filter(drawn.resolution, size)
            ),
        )

    def each(self, move: Callable[[Tensor], Tensor]) -> "ChannelFilters":
        """Return the filters with their matrices elsewhere.

        Args:
            move: Returns a copy of a matrix.
        """
        return ChannelFilters(
            blur=self.blur and self.blur.each(move),
            coarsening=self.coarsening and self.coarsening.each(move),
        )

    def reach(self, axis: int) -> int:
        """Return from how many voxels away the channel takes along an axis.

        Args:
            axis: 0 to 2.
        """
        return sum(one.reach[axis] for one in (self.blur, self.coarsening) if one is not None)


def blur_filter(sigma: Axes, size: Shape) -> Filter:
    """Return the convolution with a Gaussian, reflected at the faces of the patch.

    Args:
        sigma: Standard deviation along each axis, in voxels.
        size: Voxels of the patch.
    """
    x, y, z = (
        _blur_matrix(voxels, deviation) if voxels > 1 else None
        for voxels, deviation in zip(size, sigma, strict=True)
    )
    a, b, c = (math.ceil(BLUR_DEVIATIONS * deviation) for deviation in sigma)
    return Filter(matrices=(x, y, z), reach=(a, b, c))


def coarsening_filter(resolution: Axes, size: Shape) -> Filter:
    """Return the view through fewer, larger voxels.

    Each large voxel is the mean over its box, as in a scanner, which moves nothing; taking the
    nearest voxel instead moves the image by up to half of a large one. Between large voxels the
    result is linear.

    Args:
        resolution: Factor of the number of voxels along each axis, up to 1.
        size: Voxels of the patch.
    """
    x, y, z = (
        _coarsening_matrix(voxels, less) if (less := _fewer(voxels, factor)) < voxels else None
        for voxels, factor in zip(size, resolution, strict=True)
    )
    a, b, c = (
        _coarsening_reach(voxels, factor) for voxels, factor in zip(size, resolution, strict=True)
    )
    return Filter(matrices=(x, y, z), reach=(a, b, c))


def farthest_reach(voxels: int, blurs: bool, coarsens: bool) -> int:
    """Return from how many voxels away a channel takes along an axis at most.

    Args:
        voxels: Of the patch along the axis.
        blurs: Whether it may be blurred.
        coarsens: Whether it may lose resolution.
    """
    blur = math.ceil(BLUR_DEVIATIONS * BLUR_SIGMA_VOXELS[1])
    return blur * blurs + _coarsening_reach(voxels, LOW_RESOLUTION_RANGE[0]) * coarsens


def _blur_matrix(voxels: int, sigma: float) -> Tensor:
    """Return (voxels, voxels): a Gaussian around each voxel, what leaves the axis mirrored."""
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
    """Return how many large voxels take the place of others."""
    return max(1, round(voxels * factor))


def _coarsening_reach(voxels: int, factor: float) -> int:
    """Return how far a voxel takes: from two large ones, with far faces 1.5 of them away."""
    fewer = _fewer(voxels, factor)
    return math.ceil(1.5 * voxels / fewer) if fewer < voxels else 0


def _coarsening_matrix(voxels: int, fewer: int) -> Tensor:
    """Return (voxels, voxels): means over ``fewer`` equal parts, then interpolation of these."""
    ratio = voxels / fewer
    large = torch.arange(fewer, dtype=torch.float64)[:, None]
    small = torch.arange(voxels, dtype=torch.float64)
    begin, end = torch.maximum(large * ratio, small), torch.minimum((large + 1) * ratio, small + 1)
    means = (end - begin).clamp_(min=0).div_(ratio)
    position = ((small + 0.5) / ratio - 0.5).clamp_(0, fewer - 1)
    interpolation = (1 - (position[:, None] - large.T).abs()).clamp_(min=0)
    with independent_of_threads(CPU):
        return (interpolation @ means).float()


def _multiplied(channel: Tensor, matrix: Tensor, axis: int, reach: int) -> Tensor:
    """Multiply one axis of (X, Y, Z) by a matrix whose entries are zero beyond a distance."""
    voxels = channel.shape[axis]
    chunk = CHUNK if channel.device.type == "cpu" else GPU_CHUNK
    if voxels <= chunk:
        return _product(matrix, channel, axis)
    result = torch.empty_like(channel)
    for first in range(0, voxels, chunk):
        last = min(first + chunk, voxels)
        begin, end = max(0, first - reach), min(voxels, last + reach)
        part = channel.narrow(axis, begin, end - begin)
        product = _product(matrix[first:last, begin:end], part, axis)
        result.narrow(axis, first, last - first).copy_(product)
    return result


def _product(matrix: Tensor, channel: Tensor, axis: int) -> Tensor:
    if axis == 0:
        return torch.mm(matrix, channel.flatten(1)).view(-1, *channel.shape[1:])
    return torch.matmul(matrix, channel) if axis == 1 else torch.matmul(channel, matrix.T)
