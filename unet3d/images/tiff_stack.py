"""The voxels of a TIFF stack: read from the strips and tiles that a box needs.

tifffile finds the pages and decodes strips and tiles. It takes lost ones as zeros, and shortens a
stack whose chain of pages is broken; so both are checked here.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError, reason_of
from unet3d.images.chunked import KEPT_BYTES
from unet3d.inputs.ahead import in_threads
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

MAX_RATIO = 2**16
"""Bound on the ratio of unpacked to packed size; zstd packs constant voxels about 32,000 times."""

MAX_THREADS = 8
"""More threads would unpack planes faster than they can be used."""

DAMAGED = "it is damaged or incomplete: copy it again"


@dataclass(frozen=True, eq=False, kw_only=True)
class Planes:
    """The planes of a file, each of one channel or of interleaved ones: where its strips lie."""

    file: Path
    layouts: list[Any]
    """tifffile's description of each page, which decodes it; None for plain voxels."""
    dtype: np.dtype[Any]
    shape: tuple[int, int, int]
    """Rows, columns and interleaved channels of a plane."""
    chunk: tuple[int, int]
    """Rows and columns of a strip or tile."""
    offsets: npt.NDArray[np.int64]
    """(planes, strips or tiles): where each begins in the file."""
    sizes: npt.NDArray[np.int64]
    """Its bytes in the file."""

    @property
    def across(self) -> int:
        """Number of strips or tiles beside each other."""
        return math.ceil(self.shape[1] / self.chunk[1])

    def refuse_lost(self) -> None:
        """Refuse strips or tiles that are missing, too short, or beyond the end of the file."""
        number, file_bytes = self.offsets.shape[1], os.path.getsize(self.file)
        first_rows = np.arange(number) // self.across * self.chunk[0]
        rows = np.minimum(self.chunk[0], self.shape[0] - first_rows)
        needed = rows * self.chunk[1] * self.shape[2] * self.dtype.itemsize
        ratio = 1 if self.layouts[0] is None else MAX_RATIO
        lost = np.minimum(self.offsets, self.sizes) < 1
        lost |= (self.sizes > file_bytes - self.offsets) | (needed > self.sizes * ratio)
        if lost.any():
            raise VolumeError(
                f"{self.file} lacks voxels of plane {lost.any(1).argmax() + 1} of {len(lost)}, or "
                f"claims more than can be in its {file_bytes} bytes; {DAMAGED}"
            )

    def read(self, plane: int, number: int, content: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Return a strip or tile, (rows, columns, channels), of the content of the file."""
        begin, num_strips = int(self.offsets[plane, number]), self.offsets.shape[1]
        page, channel = divmod(plane, len(self.offsets) // len(self.layouts))
        layout = self.layouts[page]
        if layout is None:
            rows = min(self.chunk[0], self.shape[0] - number * self.chunk[0])
            num_bytes = rows * math.prod(self.shape[1:]) * self.dtype.itemsize
            plain = content[begin : begin + num_bytes].view(self.dtype)
            return plain.reshape(rows, *self.shape[1:])
        packed = content[begin : begin + int(self.sizes[plane, number])].tobytes()
        strip = channel * num_strips + number
        found: npt.NDArray[Any] = layout.decode(packed, strip, jpegtables=layout.jpegtables)[0][0]
        return found


class Stack:
    """The voxels (I, J, K, C) of a stack: slicing it reads only strips and tiles of the box."""

    def __init__(self, planes: list[list[tuple[Planes, int]]]) -> None:
        """Take for each K the planes of its channels, each by its file and its number in it."""
        first = planes[0][0][0]
        rows, columns, self._interleaved = first.shape
        self.shape = (columns, rows, len(planes), self._interleaved * len(planes[0]))
        self.dtype = first.dtype.newbyteorder("=")
        self._planes = planes
        self._kept: dict[tuple[Planes, int, int], npt.NDArray[Any]] = {}
        self.chunk_bytes = math.prod(first.chunk) * self._interleaved * self.dtype.itemsize
        self._most = KEPT_BYTES // self.chunk_bytes

    def __getitem__(self, box: tuple[slice, slice, slice, slice]) -> npt.NDArray[Any]:
        columns, rows, numbers, channels = (
            range(*part.indices(size)) for part, size in zip(box, self.shape, strict=True)
        )
        found = np.empty((len(numbers), len(channels), len(rows), len(columns)), self.dtype)

        def fill(number: int) -> None:
            for place, channel in enumerate(channels):
                which, sample = divmod(channel, self._interleaved)
                planes, plane = self._planes[number][which]
                target = found[number - numbers.start, place]
                try:
                    self._copy(planes, plane, sample, rows, columns, target)
                except MemoryError:  # the caller explains it
                    raise
                except Exception as error:  # each decoder has errors of its own
                    reason = reason_of(error) if isinstance(error, OSError) else str(error)
                    raise VolumeError(
                        f"cannot read plane {number + 1} in {planes.file}: {printable(reason)}; "
                        f"{DAMAGED}"
                    ) from error

        if found.size:
            in_threads(fill, numbers, min(MAX_THREADS, num_cores()))
        return found.transpose(3, 2, 0, 1)

    def _copy(
        self,
        planes: Planes,
        plane: int,
        sample: int,
        rows: range,
        columns: range,
        target: npt.NDArray[Any],
    ) -> None:
        """Copy a part of one channel of a plane into an array (rows, columns)."""
        height, width = planes.chunk
        content = np.asarray(np.memmap(planes.file, np.uint8, "r"))
        for down in range(rows.start // height, math.ceil(rows.stop / height)):
            top, bottom = max(rows.start, down * height), min(rows.stop, (down + 1) * height)
            for aside in range(columns.start // width, math.ceil(columns.stop / width)):
                left = max(columns.start, aside * width)
                right = min(columns.stop, (aside + 1) * width)
                strip = self._strip(planes, plane, down * planes.across + aside, content)
                target[
                    top - rows.start : bottom - rows.start,
                    left - columns.start : right - columns.start,
                ] = strip[
                    top - down * height : bottom - down * height,
                    left - aside * width : right - aside * width,
                    sample,
                ]

    def _strip(
        self, planes: Planes, plane: int, number: int, content: npt.NDArray[np.uint8]
    ) -> npt.NDArray[Any]:
        """Return a strip or tile; unpacked ones are kept for slabs that do not follow planes."""
        if planes.layouts[0] is None:
            return planes.read(plane, number, content)
        key = (planes, plane, number)
        found = self._kept.get(key)
        if found is None:
            found = planes.read(plane, number, content)
            if len(self._kept) >= self._most:
                self._kept.clear()
            self._kept[key] = found
        return found


def num_pages(path: Path) -> int:
    """Return the number of pages of a file, following the chain of their descriptions.

    VolumeError if it is not a TIFF file, or if the chain is broken or has a loop.
    """
    try:
        with open_regular(path) as file:
            return _follow(path, file.fileno())
    except (struct.error, OverflowError) as error:
        raise VolumeError(
            f"{path} ends in the description of a page, or names one beyond its end; {DAMAGED}"
        ) from error
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}") from error


def _follow(path: Path, descriptor: int) -> int:
    def number_at(place: int, kind: str) -> int:
        if place >= 2**63:
            raise OverflowError
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
        entries = number_at(place, counter)
        place = number_at(place + struct.calcsize(order + counter) + entries * entry_bytes, pointer)
    return len(known)
