"""Room for voxels that are worked on: in memory, or in files that nobody else sees.

A file has no name, so the system removes it when the process ends, however it ends. Its space is
taken at once: a disk that is full later would end the process in the middle of a store.
"""

import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError, reason_of
from unet3d.images.memory_limits import refuse_beyond_memory
from unet3d.memory.host import readable


class Scratch:
    """Makes arrays in memory or, if there is a folder, in it."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @property
    def is_memory(self) -> bool:
        """Whether arrays take memory."""
        return self._folder is None

    def empty(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, what: str, order: Any = "C"
    ) -> npt.NDArray[Any]:
        """Return an array whose content is not defined; ``what`` it is for begins a message."""
        dtype = np.dtype(dtype)
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        if self._folder is None:
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
    """Make a mapped NumPy file under a free name, with all of its space and content to come."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array


def forget_pages(array: npt.NDArray[Any]) -> None:
    """Release the pages of a mapped array; its content stays in its file."""
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
