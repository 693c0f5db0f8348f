"""The voxels of a TIFF stack: read from the strips and tiles that a box needs.

tifffile finds the pages and decodes strips and tiles. It takes lost ones as zeros, and shortens a
stack whose chain of pages is broken; so both are checked here.
"""

import logging
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError, reason_of
from unet3d.images.microscopy import package
from unet3d.images.source import DAMAGED, beginning_of
from unet3d.inputs.ahead import in_threads
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

# tifffile logs each oddity to stderr; what matters is checked here.
logging.getLogger("tifffile").setLevel(logging.CRITICAL)

BUFFER_BYTES = 512
"""Bytes read at once from the descriptions of pages, which may lie between voxels."""

ONE_FILE = {"_multifile": False, "is_mmstack": False, "is_ndtiff": False}
"""Keeps tifffile from opening other files that a file names: each one stands for itself."""

MAX_RATIO = 2**16
"""Bound on the ratio of unpacked to packed size; zstd packs constant voxels about 32,000 times."""

MAX_THREADS = 8
"""More threads would unpack planes faster than they can be used."""


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

    def refuse_lost(self) -> None:
        """Refuse strips or tiles that are missing, too short, or beyond the end of the file."""
        number, file_bytes = self.offsets.shape[1], os.path.getsize(self.file)
        first_rows = np.arange(number) // -(-self.shape[1] // self.chunk[1]) * self.chunk[0]
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

    def read(self, plane: int, rows: slice, columns: slice) -> npt.NDArray[Any]:
        """Return a part of a plane, (rows, columns, channels), from its strips or tiles."""
        (height, width), shape = self.chunk, self.shape
        sizes = (rows.stop - rows.start, columns.stop - columns.start, shape[2])
        found = np.empty(sizes, self.dtype.newbyteorder("="))
        for down in range(rows.start // height, math.ceil(rows.stop / height)):
            top, bottom = max(rows.start, down * height), min(rows.stop, (down + 1) * height)
            for aside in range(columns.start // width, math.ceil(columns.stop / width)):
                left = max(columns.start, aside * width)
                right = min(columns.stop, (aside + 1) * width)
                number = down * math.ceil(shape[1] / width) + aside
                found[
                    top - rows.start : bottom - rows.start,
                    left - columns.start : right - columns.start,
                ] = self._strip(plane, number)[
                    top - down * height : bottom - down * height,
                    left - aside * width : right - aside * width,
                ]
        return found

    def _strip(self, plane: int, number: int) -> npt.NDArray[Any]:
        """Return a strip or tile, (rows, columns, channels); plain ones are mapped."""
        begin, num_strips = int(self.offsets[plane, number]), self.offsets.shape[1]
        page, channel = divmod(plane, len(self.offsets) // len(self.layouts))
        layout = self.layouts[page]
        if layout is None:
            rows = min(self.chunk[0], self.shape[0] - number * self.chunk[0])
            return np.memmap(self.file, self.dtype, "r", begin, (rows, *self.shape[1:]))
        with open_regular(self.file) as file:
            packed = os.pread(file.fileno(), int(self.sizes[plane, number]), begin)
        strip = channel * num_strips + number
        found: npt.NDArray[Any] = layout.decode(packed, strip, jpegtables=layout.jpegtables)[0][0]
        return found


class Stack:
    """The planes of files as one array, whose last axes are rows, columns and perhaps colours."""

    def __init__(self, files: Sequence[Planes], shape: tuple[int, ...], num_leading: int) -> None:
        """Take the shape of the array, and how many axes are before the rows."""
        self._planes = [(one, number) for one in files for number in range(len(one.offsets))]
        first, self.shape, self._num_leading = files[0], shape, num_leading
        self.dtype = first.dtype.newbyteorder("=")
        inner = (1, 1) if first.layouts[0] is None else first.chunk
        self.chunks = (*[1] * num_leading, *inner, first.shape[2])[: len(shape)]
        """Shape of what is unpacked at once."""

    def __getitem__(self, box: tuple[slice, ...]) -> npt.NDArray[Any]:
        leading, (rows, columns, *colours) = box[: self._num_leading], box[self._num_leading :]
        numbers = np.arange(len(self._planes)).reshape(self.shape[: self._num_leading])[leading]
        sizes = [part.stop - part.start for part in (rows, columns)]
        found = np.empty((numbers.size, *sizes, self._planes[0][0].shape[2]), self.dtype)

        def fill(place: int) -> None:
            planes, number = self._planes[numbers.flat[place]]
            try:
                found[place] = planes.read(number, rows, columns)
            except MemoryError:  # the caller explains it
                raise
            except Exception as error:  # each decoder has errors of its own
                reason = reason_of(error) if isinstance(error, OSError) else printable(str(error))
                raise VolumeError(
                    f"cannot read plane {number + 1} in {planes.file}: {reason}; {DAMAGED}"
                ) from error

        in_threads(fill, range(numbers.size), min(MAX_THREADS, num_cores()))
        found = found.reshape(*numbers.shape, *sizes, found.shape[-1])
        return found[(..., *(colours or (0,)))]


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


@contextmanager
def opened_tiff(file: Path) -> Iterator[Any]:
    """Open a file with tifffile; whatever it raises becomes a VolumeError."""
    beginning_of(file)
    number = num_pages(file)
    tifffile = package("tifffile", f"reading {file}")
    try:
        with (
            open(file, "rb", BUFFER_BYTES) as opened,
            tifffile.TiffFile(opened, name=str(file), **ONE_FILE) as tiff,
        ):
            if not number or not tiff.series:
                raise VolumeError(f"{file} has no pages; {DAMAGED}")
            yield tiff
    except (VolumeError, MemoryError):
        raise
    except Exception as error:  # a damaged file can raise anything in tifffile
        reason = reason_of(error) if isinstance(error, OSError) else printable(str(error))
        raise VolumeError(f"cannot read {file}: {reason}; {DAMAGED}") from error
