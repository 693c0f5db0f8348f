"""Interpolation of images, label maps and logits from one voxel grid to another.

Both grids cover the same box of space: voxels are cells, the outer *faces* coincide, and voxels
beyond the border repeat its values. Interpolation is linear in the voxels and separable, so it is
one small matrix per axis: SciPy's ``zoom`` of the identity with ``grid_mode=True``, which equals
PyTorch's ``interpolate`` with ``align_corners=False``. Logits are resampled back in the same way,
slab by slab.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.images.image import Box

Order = Literal[0, 1, 3]
"""Order of the splines: 0 takes the nearest voxel, 1 is linear, 3 cubic."""

NEGLIGIBLE_WEIGHT = 1e-8

BAND_ROWS = 64
"""Rows of a matrix to multiply at once: few enough to skip most of its zeros."""

KEPT_MATRICES = 16
"""Matrices to keep for further images, whose sizes are often equal; one from 512 to 1024 voxels
takes 2 MiB."""

SOURCE_VOXELS = 2**24
"""Most voxels of the image to read and interpolate at once; a single plane may have more."""

PIECE_NUMBERS = 2**24
"""Most logits to compute at once, counted on the finer grid; a single plane may have more."""


def nearest_voxels(size: int, new_size: int) -> Tensor:
    """Return the nearest old voxel's index for each new one; of two equally near, the second."""
    # The order of operations decides rounding for new voxels halfway between two old ones.
    centres = size / new_size * (torch.arange(new_size, dtype=torch.float64) + 0.5) - 0.5
    return (centres + 0.5).floor().long().clamp(0, size - 1)


@functools.lru_cache(maxsize=KEPT_MATRICES)
def line_matrix(size: int, new_size: int, order: Order) -> Tensor:
    """Return the weights of a line's old voxels in its new voxels, (new_size, size), on the CPU.

    A spline depends on all voxels of a line; weights below :data:`NEGLIGIBLE_WEIGHT`, of distant
    voxels, are set to 0.
    """
    if size == new_size:
        return torch.eye(size)
    if order == 0:
        return torch.nn.functional.one_hot(nearest_voxels(size, new_size), size).float()
    from scipy import ndimage  # takes a third of a second; only resampling needs it

    rows = [
        ndimage.zoom(column, new_size / size, order=order, mode="nearest", grid_mode=True)
        for column in np.eye(size)
    ]
    matrix = np.stack(rows, axis=1).astype(np.float32)
    # The weights of a spline shrink by a factor of four with each voxel, down to denormal numbers,
    # which slow multiplication tenfold and are too small to change a float32 result.
    matrix[np.abs(matrix) < NEGLIGIBLE_WEIGHT] = 0
    return torch.from_numpy(matrix)


def reached(matrix: Tensor) -> slice:
    """Return the columns of a matrix from the first to the last that are not zero."""
    columns = torch.nonzero(matrix.any(dim=0)).flatten()
    return slice(int(columns[0]), int(columns[-1]) + 1)


def interpolated(array: Tensor, matrices: Mapping[int, Tensor]) -> Tensor:
    """Multiply dimensions of an array by matrices, on its device and in its type.

    The result has the memory order of the array.
    """
    order = in_memory(array)
    array = array.permute(order).contiguous()  # a copy only if it has gaps
    # Matrices that make the array smaller come first.
    for dim, matrix in sorted(matrices.items(), key=lambda one: one[1].shape[0] / one[1].shape[1]):
        array = _multiplied(array, order.index(dim), matrix)
    return array.permute([order.index(dim) for dim in range(array.ndim)])


def in_memory(array: Tensor) -> list[int]:
    """Return the dimensions of an array from the slowest in memory to the fastest."""
    return sorted(range(array.ndim), key=array.stride, reverse=True)


def _multiplied(array: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """Multiply a dimension of a contiguous array, without copying it; the result is contiguous."""
    before, after = array.shape[:dim], array.shape[dim + 1 :]
    lines = array.reshape(math.prod(before), array.shape[dim], math.prod(after))
    result = array.new_empty(len(lines), len(matrix), lines.shape[2])
    weights = matrix.to(array)
    for first in range(0, len(matrix), BAND_ROWS):
        rows = slice(first, first + BAND_ROWS)
        columns = reached(matrix[rows])
        band, source, made = weights[rows, columns], lines[:, columns], result[:, rows]
        if len(lines) == 1:
            torch.mm(band, source[0], out=made[0])
        elif lines.shape[2] == 1:
            torch.mm(source[..., 0], band.T, out=made[..., 0])
        else:
            torch.bmm(band.expand(len(lines), -1, -1), source, out=made)
    return result.view(*before, len(matrix), *after)


@dataclass(frozen=True, eq=False)
class Resampling:
    """Interpolation of an image from one grid to another, some planes of the result at a time."""

    shape: tuple[int, int, int, int]
    """Shape of the image, (C, X, Y, Z)."""
    new_shape: Shape
    matrices: Mapping[int, Tensor]
    """Weights along each axis X, Y, Z (0, 1, 2) that changes, as of :func:`line_matrix`."""
    limits: Tensor | None = None
    """Lowest and highest value of each channel, for clipping, (C, 2, 1); with a slice axis, of each
    slice, (C, 2, slices): slices are clipped before interpolation across them."""
    slice_axis: int | None = None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int, int],
        new_shape: Shape,
        orders: tuple[Order, Order, Order],
        limits: Tensor | None = None,
        slice_axis: int | None = None,
    ) -> "Resampling":
        """Return the interpolation of an image (C, X, Y, Z) with splines of some orders."""
        each = enumerate(zip(shape[1:], new_shape, orders, strict=True))
        matrices = {axis: line_matrix(*one) for axis, one in each if one[0] != one[1]}
        return cls(shape, new_shape, matrices, limits, slice_axis)

    def within(self, box: Box) -> "tuple[Box, Resampling]":
        """Return the interpolation of a box of the result, and the box of the image it needs."""
        begins = [self.needed(axis, part.start, part.stop) for axis, part in enumerate(box)]
        x, y, z = (part.stop - part.start for part in begins)
        matrices = {axis: matrix[box[axis], begins[axis]] for axis, matrix in self.matrices.items()}
        limits = self.limits
        if limits is not None and self.slice_axis is not None:
            limits = limits[..., begins[self.slice_axis]]
        new_x, new_y, new_z = (part.stop - part.start for part in box)
        part = Resampling(
            (self.shape[0], x, y, z), (new_x, new_y, new_z), matrices, limits, self.slice_axis
        )
        return (begins[0], begins[1], begins[2]), part

    @property
    def best_axis(self) -> int:
        """The axis that grows most; interpolating it last takes the least memory."""
        return max(range(3), key=lambda axis: self.new_shape[axis] / self.shape[1 + axis])

    def needed(self, axis: int, begin: int, end: int) -> slice:
        """Return the planes of the image that some planes of the result depend on."""
        matrix = self.matrices.get(axis)
        return slice(begin, end) if matrix is None else reached(matrix[begin:end])

    def planes(self, read: Callable[[slice], Tensor], axis: int, begin: int, end: int) -> Tensor:
        """Return some planes of the result, (C, X', Y', Z'), in any memory order.

        ``read`` returns planes of the image along the axis, float32 (C, X, Y, Z), which may be
        modified in place.
        """
        source = self.needed(axis, begin, end)
        num_channels, *sizes = self.shape
        if not self.matrices:
            return read(source)
        matrices = {1 + one: matrix for one, matrix in self.matrices.items()}
        if 1 + axis in matrices:
            matrices[1 + axis] = matrices[1 + axis][begin:end, source]
        slices = None if self.limits is None else self.slice_axis
        across = {} if slices is None else _taken(matrices, 1 + slices)  # applied after clipping
        of_plane = num_channels * math.prod(sizes) // sizes[axis]
        number = max(1, SOURCE_VOXELS // of_plane)
        firsts = range(source.start, source.stop, number)
        if len(firsts) == 1:
            result = interpolated(read(source), matrices)
        else:  # pieces are interpolated within planes, then joined, then interpolated along axis
            along = _taken(matrices, 1 + axis)
            pieces = (slice(first, min(first + number, source.stop)) for first in firsts)
            within = (interpolated(read(piece), matrices) for piece in pieces)
            result = interpolated(_joined(within, 1 + axis, source.stop - source.start), along)
        if self.limits is not None:
            limits = self.limits[..., source] if slices == axis else self.limits
            size = (num_channels, *(-1 if one == slices else 1 for one in range(3)))
            lowest, highest = (one.reshape(size) for one in limits.to(result.device).unbind(1))
            result.clamp_(lowest, highest)
        return interpolated(result, across)


def _taken(matrices: dict[int, Tensor], dim: int) -> dict[int, Tensor]:
    """Remove the matrix of a dimension, if there is one, and return it by its dimension."""
    return {dim: matrices.pop(dim)} if dim in matrices else {}


def _joined(parts: Iterator[Tensor], dim: int, length: int) -> Tensor:
    """Concatenate parts along a dimension, in their memory order."""
    part = next(parts)
    first = part.shape[dim]
    order = in_memory(part)
    shape = [length if one == dim else part.shape[one] for one in order]
    whole = part.new_empty(shape).permute([order.index(one) for one in range(part.ndim)])
    whole.narrow(dim, 0, first).copy_(part)
    for part in parts:
        whole.narrow(dim, first, part.shape[dim]).copy_(part)
        first += part.shape[dim]
    return whole


def resample_classes(
    classes: npt.NDArray[np.unsignedinteger], shape: Shape
) -> npt.NDArray[np.unsignedinteger]:
    """Resample class indices (X, Y, Z): each class linearly as a mask; the strongest one wins.

    No new indices arise. Interpolating indices would put class 2 between classes 1 and 3;
    nearest-neighbour interpolation would leave stairs.
    """
    if classes.shape == shape:
        return classes
    from scipy import ndimage

    matrices = [
        line_matrix(size, new_size, 1) for size, new_size in zip(classes.shape, shape, strict=True)
    ]
    changed = [axis for axis in range(3) if classes.shape[axis] != shape[axis]]
    result = np.zeros(shape, classes.dtype)
    background = torch.from_numpy((classes == 0).astype(np.float32))
    strongest = interpolated(background, {axis: matrices[axis] for axis in changed}).numpy()
    for index, box in enumerate(ndimage.find_objects(classes), start=1):
        if box is None:
            continue
        # Only the box of the class, and the part of the new grid that it reaches, can change.
        inner = [matrix[:, axis] for matrix, axis in zip(matrices, box, strict=True)]
        if not all(matrix.any() for matrix in inner):
            continue
        reach = tuple(reached(matrix.T) for matrix in inner)
        mask = torch.from_numpy((classes[box] == index).astype(np.float32))
        strength = interpolated(mask, {axis: inner[axis][reach[axis]] for axis in changed}).numpy()
        wins = strength > strongest[reach]
        result[reach][wins] = index
        strongest[reach][wins] = strength[wins]
    return result


def restored_slabs(slabs: Iterable[Tensor], axis: int, resampling: Resampling) -> Iterator[Tensor]:
    """Yield logits on the grid of the original image, each plane as soon as it is complete.

    The slabs (K, X, Y, Z), on any device, follow each other along ``axis`` and together cover the
    grid that is resampled. If nothing changes, they are the results.
    """
    if not resampling.matrices:
        yield from slabs
        return
    dim = 1 + axis
    grid, shape = resampling.shape[1:], resampling.new_shape
    matrices = {1 + one: matrix for one, matrix in resampling.matrices.items()}
    along = matrices.pop(dim, torch.eye(grid[axis]))
    ends = grid[axis] - (along != 0).flip(1).int().argmax(1)  # end of each plane's source planes
    kept: Tensor | None = None
    first = done = 0  # index of the first kept plane; number of planes of the result so far
    for slab in slabs:
        kept = slab if kept is None else torch.cat([kept, slab], dim)
        known = int(torch.searchsorted(ends, first + kept.shape[dim], right=True))
        # A plane first has voxels of the network's grid, then of the image's.
        voxels = max(math.prod(one) // one[axis] for one in (grid, shape))
        num_planes = max(1, PIECE_NUMBERS // (len(kept) * voxels))
        for begin in range(done, known, num_planes):
            rows = along[begin : min(begin + num_planes, known)]
            planes = reached(rows)
            own = kept.narrow(dim, planes.start - first, planes.stop - planes.start)
            yield interpolated(own, {**matrices, dim: rows[:, planes]})
        done = known
        if done < shape[axis]:
            spent = min(reached(along[done:]).start - first, kept.shape[dim])
            kept, first = kept.narrow(dim, spent, kept.shape[dim] - spent), first + spent
