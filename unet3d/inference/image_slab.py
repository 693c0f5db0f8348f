"""The planes of an image that windows reach, made when they do and forgotten after."""

from collections import deque
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.inference.windows import Windows
from unet3d.inputs.ahead import ahead

CPU = torch.device("cpu")


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
        self._first = self._end = 0  # planes of the padded volume that are there
        size = (image.num_channels, *windows.slab)
        self._planes = torch.zeros(size, dtype=dtype, device=device)
        self._ahead: tuple[tuple[int, int], Future[Tensor]] | None = None
        ends = (
            batch[-1][windows.axis] + windows.shape[windows.axis] for batch in windows.batches()
        )
        self._ends = deque(dict.fromkeys(ends))
        """Where the planes end that are asked for next."""

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
        axis, inside = self._windows.axis, self._windows.inside
        asked = self._needed(end)
        if asked is not None:
            place = list(inside)
            place[axis] = slice(asked[0] - self._first, asked[1] - self._first)
            self._planes[(slice(None), *place)] = self._made(asked)
        self._end = max(self._end, end)
        while self._ends and self._ends[0] <= self._end:
            self._ends.popleft()
        asked = self._needed(self._ends[0]) if self._ends else None
        if asked is not None and self._ahead is None:
            first, behind = self._of_image(asked)
            self._ahead = asked, ahead(lambda: self._image.planes(axis, first, behind))

    def _needed(self, end: int) -> tuple[int, int] | None:
        """Return the planes of the padded volume before ``end`` that must be made, if any."""
        along = self._windows.inside[self._windows.axis]
        low, high = max(self._end, along.start), min(end, along.stop)
        return (low, high) if low < high else None

    def _made(self, asked: tuple[int, int]) -> Tensor:
        begun, self._ahead = self._ahead, None
        if begun is not None and begun[0] == asked:
            return begun[1].result()
        return self._image.planes(self._windows.axis, *self._of_image(asked))

    def _of_image(self, planes: tuple[int, int]) -> tuple[int, int]:
        start = self._windows.inside[self._windows.axis].start
        return planes[0] - start, planes[1] - start


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
