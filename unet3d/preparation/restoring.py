"""Logits back on the grid of the image, slab after slab.

Both grids cover the same box of space, and interpolation is trilinear as PyTorch's is with
``align_corners=False``: first along the axis of the slabs, from the two planes around each, then
within the planes. Across thick slices it may take the nearest instead, as nnU-Net does. How the
logits are divided into slabs changes no more than the rounding.
"""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as functional
from torch import Tensor

from unet3d.config import Shape
from unet3d.preparation.interpolation import centres, nearest_voxels

PIECE_NUMBERS = 2**24
"""Numbers that are made at a time, of the finer planes, unless a single one has more."""


def restored_slabs(
    slabs: Iterable[Tensor],
    axis: int,
    grid: Shape,
    shape: Shape,
    nearest_axis: int | None = None,
) -> Iterator[Tensor]:
    """Yield logits on the grid of the original image, each plane as soon as it is known.

    The slabs (K, X, Y, Z), on any device, follow each other along the axis and have all voxels of
    the grid together; the results have all of the shape. If both are one, they are the slabs. Along
    the nearest axis the nearest plane is taken.
    """
    if grid == shape:
        yield from slabs
        return
    dim = 1 + axis
    below, above, share = _neighbours(grid[axis], shape[axis], axis == nearest_axis)
    kept: Tensor | None = None
    first = done = 0  # plane with which the kept ones begin; planes of the result
    for slab in slabs:
        kept = slab if kept is None else torch.cat([kept, slab], dim)
        known = int(torch.searchsorted(above, first + kept.shape[dim]))
        # A plane is made of the network's voxels first, and of these the image's.
        voxels = max(math.prod(one) // one[axis] for one in (grid, shape))
        num_planes = max(1, PIECE_NUMBERS // (len(kept) * voxels))
        for begin in range(done, known, num_planes):
            part = slice(begin, min(begin + num_planes, known))
            along = _between(kept, dim, below[part] - first, above[part] - first, share[part])
            yield _within_planes(along, axis, shape, nearest_axis)
        done = known
        if done < shape[axis]:
            spent = min(int(below[done]) - first, kept.shape[dim])
            kept, first = kept.narrow(dim, spent, kept.shape[dim] - spent), first + spent


def _neighbours(size: int, new_size: int, is_nearest: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the planes around each new one, and how much of the way it is to the second."""
    if is_nearest:
        nearest = nearest_voxels(size, new_size)
        return nearest, nearest, torch.zeros(new_size, dtype=torch.float64)
    places = centres(size, new_size).clamp(0, size - 1)
    below = places.floor().long()
    return below, (below + 1).clamp_max(size - 1), places - below


def _between(logits: Tensor, dim: int, below: Tensor, above: Tensor, share: Tensor) -> Tensor:
    first, second, weight = (one.to(logits.device) for one in (below, above, share))
    if not share.any():
        return logits.index_select(dim, first)
    weight = weight.to(logits.dtype).reshape([-1 if one == dim else 1 for one in range(4)])
    return torch.lerp(logits.index_select(dim, first), logits.index_select(dim, second), weight)


def _within_planes(logits: Tensor, axis: int, shape: Shape, nearest_axis: int | None) -> Tensor:
    """Interpolate planes to the shape; along the nearest axis voxels are taken instead."""
    size = [
        logits.shape[1 + other] if other == nearest_axis else shape[other]
        for other in range(3)
        if other != axis
    ]
    planes = logits.movedim(1 + axis, 1)
    if list(planes.shape[2:]) != size:
        planes = functional.interpolate(planes, size=size, mode="bilinear", align_corners=False)
        logits = planes.movedim(1, 1 + axis)
    if nearest_axis is None or nearest_axis == axis:
        return logits
    nearest = nearest_voxels(logits.shape[1 + nearest_axis], shape[nearest_axis])
    return logits.index_select(1 + nearest_axis, nearest.to(logits.device))
