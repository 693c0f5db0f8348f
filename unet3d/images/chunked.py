"""Voxels in chunks, as in zarr and HDF5: a box reads only the chunks that it touches."""

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.memory_limits import KEPT_BYTES, explaining_memory, refuse_beyond_memory


class ChunkedVoxels:
    """An array (I, J, K, C) over an array of a library, whose axes have names such as ``tczyx``.

    There are x, y and z; axes other than these, c and t have a size of 1. Consecutive planes along
    any axis, and channels that share chunks, unpack their chunks once.
    """

    def __init__(self, path: Path | str, array: Any, axes: Sequence[str], time: int = 0) -> None:
        """Take an array with ``chunks``, the shape of what is unpacked at once, and its axes."""
        sizes, places = tuple(array.shape), [axes.index(name) for name in "xyzc" if name in axes]
        self.shape = (*[sizes[place] for place in places], 1)[:4]
        self.dtype = array.dtype
        self._path, self._array, self._places = path, array, places
        self._fixed = {
            place: time if name == "t" else 0
            for place, name in enumerate(axes)
            if place not in places
        }
        self._chunks = [
            min(int(chunk), size) for chunk, size in zip(array.chunks, sizes, strict=True)
        ]
        x, y, z = (self._chunks[place] for place in places[:3])
        self.chunks = (x, y, z)
        """Voxels along X, Y, Z of a chunk."""
        self._lock = Lock()
        self._kept: deque[tuple[list[slice], npt.NDArray[Any]]] = deque()
        refuse_beyond_memory(
            math.prod(map(int, array.chunks)) * array.dtype.itemsize,
            f"{path}: unpacking one chunk of {times(array.chunks)} voxels",
            "save the volume with smaller chunks",
        )

    def __getitem__(self, index: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Return a box (I, J, K, C)."""
        box = [slice(0, 1)] * len(self._array.shape)
        for place, position in self._fixed.items():
            box[place] = slice(position, position + 1)
        for place, part in zip(self._places, index, strict=False):  # channels may be missing
            box[place] = slice(*part.indices(self._array.shape[place])[:2])
        found = self._planes(box).transpose(*self._places, *self._fixed)
        voxels = found.squeeze(tuple(range(len(self._places), found.ndim)))
        return voxels if len(self._places) == 4 else voxels[..., None]

    def _planes(self, box: list[slice]) -> npt.NDArray[Any]:
        """Return a box of the array; of a few planes or channels, whole chunks are kept."""
        shares = [(part.stop - part.start) / n for part, n in zip(box, self._chunks, strict=True)]
        axis = min(self._places[:3], key=lambda place: (shares[place], place))
        layer = [*box]
        for place in (axis, *self._places[3:]):
            chunk, size = self._chunks[place], self._array.shape[place]
            first = box[place].start // chunk * chunk
            if box[place].stop <= first + chunk:
                layer[place] = slice(first, min(first + chunk, size))
        num_bytes = math.prod(part.stop - part.start for part in layer) * self.dtype.itemsize
        if layer == box or num_bytes > KEPT_BYTES:
            return self._read(box)
        with self._lock:
            kept = next((voxels for one, voxels in self._kept if one == layer), None)
            if kept is None:
                most = min(self.shape[3], KEPT_BYTES // num_bytes)  # a layer for each channel
                while len(self._kept) >= most:
                    self._kept.popleft()  # frees its memory first
                kept = self._read(layer)
                kept.flags.writeable = False
                self._kept.append((layer, kept))
        parts = zip(box, layer, strict=True)
        return kept[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in parts)]

    def _read(self, box: list[slice]) -> npt.NDArray[Any]:
        try:
            with explaining_memory(f"cannot read {self._path}"):
                return np.asarray(self._array[tuple(box)])
        except VolumeError:
            raise
        except PermissionError as error:
            raise VolumeError(
                f"cannot read {self._path}: its voxels may not be read; ask for the right to"
            ) from error
        except Exception as error:  # a damaged chunk can raise anything in a codec
            reason = " ".join(str(error).split()) or type(error).__name__
            raise VolumeError(
                f"cannot read {self._path}: {reason}; a chunk is damaged or incomplete: copy the "
                "volume again"
            ) from error
