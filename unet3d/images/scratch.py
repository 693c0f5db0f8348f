"""Temporary arrays of voxels, in memory or in unnamed files.

The system removes an unnamed file when the process ends, however it ends. Its disk space is
allocated at once, because a disk that fills up later would kill the process in the middle of a
write.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError, reason_of
from unet3d.images.memory_limits import refuse_beyond_memory
from unet3d.memory.host import readable

LARGE_BYTES = 2**28
"""Labels that take more are in a file. A CT of 512x512x1024 voxels stays in memory."""

PART_BYTES = 2**22
"""Most bytes of an array to look at before pages are released, unless a plane has more."""


class Scratch:
    """Makes arrays in memory or, if a folder is given, in files there."""

    def __init__(self, folder: Path | None = None, in_memory_bytes: int = 0) -> None:
        """Take a folder for arrays of more than ``in_memory_bytes``; None: all are in memory."""
        self._folder = folder
        self._in_memory_bytes = in_memory_bytes

    @property
    def is_memory(self) -> bool:
        """Whether arrays are in memory."""
        return self._folder is None

    def empty(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, what: str, order: Any = "C"
    ) -> npt.NDArray[Any]:
        """Return an array with undefined content; ``what`` begins the message of an error."""
        dtype = np.dtype(dtype)
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        if self._folder is None or num_bytes <= self._in_memory_bytes:
            refuse_beyond_memory(
                num_bytes, what, "use a machine with more, or unet3d predict --scratch DIR"
            )
            return np.empty(shape, dtype, order)
        try:
            # The mapping keeps the file alive.
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return np.memmap(file, dtype, "r+", shape=shape, order=order)
        except OSError as error:
            raise VolumeError(
                f"{what} takes {readable(num_bytes)} of {self._folder}: {reason_of(error)}; name "
                "another folder with --scratch"
            ) from error


def new_mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Make a memory-mapped .npy file under an unused name, with all its disk space allocated."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array


def parts(array: npt.NDArray[Any], part_bytes: int = PART_BYTES) -> Iterator[tuple[slice, ...]]:
    """Yield boxes of planes that cover an array in its memory order, and release pages after each.

    So a mapped array may be larger than the memory.
    """
    axis = int(np.argmax(np.where(np.array(array.shape) > 1, np.abs(array.strides), -1)))
    size = array.shape[axis]
    number = max(1, part_bytes * size // max(1, array.nbytes))
    for first in range(0, size, number):
        box = [slice(0, voxels) for voxels in array.shape]
        box[axis] = slice(first, min(first + number, size))
        yield tuple(box)
        forget_pages(array)


def forget_pages(array: npt.NDArray[Any]) -> None:
    """Release the memory pages of a mapped array; its content stays in its file."""
    owner: Any = array
    while owner is not None and not isinstance(owner, np.memmap):
        owner = getattr(owner, "base", None)
    if owner is None or owner.mode == "c" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    mapping = owner.base
    while mapping is not None and not isinstance(mapping, mmap.mmap):
        mapping = getattr(mapping, "base", None)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)
