"""Label maps in compressed chunks, so that a box is read without the rest of the map.

The bytes of a packed label map::

    words, 8 bytes each     bytes of a voxel; voxels along X, Y, Z;
                            where each chunk begins, from the end of the words, and the last ends
    chunks                  of ``CHUNK_SHAPE`` voxels, fewer at the ends: the one class that all
                            voxels have, or an LZ4 block

A label map of a few objects becomes a hundredth of its size. Images are mapped uncompressed: their
noise leaves less to gain, and a cut would take several times as long (``docs/benchmarks.md``).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import lz4.block
import numpy as np
import numpy.typing as npt

from unet3d.config import Shape
from unet3d.preparation.entries import gone_error, map_array

CHUNK_SHAPE: Shape = (32, 32, 256)
"""Smaller chunks are more calls for each patch, larger ones more voxels that it does not need; rows
along Z are copied fastest."""

LEVEL = 9
"""LZ4's effort. A higher one gains a few percent for twice the time or more."""

Key = tuple[slice | EllipsisType, ...] | EllipsisType

_WORD = np.dtype("<u8")
_NUM_FIXED_WORDS = 4
_VOXEL_BYTES = (1, 2)


def pack_label(label: npt.NDArray[np.unsignedinteger[Any]]) -> npt.NDArray[np.uint8]:
    """Return a label map in compressed chunks, as bytes.

    Args:
        label: Class indices, shape (X, Y, Z), uint8 or uint16.
    """
    chunks = []
    for place in np.ndindex(*_grid(label.shape)):
        box = tuple(
            slice(index * size, (index + 1) * size)
            for index, size in zip(place, CHUNK_SHAPE, strict=True)
        )
        chunks.append(_packed(np.ascontiguousarray(label[box], label.dtype.newbyteorder("<"))))
    starts = itertools.accumulate(map(len, chunks), initial=0)
    words = np.array([label.itemsize, *label.shape, *starts], _WORD)
    return np.frombuffer(b"".join((words.tobytes(), *chunks)), np.uint8)


class PackedLabel:
    """A packed label map in a file that is mapped: slicing unpacks the chunks that it touches."""

    def __init__(self, path: Path) -> None:
        """Map the file; nothing is unpacked.

        Args:
            path: A file in NumPy's format with what :func:`pack_label` returned.

        Raises:
            CacheError: The file is gone or damaged.
        """
        self._path = path
        packed = map_array(path)
        try:
            fixed = packed[: _NUM_FIXED_WORDS * _WORD.itemsize].view(_WORD).tolist()
            voxel_bytes, x, y, z = fixed
            self.shape: Shape = (x, y, z)
            self._grid = _grid(self.shape)
            num_bytes = (_NUM_FIXED_WORDS + math.prod(self._grid) + 1) * _WORD.itemsize
            is_sound = packed.ndim == 1 and voxel_bytes in _VOXEL_BYTES and min(self.shape) > 0
            if not is_sound or num_bytes > packed.nbytes:
                raise ValueError("no packed label map begins so")
            self._starts = packed[:num_bytes].view(_WORD)[_NUM_FIXED_WORDS:]
            self._chunks = packed.data[num_bytes:]
        except (TypeError, ValueError) as error:
            raise gone_error(path) from error
        self.dtype = np.dtype(f"<u{voxel_bytes}")

    def __getitem__(self, key: Key) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the class indices of a box.

        Args:
            key: Slices along X, Y and Z, with a step of 1; an Ellipsis stands for whole axes.

        Raises:
            CacheError: The file is damaged.
        """
        box = [range(size)[part] for size, part in zip(self.shape, _slices(key), strict=True)]
        result = np.empty([len(voxels) for voxels in box], self.dtype)
        if result.size:
            pieces = map(_pieces, box, CHUNK_SHAPE, self.shape)
            for (x, nx, *of_x), (y, ny, *of_y), (z, nz, *of_z) in itertools.product(*pieces):
                number = (x * self._grid[1] + y) * self._grid[2] + z
                chunk = self._chunk(number, (nx, ny, nz))
                inside, place = zip(of_x, of_y, of_z, strict=True)
                result[place] = chunk[inside] if chunk.ndim == 3 else chunk
        return result

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Return the whole label map."""
        return self[...].astype(dtype or self.dtype, copy=False)

    def _chunk(self, number: int, shape: Shape) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return a chunk of this shape, or an array of one voxel that stands for all of them."""
        start, end = self._starts[number : number + 2].tolist()
        packed = self._chunks[start:end]
        num_bytes = math.prod(shape) * self.dtype.itemsize
        try:
            if end - start == self.dtype.itemsize:
                return np.frombuffer(packed, self.dtype)
            # No more is unpacked than the chunk can have, whatever the file says.
            content = lz4.block.decompress(packed, uncompressed_size=num_bytes)
            return np.frombuffer(content, self.dtype).reshape(shape)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise gone_error(self._path) from error


def _packed(chunk: npt.NDArray[np.unsignedinteger[Any]]) -> bytes:
    if (chunk == chunk[0, 0, 0]).all():
        return chunk[:1, :1, :1].tobytes()
    how = {"mode": "high_compression", "compression": LEVEL, "store_size": False}
    return bytes(lz4.block.compress(chunk, **how))


def _grid(shape: Sequence[int]) -> Shape:
    x, y, z = (-(-voxels // size) for voxels, size in zip(shape, CHUNK_SHAPE, strict=True))
    return (x, y, z)


def _slices(key: Key) -> list[slice]:
    """Return a slice for each axis of the label map."""
    parts: list[slice | EllipsisType] = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in parts:
        index = parts.index(Ellipsis)
        parts[index : index + 1] = [slice(None)] * (4 - len(parts))
    slices = [part for part in parts if isinstance(part, slice) and part.step in (None, 1)]
    if len(slices) != len(parts) or len(parts) != 3:
        raise IndexError("a packed label map is cut with three slices, with a step of 1")
    return slices


def _pieces(voxels: range, size: int, available: int) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield the chunks along an axis: index, length, what is wanted of it, where that goes."""
    for index in range(voxels.start // size, -(-voxels.stop // size)):
        first, end = index * size, min((index + 1) * size, available)
        start, stop = max(voxels.start, first), min(voxels.stop, end)
        inside = slice(start - first, stop - first)
        yield index, end - first, inside, slice(start - voxels.start, stop - voxels.start)
