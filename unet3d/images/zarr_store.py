"""Opens zarr arrays of untrusted stores, in a folder or a zip file; needs the package zarr."""

import itertools
import logging
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import LocalStore, WrapperStore, ZipStore

from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.inputs.reading import MAX_JSON_BYTES

logger = logging.getLogger(__name__)

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
"""Names of files that hold no voxels."""

MAX_SIZE = 2**40
"""Most voxels along an axis, and bytes of an array divided by 2**20: more overflows elsewhere."""

_incomplete: set[Path] = set()
"""Stores whose missing chunks have been mentioned."""


class CheckedStore(WrapperStore[Any]):
    """A store whose files cannot be larger than their content needs; says if a chunk is missing."""

    path: Path
    volume: Path
    """The path to name in messages."""
    is_sparse = False
    """Whether missing chunks are usual, as in label maps."""
    max_bytes = MAX_JSON_BYTES
    fill_value: Any = 0
    sizes: dict[str, int] | None = None
    """Unpacked sizes of the files of a zip file; None for a folder."""

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return the bytes of a file, or None if it does not exist."""
        is_metadata = key.rpartition("/")[2] in METADATA
        size = self._size(key)
        if size is None:
            if not (is_metadata or self.is_sparse or self.volume in _incomplete):
                _incomplete.add(self.volume)
                logger.warning(
                    "%s has no file for some chunks, such as %s; their voxels are %s, as zarr "
                    "defines: if they should have others, copy the volume again",
                    self.volume,
                    key,
                    self.fill_value,
                )
            return None
        limit = MAX_JSON_BYTES if is_metadata else self.max_bytes
        if not 0 < size <= limit:
            raise VolumeError(
                f"{self.volume} has a file {key} of {size} bytes, but its content takes up to "
                f"{limit}; it is damaged: copy the volume again"
            )
        return await super().get(key, prototype, byte_range)

    def _size(self, key: str) -> int | None:
        if self.sizes is not None:
            return self.sizes.get(key)
        try:
            return (self.path / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None


def open_array(
    volume: Path,
    path: Path,
    packed: zipfile.ZipFile | None,
    inside: str,
    zarr_format: Any,
    is_sparse: bool = False,
) -> Any:
    """Open an array in a store of a volume, but read no voxels.

    The path is its folder, or the zip file that holds it at the path ``inside``.
    """
    if packed is None:
        store = CheckedStore(LocalStore(path, read_only=True))
    else:
        store = CheckedStore(ZipStore(path, mode="r", read_only=True))
        store.sizes = {one.filename: one.file_size for one in packed.infolist()}
    store.path, store.volume, store.is_sparse = path, volume, is_sparse
    array = zarr.open_array(store, mode="r", path=inside, zarr_format=zarr_format)
    shape, file_shape = array.shape, array.shards or array.chunks
    if max(shape, default=1) > MAX_SIZE or math.prod(shape) > MAX_SIZE * 2**20:
        raise VolumeError(f"{volume} claims the shape {times(shape)}; it is damaged")
    store.fill_value = array.fill_value
    # Codecs may add a little to incompressible voxels, and shards have an index.
    store.max_bytes = 2 * math.prod(file_shape) * array.dtype.itemsize + 2**20
    return array


def write(path: Path, attributes: dict[str, Any], arrays: Mapping[str, Any], side: int) -> None:
    """Write a group with arrays (Z, Y, X) of chunks with a side, 4^3 of them in a file.

    Chunks of zeros are written, too, so that a missing file is always an error.
    """
    store = LocalStore(path)
    zarr.create_group(store, attributes=attributes)
    for name, voxels in arrays.items():
        chunks = tuple(min(side, size) for size in voxels.shape)
        shards = tuple(
            chunk * min(4, -(-size // chunk))
            for chunk, size in zip(chunks, voxels.shape, strict=True)
        )
        array = zarr.create_array(
            store,
            name=name,
            shape=voxels.shape,
            chunks=chunks,
            shards=shards,
            dtype=voxels.dtype,
            dimension_names=("z", "y", "x"),
            config={"write_empty_chunks": True},
        )
        starts = (range(0, size, step) for size, step in zip(voxels.shape, shards, strict=True))
        for start in itertools.product(*starts):  # one shard at a time, to save memory
            box = tuple(slice(one, one + step) for one, step in zip(start, shards, strict=True))
            array[box] = voxels[box]
