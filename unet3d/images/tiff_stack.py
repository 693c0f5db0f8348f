"""The voxels of a TIFF stack: read from the strips and tiles that a box needs.

tifffile finds the pages and decodes strips and tiles. It takes lost ones as zeros, and shortens a
stack whose chain of pages is broken; so both are checked here.
"""

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import times
from unet3d.inputs.ahead import in_threads
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

MAX_RATIO = 2**16
"""Bound on the ratio of unpacked to packed size; zstd packs constant voxels about 32,000 times."""

MAX_THREADS = 8
"""More threads would unpack planes faster than they can be used."""

DAMAGED = "it is damaged or incomplete: copy it again"


class Plane(NamedTuple):
    """A plane of one channel, or of interleaved channels: where its strips or tiles lie."""

    file: Path
    layout: Any
    """tifffile's description of the page, which decodes it; None for plain voxels."""
    dtype: np.dtype[Any]
    shape: tuple[int, int, int]
    """Rows, columns and interleaved channels."""
    chunk: tuple[int, int]
    """Rows and columns of a strip or tile."""
    first: int
    """Number of its first strip or tile in the page."""
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def read(self, rows: range, columns: range) -> npt.NDArray[Any]:
        """Return a part of the plane, (rows, columns, channels)."""
        found = np.empty((len(rows), len(columns), self.shape[2]), self.dtype.newbyteorder("="))
        height, width = self.chunk
        across = math.ceil(self.shape[1] / width)
        with open_regular(self.file) as file:
            for down in range(rows.start // height, math.ceil(rows.stop / height)):
                top, bottom = max(rows.start, down * height), min(rows.stop, (down + 1) * height)
                part = found[top - rows.start : bottom - rows.start]
                if self.layout is None:
                    part[:] = self._plain(file.fileno(), range(top, bottom), columns)
                    continue
                for aside in range(columns.start // width, math.ceil(columns.stop / width)):
                    chunk = self._decoded(file.fileno(), down * across + aside)
                    left = max(columns.start, aside * width)
                    right = min(columns.stop, (aside + 1) * width)
                    part[:, left - columns.start : right - columns.start] = chunk[
                        top - down * height : bottom - down * height,
                        left - aside * width : right - aside * width,
                    ]
        return found

    def _plain(self, descriptor: int, rows: range, columns: range) -> npt.NDArray[Any]:
        """Return voxels of a plain strip: from whole rows, or row by row if columns are few."""
        width, channels = self.shape[1:]
        voxel_bytes = channels * self.dtype.itemsize
        strip, row = divmod(rows.start, self.chunk[0])
        begin = int(self.offsets[strip]) + row * width * voxel_bytes
        if 2 * len(columns) >= width:
            whole = _read_at(descriptor, begin, len(rows) * width * voxel_bytes)
            lines = whole.view(self.dtype).reshape(len(rows), width, channels)
            return lines[:, columns.start : columns.stop]
        begin += columns.start * voxel_bytes
        places = range(begin, begin + len(rows) * width * voxel_bytes, width * voxel_bytes)
        parts = [_read_at(descriptor, place, len(columns) * voxel_bytes) for place in places]
        return np.stack(parts).view(self.dtype).reshape(len(rows), len(columns), channels)

    def _decoded(self, descriptor: int, number: int) -> npt.NDArray[Any]:
        """Return a strip or tile, (rows, columns, channels)."""
        packed = _read_at(descriptor, int(self.offsets[number]), int(self.sizes[number]))
        chunk, _, _ = self.layout.decode(
            packed.tobytes(), self.first + number, jpegtables=self.layout.jpegtables
        )
        decoded: npt.NDArray[Any] = chunk[0]
        return decoded

    def refuse_lost(self, name: str) -> None:
        """Refuse a plane with strips or tiles that are missing or lie beyond the file's end."""
        across = math.ceil(self.shape[1] / self.chunk[1])
        number = across * math.ceil(self.shape[0] / self.chunk[0])
        found = min(len(self.offsets), len(self.sizes))
        if found < number or min(self.offsets.min(), self.sizes.min()) < 1:
            raise VolumeError(f"{self.file} lacks voxels of {name}; {DAMAGED}")
        end, file_bytes = int((self.offsets + self.sizes).max()), os.path.getsize(self.file)
        if end > file_bytes:
            raise VolumeError(
                f"{self.file} should have {name} up to byte {end}, but has only {file_bytes} "
                f"bytes; {DAMAGED}"
            )
        first_rows = np.arange(number) // across * self.chunk[0]
        rows = np.minimum(self.chunk[0], self.shape[0] - first_rows)
        needed = rows * self.chunk[1] * self.shape[2] * self.dtype.itemsize
        if (needed > self.sizes * (1 if self.layout is None else MAX_RATIO)).any():
            raise VolumeError(
                f"{self.file} claims {times(self.shape)} voxels for {name}, which cannot be in "
                f"{int(self.sizes.sum())} bytes of the file; {DAMAGED}"
            )


class Stack:
    """The voxels (I, J, K, C) of a stack: slicing it reads only strips and tiles of the box."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: np.dtype[Any], planes: list[Sequence[Plane]]
    ) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self._planes = planes  # for each K those that hold its channels

    def __getitem__(self, box: tuple[slice, slice, slice, slice]) -> npt.NDArray[Any]:
        columns, rows, numbers, channels = (
            range(*part.indices(size)) for part, size in zip(box, self.shape, strict=True)
        )
        found = np.empty((len(numbers), len(channels), len(rows), len(columns)), self.dtype)

        def fill(number: int) -> None:
            planes = self._planes[number]
            interleaved = planes[0].shape[2]
            for which in sorted({channel // interleaved for channel in channels}):
                part = _read(planes[which], rows, columns, number + 1)
                for channel in channels:
                    if channel // interleaved == which:
                        target = found[number - numbers.start, channel - channels.start]
                        target[:] = part[..., channel % interleaved]

        if found.size:
            in_threads(fill, numbers, min(MAX_THREADS, num_cores()))
        return found.transpose(3, 2, 0, 1)


def _read(plane: Plane, rows: range, columns: range, number: int) -> npt.NDArray[Any]:
    """Return a part of a plane; VolumeError if it cannot be read."""
    try:
        return plane.read(rows, columns)
    except MemoryError:  # the caller explains it
        raise
    except Exception as error:  # each decoder has errors of its own
        reason = reason_of(error) if isinstance(error, OSError) else printable(str(error))
        message = f"cannot read plane {number} in {plane.file}: {reason}; {DAMAGED}"
        raise VolumeError(message) from error


def _read_at(descriptor: int, place: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return bytes of a file from a place on; several threads may read from one file."""
    content = np.empty(num_bytes, np.uint8)
    done, view = 0, memoryview(content.data)
    while done < num_bytes:
        count = os.preadv(descriptor, [view[done:]], place + done)
        if not count:
            raise EOFError(f"it ends at byte {place + done}")
        done += count
    return content


def num_pages(path: Path) -> int:
    """Return the number of pages of a file, following the chain of their descriptions.

    VolumeError if it is not a TIFF file, or if the chain is broken or has a loop.
    """
    try:
        with open_regular(path) as file:
            return _follow(path, file.fileno())
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}") from error
    except struct.error as error:
        raise VolumeError(
            f"{path} ends in the description of a page, or names one beyond its end; {DAMAGED}"
        ) from error


def _follow(path: Path, descriptor: int) -> int:
    def number_at(place: int, kind: str) -> int:
        content = os.pread(descriptor, struct.calcsize(order + kind), place)
        return int(struct.unpack(order + kind, content)[0])

    order = {b"II": "<", b"MM": ">"}.get(os.pread(descriptor, 2, 0), "")
    version = number_at(2, "H") if order else 0
    if version not in (42, 43):
        raise VolumeError(f"cannot read {path}: it does not begin like a TIFF file")
    # BigTIFF counts with 8 bytes
    counter, pointer, entry_bytes = ("H", "I", 12) if version == 42 else ("Q", "Q", 20)
    place = number_at(4 if version == 42 else 8, pointer)
    known: set[int] = set()
    while place:
        if place in known:
            raise VolumeError(f"{path} names one page twice in its chain of pages; {DAMAGED}")
        known.add(place)
        try:
            entries = number_at(place, counter)
            place = number_at(
                place + struct.calcsize(order + counter) + entries * entry_bytes, pointer
            )
        except (OverflowError, OSError) as error:  # beyond every file
            raise struct.error from error
    return len(known)
