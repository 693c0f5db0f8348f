"""Blur and loss of resolution: separable linear filters, a matrix of weights for each axis.

The matrices are worked out where a patch is cut: on a GPU that takes more launches than all else.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.patches.augment.draw import (
    BLUR_SIGMA_VOXELS,
    LOW_RESOLUTION_RANGE,
    Axes,
    DrawnChannel,
)

BLUR_DEVIATIONS = 4.0
"""Where a Gaussian ends."""

CHUNK = 64
"""Rows of a matrix that a CPU multiplies at a time: only few columns beside them are not zero."""
GPU_CHUNK = 256
"""The same for a GPU, where a launch costs more than zeros."""

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class Filter:
    """A linear filter of some axes."""

    matrices: dict[int, Tensor]
    """float32 (voxels, voxels), by which an axis of a patch is multiplied."""
    reach: tuple[int, ...] = (0, 0, 0)
    """From how many voxels away each axis takes; the matrices are zero beyond."""

    def each(self, move: Callable[[Tensor], Tensor]) -> "Filter":
        """Return the filter with its matrices elsewhere."""
        matrices = {axis: move(matrix) for axis, matrix in self.matrices.items()}
        return Filter(matrices=matrices, reach=self.reach)

    def applied(self, channel: Tensor, start: Shape) -> Tensor:
        """Return a box of a channel (X, Y, Z) that begins at a voxel of the patch, filtered.

        Where the box ends within the patch, what lies closer to that face than :attr:`reach` is
        wrong.
        """
        for axis, matrix in self.matrices.items():
            inside = slice(start[axis], start[axis] + channel.shape[axis])
            channel = _multiplied(channel, matrix[inside, inside], axis, self.reach[axis])
        return channel


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelFilters:
    """The filters of one channel, which may have no axes."""

    blur: Filter
    coarsening: Filter

    @staticmethod
    def of(drawn: DrawnChannel, size: Shape) -> "ChannelFilters":
        """Return the filters that were drawn for a channel of a patch of a size."""
        sigma = drawn.blur_sigma
        return ChannelFilters(
            blur=Filter(matrices={}) if sigma is None else blur_filter(sigma, size),
            coarsening=coarsening_filter(drawn.resolution, size),
        )

    def each(self, move: Callable[[Tensor], Tensor]) -> "ChannelFilters":
        """Return the filters with their matrices elsewhere."""
        return ChannelFilters(blur=self.blur.each(move), coarsening=self.coarsening.each(move))

    def reach(self, axis: int) -> int:
        """Return from how many voxels away the channel takes along an axis."""
        return self.blur.reach[axis] + self.coarsening.reach[axis]


def blur_filter(sigma: Axes, size: Shape) -> Filter:
    """Return the convolution with a Gaussian of deviations in voxels, mirrored at the faces."""
    matrices = {
        axis: _blur_matrix(voxels, sigma[axis]) for axis, voxels in enumerate(size) if voxels > 1
    }
    reach = tuple(math.ceil(BLUR_DEVIATIONS * deviation) for deviation in sigma)
    return Filter(matrices=matrices, reach=reach)


def coarsening_filter(resolution: Axes, size: Shape) -> Filter:
    """Return the view through fewer, larger voxels: their number is that of the patch by a factor.

    Each large voxel is the mean over its box, as in a scanner, which moves nothing; taking the
    nearest voxel instead moves the image by up to half of a large one. Between large voxels the
    result is linear.
    """
    matrices = {
        axis: _coarsening_matrix(voxels, fewer)
        for axis, voxels in enumerate(size)
        if (fewer := _fewer(voxels, resolution[axis])) < voxels
    }
    return Filter(matrices=matrices, reach=tuple(map(_coarsening_reach, size, resolution)))


def farthest_reach(voxels: int, blurs: bool, coarsens: bool) -> int:
    """Return from how many voxels away a channel takes at most, along an axis of a patch."""
    blur = math.ceil(BLUR_DEVIATIONS * BLUR_SIGMA_VOXELS[1])
    return blur * blurs + _coarsening_reach(voxels, LOW_RESOLUTION_RANGE[0]) * coarsens


@contextmanager
def independent_of_threads(device: torch.device) -> Iterator[None]:
    """Compute in one thread on a CPU, so that the bits do not depend on how many there are.

    How work is divided over threads changes the bits of matrix products, of sums to one number and
    of powers, whose last voxels in each thread go through other code than the rest. A loading
    process has one thread, the training process several, and both make the same batches.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
