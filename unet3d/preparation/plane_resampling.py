"""Resampling of images and label maps to another voxel grid."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.preparation.interpolation import Order, in_memory, interpolated, line_matrix, reached

SOURCE_VOXELS = 2**24
"""Voxels that are interpolated at a time, unless a plane has more."""


class Resampling:
    """Interpolation of an image from one grid to another, some planes of the result at a time."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        new_shape: Shape,
        orders: tuple[Order, Order, Order],
        limits: Tensor | None = None,
        slice_axis: int | None = None,
    ) -> None:
        """Set it up for an image of a shape (C, X, Y, Z).

        Limits are the extremes of each channel, (C, 2, 1), to which it is clipped. Where there is
        an axis of slices, they are those of each slice, (C, 2, slices): slices are clipped, and
        interpolated across afterwards.
        """
        self._num_channels, *sizes = shape
        self._shape = (sizes[0], sizes[1], sizes[2])
        self._new_shape = new_shape
        self._orders = orders
        self._slice_axis = None if limits is None else slice_axis
        self._limits: list[Tensor] = []
        if limits is not None and self._shape != new_shape:
            along = [-1 if axis == slice_axis else 1 for axis in range(3)]
            self._limits = [one.reshape(len(limits), *along) for one in limits.unbind(1)]

    @property
    def best_axis(self) -> int:
        """The axis along which all planes together take least memory: what grows most is last."""
        return max(range(3), key=lambda axis: self._new_shape[axis] / self._shape[axis])

    def needed(self, axis: int, begin: int, end: int) -> slice:
        """Return the planes of the image that some planes of the result depend on."""
        if self._shape[axis] == self._new_shape[axis]:
            return slice(begin, end)
        return reached(self._matrix(axis)[begin:end])

    def planes(self, read: Callable[[slice], Tensor], axis: int, begin: int, end: int) -> Tensor:
        """Return some planes of the result, (C, X', Y', Z'), in any order of memory.

        ``read`` returns planes of the image along the axis in float32, (C, X, Y, Z), which may be
        changed.
        """
        source = self.needed(axis, begin, end)
        if self._shape == self._new_shape:
            return read(source)
        matrices = {
            1 + one: self._matrix(one)
            for one in range(3)
            if self._shape[one] != self._new_shape[one]
        }
        if 1 + axis in matrices:
            matrices[1 + axis] = matrices[1 + axis][begin:end, source]
        slices = self._slice_axis
        across = {} if slices is None else _taken(matrices, 1 + slices)  # once they are clipped
        of_plane = self._num_channels * math.prod(self._shape) // self._shape[axis]
        number = max(1, SOURCE_VOXELS // of_plane)
        firsts = range(source.start, source.stop, number)
        if len(firsts) == 1:
            result = interpolated(read(source), matrices)
        else:  # so many planes are interpolated each by itself before they are together
            along = _taken(matrices, 1 + axis)
            pieces = (slice(first, min(first + number, source.stop)) for first in firsts)
            within = (interpolated(read(piece), matrices) for piece in pieces)
            result = interpolated(_joined(within, 1 + axis, source.stop - source.start), along)
        if self._limits:
            lowest, highest = (
                (one[(slice(None),) * (1 + axis) + (source,)] if slices == axis else one).to(
                    result.device
                )
                for one in self._limits
            )
            result.clamp_(lowest, highest)
        return interpolated(result, across)

    def _matrix(self, axis: int) -> Tensor:
        return line_matrix(self._shape[axis], self._new_shape[axis], self._orders[axis])


def _taken(matrices: dict[int, Tensor], dim: int) -> dict[int, Tensor]:
    """Take the matrix of a dimension out of others, if there is one."""
    return {dim: matrices.pop(dim)} if dim in matrices else {}


def _joined(parts: Iterator[Tensor], dim: int, length: int) -> Tensor:
    """Return parts that follow each other along a dimension as one, in their order of memory."""
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

    No index arises that was not there. Interpolating the indices themselves would put class 2
    between classes 1 and 3; taking the nearest would leave stairs.
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
