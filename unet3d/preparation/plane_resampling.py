"""Resampling of an image to another voxel grid, some planes of the result at a time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from unet3d.config import Shape
from unet3d.images.files import times
from unet3d.images.memory_limits import refuse_beyond_memory
from unet3d.preparation.interpolation import Order, in_memory, interpolated, line_matrix, reached
from unet3d.preparation.resample import REMEDY, SOURCE_VOXELS, working_bytes


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the intensities of an image, or of each of its slices, stay within."""

    lowest: Tensor
    """Shape (C, 1, 1, 1), or along the axis of the slices as many as there are."""
    highest: Tensor
    """The same."""
    slice_axis: int | None
    """Of X, Y, Z, the one along which slices follow each other; None: one range for all voxels."""

    @classmethod
    def of(cls, ranges: Tensor, slice_axis: int | None) -> "Limits":
        """Return the limits of each channel's ranges, (C, 2, planes)."""
        shape = [-1 if axis == slice_axis else 1 for axis in range(3)]
        lowest, highest = (one.reshape(len(ranges), *shape) for one in ranges.unbind(1))
        return cls(lowest=lowest, highest=highest, slice_axis=slice_axis)


class Resampling:
    """Interpolation from one grid to another, of some planes of the result at a time."""

    def __init__(
        self,
        shape: Shape,
        new_shape: Shape,
        orders: tuple[Order, Order, Order],
        limits: Limits | None = None,
    ) -> None:
        """Set it up.

        Args:
            shape: Voxels along X, Y, Z of images.
            new_shape: Voxels along X, Y, Z of the results.
            orders: Of the interpolation along X, Y, Z.
            limits: What intensities are clipped to, before slices are interpolated across, and
                after all else.
        """
        self._shape = shape
        self._new_shape = new_shape
        self._orders = orders
        self._limits = limits
        self._matrices: dict[int, Tensor] = {}

    @property
    def best_axis(self) -> int:
        """The axis along which all planes together take least memory: what grows most is last."""
        return max(range(3), key=lambda axis: self._new_shape[axis] / self._shape[axis])

    def needed(self, axis: int, begin: int, end: int) -> slice:
        """Return the planes of the image that some planes of the result depend on.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of the result.
            end: The one after the last.
        """
        if self._shape[axis] == self._new_shape[axis]:
            return slice(begin, end)
        return reached(self._matrix(axis)[begin:end])

    def pieces(self, axis: int, begin: int, end: int, num_channels: int) -> list[slice]:
        """Return the same planes in the pieces in which :meth:`planes` takes them.

        Args:
            axis: As in :meth:`needed`.
            begin: As there.
            end: As there.
            num_channels: Channels of the image.
        """
        planes = self.needed(axis, begin, end)
        if self._shape == self._new_shape:
            return [planes]
        of_plane = num_channels * math.prod(self._shape) // self._shape[axis]
        number = max(1, SOURCE_VOXELS // of_plane)
        return [
            slice(first, min(first + number, planes.stop))
            for first in range(planes.start, planes.stop, number)
        ]

    def refuse_beyond_memory(self, axis: int, begin: int, end: int, num_channels: int) -> None:
        """Refuse planes for which the host's memory does not suffice.

        Args:
            axis: As in :meth:`pieces`.
            begin: As there.
            end: As there.
            num_channels: As there.

        Raises:
            VolumeError: It does not.
        """
        if self._shape == self._new_shape:
            return
        source = self.needed(axis, begin, end)
        have = _with(self._shape, axis, source.stop - source.start)
        shape = _with(self._new_shape, axis, end - begin)
        refuse_beyond_memory(
            working_bytes(have, shape, num_channels, math.prod(map(max, have, shape))),
            f"resampling {times(have)} voxels to {times(shape)}",
            REMEDY,
        )

    def planes(self, pieces: Iterable[Tensor], axis: int, begin: int, end: int) -> Tensor:
        """Return some planes of the result.

        Args:
            pieces: The planes of :meth:`pieces`, in float32, each of shape (C, X, Y, Z), on one
                device; they may be changed.
            axis: As there.
            begin: As there.
            end: As there.

        Returns:
            Shape (C, X', Y', Z'), on that device, in any order of memory.
        """
        source = self.needed(axis, begin, end)
        matrices = {
            1 + one: self._matrix(one)
            for one in range(3)
            if self._shape[one] != self._new_shape[one]
        }
        if 1 + axis in matrices:
            matrices[1 + axis] = matrices[1 + axis][begin:end, source]
        # Planes first, each by itself; then along the axis; across slices last, once they are
        # clipped.
        slices = self._limits.slice_axis if self._limits is not None else None
        across = {} if slices is None else _taken(matrices, 1 + slices)
        along = _taken(matrices, 1 + axis)
        within = (interpolated(piece, matrices) for piece in pieces)
        result = interpolated(_joined(within, 1 + axis, source.stop - source.start), along)
        if self._limits is not None and self._shape != self._new_shape:
            lowest, highest = self._limits.lowest, self._limits.highest
            if slices == axis:
                lowest, highest = (
                    one.narrow(1 + axis, source.start, source.stop - source.start)
                    for one in (lowest, highest)
                )
            result.clamp_(lowest.to(result.device), highest.to(result.device))
        return interpolated(result, across)

    def _matrix(self, axis: int) -> Tensor:
        """Return the weights along an axis, which take seconds to make where there are many."""
        if axis not in self._matrices:
            self._matrices[axis] = line_matrix(
                self._shape[axis], self._new_shape[axis], self._orders[axis]
            )
        return self._matrices[axis]


def _taken(matrices: dict[int, Tensor], dim: int) -> dict[int, Tensor]:
    """Take the matrix of a dimension out of others, if there is one."""
    return {dim: matrices.pop(dim)} if dim in matrices else {}


def _joined(parts: Iterable[Tensor], dim: int, length: int) -> Tensor:
    """Return parts that follow each other along a dimension as one, in their order of memory."""
    whole: Tensor | None = None
    first = 0
    for part in parts:
        planes = part.shape[dim]
        if planes == length:
            return part
        if whole is None:
            order = in_memory(part)
            shape = [length if one == dim else part.shape[one] for one in order]
            whole = part.new_empty(shape).permute([order.index(one) for one in range(part.ndim)])
        whole.narrow(dim, first, planes).copy_(part)
        first += planes
    if whole is None:
        raise ValueError("there are no parts")
    return whole


def _with(shape: Shape, axis: int, voxels: int) -> Shape:
    x, y, z = (voxels if one == axis else size for one, size in enumerate(shape))
    return (x, y, z)
