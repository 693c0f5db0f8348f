"""The planes of an image that windows reach, made when they do and forgotten after."""

from typing import Protocol

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.inference.windows import Windows


class Planes(Protocol):
    """An image of which some planes can be had."""

    @property
    def shape(self) -> Shape:
        """Voxels along X, Y, Z."""
        ...

    @property
    def num_channels(self) -> int:
        """Channels."""
        ...

    def planes(self, axis: int, begin: int, end: int) -> Tensor:
        """Return some planes, shape (C, X, Y, Z), on any device.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of them.
            end: The one after the last.
        """
        ...


class WholeImage:
    """An image of which all planes are there."""

    def __init__(self, image: Tensor) -> None:
        """Take the image.

        Args:
            image: Shape (C, X, Y, Z).
        """
        self._image = image

    @property
    def shape(self) -> Shape:
        """Voxels along X, Y, Z."""
        x, y, z = self._image.shape[1:]
        return (x, y, z)

    @property
    def num_channels(self) -> int:
        """Channels."""
        return len(self._image)

    def planes(self, axis: int, begin: int, end: int) -> Tensor:
        """Return some planes, without a copy.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of them.
            end: The one after the last.
        """
        return self._image.narrow(1 + axis, begin, end - begin)


class ImageSlab:
    """Cuts windows, in their order, from the planes of an image that they reach."""

    def __init__(self, image: Planes, windows: Windows, dtype: torch.dtype) -> None:
        """Begin before the first window.

        Args:
            image: The image.
            windows: Its windows.
            dtype: What the network expects.
        """
        self._image = image
        self._windows = windows
        self._first = self._end = 0  # planes of the padded volume that are there
        self._planes = torch.zeros((image.num_channels, *windows.slab), dtype=dtype)

    def cut(self, starts: list[tuple[int, ...]]) -> Tensor:
        """Return windows, shape (N, C, X, Y, Z), on the CPU, outside of the image 0.

        That is the mean of a prepared image.

        Args:
            starts: Where they start; each call begins where the last one did, or behind it.
        """
        windows = self._windows
        axis = windows.axis
        begin, end = starts[0][axis], starts[-1][axis] + windows.shape[axis]
        if begin > self._first:
            drop_planes(self._planes, 1 + axis, begin - self._first)
            self._first = begin
        self._fill(end)
        cut = [self._planes[(slice(None), *windows.place(start, self._first))] for start in starts]
        # Of the whole volume no copy is needed.
        return torch.stack(cut) if len(windows.starts) > 1 else cut[0].unsqueeze(0)

    def _fill(self, end: int) -> None:
        """Make the planes before ``end`` that are not there."""
        axis, inside = self._windows.axis, self._windows.inside
        along = inside[axis]
        low, high = max(self._end, along.start), min(end, along.stop)
        if low < high:
            place = list(inside)
            place[axis] = slice(low - self._first, high - self._first)
            planes = self._image.planes(axis, low - along.start, high - along.start)
            self._planes[(slice(None), *place)] = planes
        self._end = max(self._end, end)


def drop_planes(tensor: Tensor, dim: int, number: int) -> None:
    """Move the planes after the first ones to the front, and set the last ones to 0.

    Args:
        tensor: Of any shape; changed in place.
        dim: The dimension along which the planes follow each other.
        number: How many are dropped, at most all of them.
    """
    kept = tensor.shape[dim] - number
    for first in range(0, kept, number):  # no piece is moved onto itself
        length = min(number, kept - first)
        moved = tensor.narrow(dim, first + number, length)
        tensor.narrow(dim, first, length).copy_(moved)
    tensor.narrow(dim, kept, number).zero_()
