"""Opens zarr arrays of untrusted stores, wherever their files are; needs the package zarr."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
from isal import isal_zlib
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.storage import MemoryStore, WrapperStore

from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.microscopy import warn_once
from unet3d.images.store_files import StoreFiles, joined

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
"""Names of files that hold no voxels."""

MAX_SIZE = 2**40
"""Most voxels along an axis, and bytes of an array divided by 2**20: more overflows elsewhere."""

SPARE_BYTES = 2**20
"""Bytes beyond twice its voxels that a chunk may have: codecs and shards add a little."""

NO_CHUNK = 2**64 - 1
"""Offset of a chunk that a shard does not hold."""


class VoxelStore(WrapperStore[Any]):
    """The files of an array; refuses those that are larger, packed or unpacked, than its voxels.

    In a sparse array missing chunks are usual, in a whole one they are an error.
    """

    array: Any = None
    error: Exception | None = None
    """Why a box cannot be read, for its chunks that were not read yet."""
    loop: Any = None
    """The event loop of zarr."""

    def __init__(self, files: StoreFiles, place: str, is_sparse: bool, is_whole: bool) -> None:
        super().__init__(MemoryStore(read_only=True))  # all files come from get
        self._files, self._place = files, place
        self._is_sparse, self._is_whole = is_sparse, is_whole

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return the bytes of a file or of a part of it, or None if there is none."""
        self.loop = asyncio.get_running_loop()
        if self.error is not None:
            raise self.error
        found = await asyncio.to_thread(self._content, key, byte_range)
        return None if found is None else prototype.buffer.from_bytes(found)

    def _content(self, key: str, byte_range: Any) -> bytes | None:
        name, start, end = joined(self._place, key), 0, None
        if key.rpartition("/")[2] in METADATA:
            return self._files.metadata(name)
        if isinstance(byte_range, RangeByteRequest):
            start, end = byte_range.start, byte_range.end
        elif isinstance(byte_range, SuffixByteRequest):
            start = -byte_range.suffix
        num_bytes = math.prod(self.array.shards or self.array.chunks) * self.array.dtype.itemsize
        found = self._files.read(name, 2 * num_bytes + SPARE_BYTES, start, end)
        if found is None:
            self._report_missing(key)
        else:
            for chunk in _packed_chunks(self.array, memoryview(found), start, byte_range is None):
                self._refuse_bomb(key, chunk)
        return found

    def _report_missing(self, key: str) -> None:
        volume = self._files.volume
        if self._is_whole:
            raise VolumeError(f"{volume} lacks its file {key}; write or copy it again")
        if not self._is_sparse:
            warn_once(
                volume,
                "%s has no file for some chunks, such as %s; their voxels are %s, as zarr defines: "
                "if they should have others, copy the volume again",
                *(key, self.array.fill_value),
            )

    def _refuse_bomb(self, key: str, chunk: memoryview) -> None:
        limit = 2 * math.prod(self.array.chunks) * self.array.dtype.itemsize + SPARE_BYTES
        codecs = [
            type(one).__name__.lower().removesuffix("codec") for one in self.array.compressors
        ]
        outermost = next((name for name in reversed(codecs) if name != "crc32c"), "")
        if _unpacked_bytes(outermost, chunk, limit) > limit:
            raise VolumeError(
                f"{self._files.volume} has a chunk in {key} that unpacks to more than {limit} "
                "bytes, twice its voxels; it is damaged or malicious: do not use it"
            )


class VoxelArray:
    """An array of zarr. After an error it waits for the other chunks of a box.

    Else Python would warn of each of them when it ends.
    """

    def __init__(self, array: Any, store: VoxelStore) -> None:
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, array.chunks
        self._array, self._store = array, store

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        try:
            return self._array[box]
        except Exception as error:
            self._store.error = error
            asyncio.run_coroutine_threadsafe(_others(), self._store.loop).result()
            self._store.error = None
            raise


async def _others() -> None:
    """Wait for all tasks, except those that wait here for another box."""
    coroutines = {task: task.get_coro() for task in asyncio.all_tasks()}
    others = [one for one, at in coroutines.items() if getattr(at, "__name__", "") != "_others"]
    await asyncio.gather(*others, return_exceptions=True)


def _packed_chunks(
    array: Any, packed: memoryview, start: int, is_file: bool
) -> Iterator[memoryview]:
    """Yield the packed chunks in a part of a file, or in a file: one, or all of a shard."""
    if not array.shards:
        yield packed
        return
    sharding = array.metadata.codecs[0]
    is_at_start = sharding.index_location.value == "start"
    if not is_file:
        if start > 0 or (start == 0 and not is_at_start):  # else it is the index
            yield packed
        return
    ratios = zip(array.shards, array.chunks, strict=True)
    index_bytes = 16 * math.prod(shard // chunk for shard, chunk in ratios)
    checksum_bytes = 4 * (len(sharding.index_codecs) - 1)
    index = packed[0 if is_at_start else -index_bytes - checksum_bytes :][:index_bytes]
    for offset, num_bytes in np.frombuffer(index, "<u8").reshape(-1, 2).tolist():
        if offset != NO_CHUNK:
            yield packed[offset : offset + num_bytes]


def _unpacked_bytes(codec: str, packed: memoryview, limit: int) -> int:
    """Return the unpacked size of a chunk, or a size above the limit; 0 if it is not stated."""
    if codec == "blosc":
        return int.from_bytes(packed[4:8], "little")
    if codec == "lz4":
        return int.from_bytes(packed[:4], "little")
    if codec == "zstd":
        return _zstd_bytes(packed)
    wbits, total = {"gzip": 31, "zlib": 15}.get(codec, 0), 0
    left = bytes(packed) if wbits else b""
    while left and total <= limit:  # a file of gzip may have several members
        inflater = isal_zlib.decompressobj(wbits)
        total += len(inflater.decompress(left, limit + 1 - total))
        left = inflater.unused_data
    return total


def _zstd_bytes(packed: memoryview) -> int:
    """Return the size that a frame of Zstandard states, or the most that its blocks can hold."""
    described, at = packed[4], 5
    is_single = described >> 5 & 1
    at += (1 - is_single) + (0, 1, 2, 4)[described & 3]
    width = (is_single, 2, 4, 8)[described >> 6]
    if width:
        return int.from_bytes(packed[at : at + width], "little") + 256 * (width == 2)
    total = is_last = 0
    while not is_last and at + 3 <= len(packed):
        header = int.from_bytes(packed[at : at + 3], "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        total += 2**17 if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
    return total


def open_array(
    files: StoreFiles, place: str, zarr_format: Any, is_sparse: bool, is_whole: bool
) -> VoxelArray:
    """Open an array in a folder of a store, but read no voxels."""
    store = VoxelStore(files, place, is_sparse, is_whole)
    array = store.array = zarr.open_array(store, mode="r", zarr_format=zarr_format)
    shape = array.shape
    if min(array.chunks, default=1) < 1:
        raise VolumeError(f"{files.volume} claims chunks of {times(array.chunks)}; it is damaged")
    if max(shape, default=1) > MAX_SIZE or math.prod(shape) > MAX_SIZE * 2**20:
        raise VolumeError(f"{files.volume} claims the shape {times(shape)}; it is damaged")
    return VoxelArray(array, store)
