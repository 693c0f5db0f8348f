"""Blur and loss of resolution: separable linear filters, a matrix of weights for each axis."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.volumes.augment.draw import Axes

BLUR_DEVIATIONS = 4.0
"""Where a Gaussian ends."""

CHUNK = 64
"""Rows of a matrix that are multiplied at a time: only few columns beside them are not zero."""


def blur(channel: Tensor, sigma: Axes, start: Shape, size: Shape) -> Tensor:
    """Return a box of a channel convolved with a Gaussian, reflected at the faces of the patch.

    Args:
        channel: float32 (X, Y, Z): the box. Where it ends within the patch, what lies closer to
            that face than :func:`blur_reach` is wrong.
        sigma: Standard deviation along each axis, in voxels.
        start: First voxel of the box along X, Y, Z in the patch.
        size: Voxels of the whole patch.
    """
    matrices = [
        _blur_matrix(voxels, deviation, channel.device) if voxels > 1 else None
        for voxels, deviation in zip(size, sigma, strict=True)
    ]
    return _filtered(channel, matrices, [blur_reach(deviation) for deviation in sigma], start)


def coarsen(channel: Tensor, resolution: Axes, start: Shape, size: Shape) -> Tensor:
    """Return a box of a channel as seen through fewer, larger voxels.

    Each large voxel is the mean over its box, as in a scanner, which moves nothing; taking the
    nearest voxel instead moves the image by up to half of a large one. Between large voxels the
    result is linear.

    Args:
        channel: float32 (X, Y, Z): the box; see :func:`blur` about its faces.
        resolution: Factor of the number of voxels along each axis, up to 1.
        start: First voxel of the box along X, Y, Z in the patch.
        size: Voxels of the whole patch.
    """
    matrices = [
        _coarsening_matrix(voxels, max(1, round(voxels * factor)), channel.device)
        if round(voxels * factor) < voxels
        else None
        for voxels, factor in zip(size, resolution, strict=True)
    ]
    return _filtered(channel, matrices, [coarsening_reach(f) for f in resolution], start)


def blur_reach(sigma: float) -> int:
    """Return from how many voxels away a blur takes.

    Args:
        sigma: Its standard deviation, in voxels.
    """
    return math.ceil(BLUR_DEVIATIONS * sigma)


def coarsening_reach(factor: float) -> int:
    """Return from how many voxels away a loss of resolution takes: two large voxels.

    Args:
        factor: Factor of the number of voxels.
    """
    return math.ceil(2 / factor) + 1 if factor < 1 else 0


def _blur_matrix(voxels: int, sigma: float, device: torch.device) -> Tensor:
    """Return (voxels, voxels): a Gaussian around each voxel, what leaves the axis mirrored."""
    place = torch.arange(voxels, dtype=torch.float64, device=device)
    row, column = place[:, None], place[None]

    def gaussian(distance: Tensor) -> Tensor:
        value = torch.exp(distance.square() / (-2 * sigma**2))
        return value.masked_fill_(distance.abs() > BLUR_DEVIATIONS * sigma, 0)

    weights = gaussian(row - column)
    # A face is a mirror through the centre of its voxel, so that voxel is not mirrored itself.
    weights[:, 1:] += gaussian(row + column[:, 1:])
    weights[:, :-1] += gaussian(2 * (voxels - 1) - row - column[:, :-1])
    return weights.div_(weights.sum(dim=1, keepdim=True)).float()


def _coarsening_matrix(voxels: int, fewer: int, device: torch.device) -> Tensor:
    """Return (voxels, voxels): means over ``fewer`` equal parts, then interpolation of these."""
    ratio = voxels / fewer
    large = torch.arange(fewer, dtype=torch.float64, device=device)
    small = torch.arange(voxels, dtype=torch.float64, device=device)
    begin = torch.maximum(large[:, None] * ratio, small)
    end = torch.minimum((large[:, None] + 1) * ratio, small + 1)
    means = (end - begin).clamp_(min=0).div_(ratio)
    position = ((small + 0.5) / ratio - 0.5).clamp_(0, fewer - 1)
    interpolation = (1 - (position[:, None] - large).abs()).clamp_(min=0)
    return (interpolation @ means).float()


def _filtered(
    channel: Tensor, matrices: Sequence[Tensor | None], reaches: Sequence[int], start: Shape
) -> Tensor:
    with _independent_of_threads(channel.device):
        for axis, (matrix, reach) in enumerate(zip(matrices, reaches, strict=True)):
            if matrix is not None:
                inside = slice(start[axis], start[axis] + channel.shape[axis])
                channel = _multiplied(channel, matrix[inside, inside], axis, reach)
    return channel


def _multiplied(channel: Tensor, matrix: Tensor, axis: int, reach: int) -> Tensor:
    """Multiply one axis of (X, Y, Z) by a matrix whose entries are zero beyond a distance."""
    result = torch.empty_like(channel)
    voxels = channel.shape[axis]
    for first in range(0, voxels, CHUNK):
        last = min(first + CHUNK, voxels)
        begin, end = max(0, first - reach), min(voxels, last + reach)
        weights, part = matrix[first:last, begin:end], channel.narrow(axis, begin, end - begin)
        place = result.narrow(axis, first, last - first)
        if axis == 0:
            torch.mm(weights, part.flatten(1), out=place.flatten(1))
        elif axis == 1:
            place.copy_(torch.matmul(weights, part))
        else:
            place.copy_(torch.matmul(part, weights.T))
    return result


@contextmanager
def _independent_of_threads(device: torch.device) -> Iterator[None]:
    """Multiply in one thread on a CPU: how a product is divided over threads changes its bits.

    A loading process has one thread, the training process several, and both make the same batches.
    """
    if device.type != "cpu" or torch.get_num_threads() == 1:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
