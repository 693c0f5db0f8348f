"""The voxels of an image, which stay as they are stored until some of them are asked for.

A scan of 16-bit numbers takes half of what it would take in float32, and one that is mapped takes
nothing. What depends on the whole image is found piece by piece; in integers of at most 16 bits
every intensity is counted instead, once, and all that is asked of them later is found in a table of
at most 65536 rows.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from nibabel.volumeutils import apply_read_scaling

from unet3d.config import Shape
from unet3d.distributed.ranks import num_cores
from unet3d.images.scratch import forget_pages

PIECE_VOXELS = 2**20
"""Voxels that a thread looks at together."""

MOST_THREADS = 8
"""Memory is no faster for more."""

TABLE_BYTES = 2
"""Integers of at most so many bytes are counted, each value for itself."""

SENT_AS_STORED = (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.int16))
"""Types that are smaller than float32 and known to every device."""

Values = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

Found = TypeVar("Found")

Measure = Callable[[Values, Counts | None], Found]
"""Looks at intensities, each of which is there as often as the counts say, or once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredChannels:
    """Channels as one file stores them."""

    voxels: npt.NDArray[Any]
    """(C, X, Y, Z) in RAS: a view of what is stored, which nobody may change."""
    slope: float = 1.0
    inter: float = 0.0
    tables: dict[int, tuple[Values, Counts]] = field(default_factory=dict)
    """Of channels that were counted: the intensities that there are, and how often."""

    def values(self, index: Any) -> npt.NDArray[np.float32]:
        """Return a part of the voxels, scaled.

        What float32 cannot hold becomes infinite.

        Args:
            index: Of the part, such as slices.
        """
        with np.errstate(all="ignore"):
            values = _scaled(self.voxels[index], self.slope, self.inter)
        forget_pages(self.voxels)
        return values

    def on_device(self, index: Any, device: torch.device) -> torch.Tensor:
        """Return a copy of a part of the voxels, scaled, in float32 on a device.

        Args:
            index: Of the part.
            device: Any.
        """
        if self.voxels.dtype in SENT_AS_STORED and (self.slope, self.inter) == (1.0, 0.0):
            stored = self.voxels[index].copy("K")
            forget_pages(self.voxels)
            return torch.from_numpy(stored).to(device).float()
        values = self.values(index)
        if np.may_share_memory(values, self.voxels):
            values = values.copy("K")
        return torch.from_numpy(values).to(device)


class ImageVoxels:
    """Voxels of all channels, on one grid."""

    def __init__(self, files: Sequence[StoredChannels]) -> None:
        """Take the channels of one or more files.

        Args:
            files: The channels in their order, on one grid.
        """
        self._files = tuple(files)
        self._channels = [
            (file, channel) for file in self._files for channel in range(len(file.voxels))
        ]
        x, y, z = self._files[0].voxels.shape[1:]
        self.shape: Shape = (x, y, z)
        """Voxels along X, Y, Z."""

    @classmethod
    def of(cls, array: npt.NDArray[np.float32]) -> "ImageVoxels":
        """Return the voxels of an array (C, X, Y, Z)."""
        return cls([StoredChannels(voxels=array)])

    @property
    def num_channels(self) -> int:
        """Channels."""
        return len(self._channels)

    @property
    def slowest_axis(self) -> int:
        """Of X, Y, Z, counted from 0, the one along which voxels lie furthest apart in memory."""
        strides = np.abs(self._files[0].voxels.strides[1:])
        return int(np.argmax(np.where(np.array(self.shape) > 1, strides, -1)))

    def cut(self, box: tuple[slice, slice, slice]) -> "ImageVoxels":
        """Return the part in a box, without a copy.

        Args:
            box: What is cut out along X, Y, Z.
        """
        if all(one.indices(n) == (0, n, 1) for one, n in zip(box, self.shape, strict=True)):
            return self  # with what is known of it
        return ImageVoxels(
            [
                StoredChannels(voxels=one.voxels[:, *box], slope=one.slope, inter=one.inter)
                for one in self._files
            ]
        )

    def viewed(self, view: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> "ImageVoxels":
        """Return the same voxels, seen otherwise, with what is known of them.

        Args:
            view: Returns a view (C, X', Y', Z') of an array (C, X, Y, Z).
        """
        return ImageVoxels([replace(one, voxels=view(one.voxels)) for one in self._files])

    def on_device(self, axis: int, planes: slice, device: torch.device) -> torch.Tensor:
        """Return some planes of all channels in float32 on a device, to be changed there.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            planes: Which.
            device: It is sent what takes least.

        Returns:
            Shape (C, X, Y, Z), in the order of memory in which they are stored.
        """
        index = (slice(None),) * (1 + axis) + (planes,)
        parts = [file.on_device(index, device) for file in self._files]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def channel(self, number: int) -> "Channel":
        """Return one channel, of which planes are read when they are asked for."""
        return Channel(*self._channels[number])

    def whole(self) -> npt.NDArray[np.float32]:
        """Return all voxels in memory, shape (C, X, Y, Z) and C-contiguous."""
        first = self._files[0]
        if len(self._files) == 1 and _is_ready(first.voxels, first.slope, first.inter):
            return np.ascontiguousarray(first.voxels)
        array = np.empty((self.num_channels, *self.shape), np.float32)
        for piece in self.pieces():
            done = 0
            for file in self._files:
                channels = slice(done, done + len(file.voxels))
                array[(channels, *piece)] = file.values((slice(None), *piece))
                done = channels.stop
        return array

    def pieces(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield the places of pieces that cover the volume, in the order in which it is stored."""
        axis = self.slowest_axis
        of_plane = max(1, math.prod(self.shape) // self.shape[axis])
        num_planes = max(1, PIECE_VOXELS // of_plane)
        for first in range(0, self.shape[axis], num_planes):
            x, y, z = (
                slice(first, min(first + num_planes, n)) if one == axis else slice(0, n)
                for one, n in enumerate(self.shape)
            )
            yield x, y, z

    def measure(
        self, channel: int, look: Measure[Found], inside: Mask | None = None
    ) -> list[Found]:
        """Look at all intensities of a channel, some at a time, in any order.

        Args:
            channel: Its number.
            look: Is given each intensity and how often it is there, or, where they are not counted,
                intensities alone; several threads call it.
            inside: The voxels that count, shape (X, Y, Z); None: all.

        Returns:
            What it returned, in an order that is always the same.
        """
        file, number = self._channels[channel]
        if inside is None and _is_counted(file.voxels.dtype):
            if number not in file.tables:
                file.tables[number] = self._counted(file, number)
            return [look(*file.tables[number])]

        def part(piece: tuple[slice, slice, slice]) -> Found:
            values = file.values((number, *piece))
            return look(values if inside is None else values[inside[piece]], None)

        return list(self._in_threads(part))

    def plane_extremes(
        self, channel: int, axis: int, inside: Mask | None = None
    ) -> tuple[Values, Values]:
        """Return the lowest and the highest intensity of each plane of a channel.

        Args:
            channel: Its number.
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            inside: The voxels that count, shape (X, Y, Z); None: all.

        Returns:
            One for each plane: infinite where none of its voxels counts.
        """
        file, number = self._channels[channel]
        others = tuple(other for other in range(3) if other != axis)

        def part(piece: tuple[slice, slice, slice]) -> tuple[slice, Values, Values]:
            values = file.values((number, *piece))
            counted: Mask | bool = True if inside is None else inside[piece]
            return (
                piece[axis],
                values.min(axis=others, where=counted, initial=np.inf),
                values.max(axis=others, where=counted, initial=-np.inf),
            )

        lowest = np.full(self.shape[axis], np.inf, np.float32)
        highest = np.full(self.shape[axis], -np.inf, np.float32)
        for planes, low, high in self._in_threads(part):
            lowest[planes] = np.minimum(lowest[planes], low)
            highest[planes] = np.maximum(highest[planes], high)
        return lowest, highest

    def any_nonzero(self, piece: tuple[slice, slice, slice]) -> Mask:
        """Return where any channel of a piece is not 0, shape (X, Y, Z) of the piece."""
        found: Mask = np.logical_or.reduce(
            [file.values((number, *piece)) != 0 for file, number in self._channels]
        )
        return found

    def _in_threads(self, part: Callable[[tuple[slice, slice, slice]], Found]) -> Iterator[Found]:
        num_threads = min(MOST_THREADS, num_cores())
        with ThreadPoolExecutor(num_threads, thread_name_prefix="intensities") as threads:
            # No more than that: a process that ends waits for all that has been handed out.
            waiting: deque[Future[Found]] = deque()
            for piece in self.pieces():
                if len(waiting) == 2 * num_threads:
                    yield waiting.popleft().result()
                waiting.append(threads.submit(part, piece))
            while waiting:
                yield waiting.popleft().result()

    def _counted(self, file: StoredChannels, number: int) -> tuple[Values, Counts]:
        """Return the intensities that there are, and how often each of them is there."""
        dtype = file.voxels.dtype
        lowest = 0 if dtype.kind == "b" else int(np.iinfo(dtype).min)
        num_values = 2 ** (8 * dtype.itemsize)

        def part(piece: tuple[slice, slice, slice]) -> Counts:
            places = file.voxels[(number, *piece)].astype(np.int32, order="K").ravel(order="K")
            forget_pages(file.voxels)
            # Unlike NumPy's, PyTorch's lets other threads run meanwhile, and is twice as fast.
            found: Counts = torch.bincount(
                torch.from_numpy(places).sub_(lowest), minlength=num_values
            ).numpy()
            return found

        counts = np.zeros(num_values, np.int64)
        for found in self._in_threads(part):
            counts += found
        there = np.flatnonzero(counts)
        stored = (there + lowest).astype(dtype)
        with np.errstate(all="ignore"):
            return _scaled(stored, file.slope, file.inter), counts[there]


class Channel:
    """One channel of an image, whose planes are read when they are asked for as in an array."""

    def __init__(self, file: StoredChannels, number: int) -> None:
        """Take a channel of a file."""
        self._file = file
        self._number = number
        self.shape = file.voxels.shape[1:]

    def __getitem__(self, index: Any) -> npt.NDArray[np.float32]:
        """Return a part, as an array (X, Y, Z) does."""
        index = index if isinstance(index, tuple) else (index,)
        return self._file.values((self._number, *index))


def _scaled(stored: npt.NDArray[Any], slope: float, inter: float) -> npt.NDArray[np.float32]:
    if _is_ready(stored, slope, inter) and min(stored.strides, default=0) >= 0:
        return stored  # as PyTorch can take it
    if (slope, inter) != (1.0, 0.0):
        stored = apply_read_scaling(np.asarray(stored), slope, inter)
    return np.asarray(stored).astype(np.float32, order="K")


def _is_ready(stored: npt.NDArray[Any], slope: float, inter: float) -> bool:
    is_plain = stored.dtype == np.float32 and (slope, inter) == (1.0, 0.0)
    return is_plain and bool(stored.flags.writeable)


def _is_counted(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub" and dtype.itemsize <= TABLE_BYTES
