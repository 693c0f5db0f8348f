"""The voxels of a TIFF stack: read from the strips and tiles that a box needs.

tifffile finds the pages and decodes strips and tiles. It takes lost ones as zeros, and shortens a
stack whose chain of pages is broken; so both are checked here.
"""

import logging
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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

    @classmethod
    def of(cls, file: Path, found: Sequence[Any], number: int) -> "Planes":
        """Return all planes of tifffile's series, by number; VolumeError if one is lost."""
        page = found[0].keyframe
        separate, _, rows, columns, interleaved = page.shaped
        dtype = np.dtype(page.dtype).newbyteorder(page.parent.byteorder)
        shape, chunk = (rows, columns, interleaved), (rows, columns)
        if len(found) == 1 and found[0].dataoffset is not None:  # one plain plane after another
            num_bytes, layouts = math.prod(shape) * dtype.itemsize, [None]
            offsets = found[0].dataoffset + num_bytes * np.arange(number)[:, None]
            sizes = np.full_like(offsets, num_bytes)
        else:
            pages = [one for series in found for one in series if one is not None]
            chunk = (page.tilelength, page.tilewidth)
            if not page.is_tiled:
                chunk = (min(page.rowsperstrip, rows), columns)
            count = math.prod(page.chunked)
            parts = [(one.dataoffsets[:count], one.databytecounts[:count]) for one in pages]
            if len(pages) * separate != number or {len(one) for pair in parts for one in pair} != {
                count
            }:
                raise VolumeError(
                    f"{file} lacks voxels: it describes {number // separate} pages of {count} "
                    f"strips or tiles, but has {len(pages)}, or fewer strips; {DAMAGED}"
                )
            layouts = [_decoder(one.keyframe) for one in pages]
            offsets, sizes = np.array(parts, np.int64).transpose(1, 0, 2).reshape(2, number, -1)
            if layouts[0] is None:  # what is mapped counts, not what the file states
                num_rows = np.minimum(chunk[0], rows - np.arange(sizes.shape[1]) * chunk[0])
                sizes[:] = num_rows * columns * interleaved * dtype.itemsize
        file_bytes = os.path.getsize(file)
        lost = (np.minimum(offsets, sizes) < 1) | (sizes > file_bytes - offsets)
        if lost.any():
            raise VolumeError(
                f"{file} lacks voxels of plane {lost.any(1).argmax() + 1} of {number}, or claims "
                f"more than its {file_bytes} bytes; {DAMAGED}"
            )
        return cls(
            file=file,
            layouts=layouts,
            dtype=dtype,
            shape=shape,
            chunk=chunk,
            offsets=offsets,
            sizes=sizes,
        )

    def read(self, plane: int, rows: slice, columns: slice) -> npt.NDArray[Any]:
        """Return a part of a plane, (rows, columns, channels), from its strips or tiles."""
        sizes = (rows.stop - rows.start, columns.stop - columns.start, self.shape[2])
        found = np.empty(sizes, self.dtype.newbyteorder("="))
        num_aside = -(-self.shape[1] // self.chunk[1])
        for down, rows_here, rows_there in _touched(rows, self.chunk[0]):
            for aside, columns_here, columns_there in _touched(columns, self.chunk[1]):
                strip = self._strip(plane, down * num_aside + aside)
                found[rows_here, columns_here] = strip[rows_there, columns_there]
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


def _touched(part: slice, side: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each strip that a part touches: its number, and their overlap in part and strip."""
    for number in range(part.start // side, -(-part.stop // side)):
        begin, end = max(part.start, number * side), min(part.stop, (number + 1) * side)
        here = slice(begin - part.start, end - part.start)
        yield number, here, slice(begin - number * side, end - number * side)


def _decoder(page: Any) -> Any:
    """Return what decodes strips and tiles of a page when its file is closed; None if plain."""
    if page.is_final:
        return None
    page.init_decode()
    return page


class Stack:
    """The planes of files as one array, whose last axes are rows, columns and perhaps colours."""

    def __init__(self, files: Sequence[Planes], shape: tuple[int, ...]) -> None:
        self._planes = [(one, number) for one in files for number in range(len(one.offsets))]
        first, self.shape = files[0], shape
        self._num_leading = len(shape) - (3 if first.shape[2] > 1 else 2)
        self.dtype = first.dtype.newbyteorder("=")
        inner = (1, 1) if first.layouts[0] is None else first.chunk
        self.chunks = (*[1] * self._num_leading, *inner, first.shape[2])[: len(shape)]
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


def _refuse_broken_chain(file: Path, tiff: Any) -> None:
    """Follow the chain of pages: tifffile shortens a broken one, and never ends with some loops."""
    first = next(iter(tiff.pages), None)
    place, known = first.offset if first else 0, set[int]()
    size_of, opened = tiff.tiff, tiff.filehandle
    with suppress(struct.error):  # beyond the end of the file
        while place and place not in known:
            known.add(place)
            opened.seek(place)
            (entries,) = struct.unpack(size_of.tagnoformat, opened.read(size_of.tagnosize))
            opened.seek(entries * size_of.tagsize, os.SEEK_CUR)
            (place,) = struct.unpack(size_of.offsetformat, opened.read(size_of.offsetsize))
    if place or not 0 < len(known) == len(tiff.pages):
        raise VolumeError(f"{file} has {'a broken chain of' if known else 'no'} pages; {DAMAGED}")


@contextmanager
def opened_tiff(file: Path) -> Iterator[Any]:
    """Open a file with tifffile; whatever it raises becomes a VolumeError."""
    beginning_of(file)
    tifffile = package("tifffile", f"reading {file}")
    try:
        with (
            open(file, "rb", BUFFER_BYTES) as opened,
            tifffile.TiffFile(opened, name=str(file), **ONE_FILE) as tiff,
        ):
            _refuse_broken_chain(file, tiff)
            yield tiff
    except (VolumeError, MemoryError):
        raise
    except Exception as error:  # a damaged file can raise anything in tifffile
        reason = reason_of(error) if isinstance(error, OSError) else printable(str(error))
        raise VolumeError(f"cannot read {file}: {reason}; {DAMAGED}") from error
