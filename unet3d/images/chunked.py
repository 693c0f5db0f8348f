"""Voxels in chunks, as in zarr and HDF5: a box reads only the chunks that it touches."""

import math
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.memory_limits import explaining_memory, refuse_beyond_memory

KEPT_BYTES = 2**27
"""Most bytes of unpacked chunks to keep for the next planes of a volume that is read in thin slabs:
enough for planes of 1000x1000 voxels of a byte in chunks of 128."""


class ChunkedVoxels:
    """An array (I, J, K, C) over an array of a library, whose axes have names such as ``tczyx``.

    Axes other than x, y, z and c have a size of 1. Consecutive planes along any axis unpack their
    chunks once.
    """

    def __init__(self, path: Path, array: Any, axes: Sequence[str], chunks: Sequence[int]) -> None:
        """Take the array, the names of its axes, and the shape of the chunks to be unpacked."""
        sizes, order = tuple(array.shape), list(axes)
        places = [order.index(name) if name in order else None for name in "xyzc"]
        self.shape = tuple(1 if place is None else sizes[place] for place in places)
        self.dtype = array.dtype
        self._path, self._array, self._places = path, array, places
        self._chunks = [min(int(chunk), size) for chunk, size in zip(chunks, sizes, strict=True)]
        x, y, z = (1 if place is None else self._chunks[place] for place in places[:3])
        self.chunks = (x, y, z)
        """Voxels along X, Y, Z of a chunk."""
        self._lock = Lock()
        self._kept: tuple[list[slice], npt.NDArray[Any]] | None = None
        refuse_beyond_memory(
            math.prod(map(int, chunks)) * array.dtype.itemsize,
            f"{path}: unpacking one chunk of {times(chunks)} voxels",
            "save the volume with smaller chunks",
        )

    def __getitem__(self, index: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Return a box (I, J, K, C)."""
        box = [slice(0, 1)] * len(self._array.shape)
        for place, part in zip(self._places, index, strict=True):
            if place is not None:
                box[place] = slice(*part.indices(self._array.shape[place])[:2])
        found = self._planes(box)
        order = [place for place in self._places if place is not None]
        others = [number for number in range(found.ndim) if number not in order]
        kept: tuple[Any, ...] = (..., *[0] * len(others))
        found = found.transpose(*order, *others)[kept]
        missing = [number for number, place in enumerate(self._places) if place is None]
        return np.expand_dims(found, missing)

    def _planes(self, box: list[slice]) -> npt.NDArray[Any]:
        """Return a box of the array; of a few planes, their whole chunks are unpacked and kept."""
        shares = [(part.stop - part.start) / n for part, n in zip(box, self._chunks, strict=True)]
        spatial = [place for place in self._places[:3] if place is not None]
        axis = min(spatial, key=lambda place: (shares[place], place), default=0)
        planes, chunk = box[axis], self._chunks[axis]
        first = planes.start // chunk * chunk
        layer = [*box]
        layer[axis] = slice(first, min(first + chunk, self._array.shape[axis]))
        num_bytes = math.prod(part.stop - part.start for part in layer) * self.dtype.itemsize
        is_thin = planes.stop <= layer[axis].stop and planes != layer[axis]
        if not is_thin or num_bytes > KEPT_BYTES:
            return self._read(box)
        with self._lock:
            if self._kept is None or self._kept[0] != layer:
                self._kept = None  # frees its memory first
                voxels = self._read(layer)
                voxels.flags.writeable = False
                self._kept = (layer, voxels)
            kept = self._kept[1]
        inside = [slice(None)] * len(box)
        inside[axis] = slice(planes.start - first, planes.stop - first)
        return kept[tuple(inside)]

    def _read(self, box: list[slice]) -> npt.NDArray[Any]:
        try:
            with explaining_memory(f"cannot read {self._path}"):
                return np.asarray(self._array[tuple(box)])
        except VolumeError:
            raise
        except Exception as error:  # a damaged chunk can raise anything in a codec
            reason = " ".join(str(error).split()) or type(error).__name__
            raise VolumeError(
                f"cannot read {self._path}: {reason}; a chunk is damaged or incomplete: copy the "
                "volume again"
            ) from error
