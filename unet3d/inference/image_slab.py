"""The planes of an image that windows reach, made when they do and forgotten after."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.inference.windows import Windows
from unet3d.inputs.ahead import ahead

CPU = torch.device("cpu")

PIECE_VOXELS = 2**25
"""Voxels that are made at a time, unless a plane has more."""


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

    def planes(self, axis: int, begin: int, end: int, device: torch.device = CPU) -> Tensor:
        """Return some planes, shape (C, X, Y, Z), which are there; on any device.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of them.
            end: The one after the last.
            device: Where they are wanted; there they are made, if they are made.
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

    def planes(self, axis: int, begin: int, end: int, device: torch.device = CPU) -> Tensor:
        """Return some planes, without a copy, wherever they are.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of them.
            end: The one after the last.
            device: Makes no difference.
        """
        return self._image.narrow(1 + axis, begin, end - begin)


class ImageSlab:
    """Cuts windows, in their order, from the planes of an image that they reach.

    The next planes are made while windows of these are computed.
    """

    def __init__(
        self,
        image: Planes,
        windows: Windows,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        """Begin before the first window.

        Args:
            image: The image; a thread may ask it for planes.
            windows: Its windows.
            dtype: What the network expects.
            device: Where windows are cut, best the one that computes them: each voxel is in several
                of them, and is sent there once.
        """
        self._image = image
        self._windows = windows
        self._first = 0
        """The plane of the padded volume with which those begin that are there."""
        size = (image.num_channels, *windows.slab)
        self._planes = torch.zeros(size, dtype=dtype, device=device)
        self._missing = deque(_pieces(windows))
        """Planes of the padded volume that are to be made, in their order."""
        self._ahead: Future[Tensor] | None = None
        """The first of them, if it is being made."""

    def cut(self, starts: list[tuple[int, ...]]) -> Tensor:
        """Return windows, shape (N, C, X, Y, Z), outside of the image 0.

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
        axis = self._windows.axis
        place = list(self._windows.inside)
        while self._missing and self._missing[0][0] < end:
            begun, self._ahead = self._ahead or self._begun(), None
            first, behind = self._missing.popleft()
            place[axis] = slice(first - self._first, behind - self._first)
            made = begun.result()
            if made.is_cuda:  # on another stream, which may have its memory back after this
                made.record_stream(torch.cuda.current_stream(made.device))
            self._planes[(slice(None), *place)] = made
            del begun, made
            if self._missing:
                self._ahead = self._begun()

    def _begun(self) -> "Future[Tensor]":
        """Begin to make the next planes."""
        axis = self._windows.axis
        start = self._windows.inside[axis].start
        first, behind = (plane - start for plane in self._missing[0])
        return ahead(lambda: self._image.planes(axis, first, behind, self._planes.device))


def _pieces(windows: Windows) -> Iterator[tuple[int, int]]:
    """Yield the planes of the padded volume, as far as the image goes, that are made at a time."""
    axis = windows.axis
    along, reach = windows.inside[axis], windows.shape[axis]
    most = max(1, PIECE_VOXELS * windows.size[axis] // math.prod(windows.size))
    first = along.start
    for batch in windows.batches():
        end = min(batch[-1][axis] + reach, along.stop)
        while first < end:
            behind = min(first + most, end)
            yield first, behind
            first = behind


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
