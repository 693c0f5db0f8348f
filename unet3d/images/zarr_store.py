"""Files of zarr stores: in a folder, in a zip file or at a URL; zarr reads them from here.

A file is read up to the size that its content can have, wherever it is.
"""

import asyncio
import atexit
import math
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import zarr
from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.zip import ZipFileSystem
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.sync import loop as zarr_loop
from zarr.core.sync import sync as zarr_sync
from zarr.storage import MemoryStore, WrapperStore

from unet3d.errors import VolumeError
from unet3d.images.files import ZARR_METADATA, ZIP_SUFFIXES, file_and_dataset, url_of
from unet3d.images.microscopy import warn_once
from unet3d.inputs.reading import MAX_JSON_BYTES, open_regular

METADATA = (*ZARR_METADATA, ".zattrs", ".zmetadata")
"""Names of files that hold no voxels."""

SPARE_BYTES = 2**20
"""Bytes beyond twice its voxels that a chunk may have: codecs and shards add a little."""

TIMEOUT_S = 10.0
"""Seconds in which a server must answer for the first time; later fsspec's own limits hold."""


class StoreFiles(WrapperStore[Any]):
    """The files around a volume, as a store of zarr; ``name`` is the place of the volume in it."""

    is_forbidden = False
    """Whether metadata may not be read, or do not exist where nobody may list files."""
    is_whole = False
    """Whether a missing chunk is an error; else it has the fill value."""
    is_sparse = False
    """Whether missing chunks are usual, as in label maps; else they are said."""

    def __init__(self, path: Path) -> None:
        """Take the path of a volume; nothing is read from a folder."""
        super().__init__(MemoryStore(read_only=True))  # all files come from get
        file, inside = file_and_dataset(path)
        url = url_of(file)
        self.volume = url_of(path) or str(path)
        """What to call the volume in messages."""
        self._metadata: dict[str, bytes | None] = {}
        self._files: Any = _Folder()
        place = os.path.abspath(file)
        if url:
            files, place = file_system(url)
            self._files = _Remote(files)
        if file.name.lower().endswith(ZIP_SUFFIXES) and (url or os.path.isfile(file)):
            try:
                self._files = _Zip(self._files.open(place))
            except ValueError as error:  # of fsspec
                raise VolumeError(
                    f"{self.volume} is at a server that does not send parts of files; download it"
                ) from error
            # The store may be in a folder of the zip file.
            metadata = [name for name in self._files.find("") if name.endswith(ZARR_METADATA)]
            outermost = min(metadata, key=lambda name: name.count("/"), default="")
            place = f"{outermost[: outermost.rfind('/') + 1]}{inside}".strip("/")
        self._root, self.name = place[: place.rfind("/") + 1], place[place.rfind("/") + 1 :]

    def node(self, name: str) -> Any:
        """Return a group or an array of zarr; None if there is none."""
        try:
            return zarr.open(self, path=name, mode="r", use_consolidated=False)
        except FileNotFoundError:
            return None

    def missing(self, what: str) -> VolumeError:
        """Return the error for metadata that are missing, or may not be read."""
        if self.is_forbidden:
            what = "may not be read; ask for the right to read it"
        return VolumeError(f"{self.volume} {what}")

    def opened(self, array: Any) -> Any:
        """Return an array of this store, whose chunks are read from now on."""
        if min(array.chunks, default=1) < 1:
            raise ValueError("a chunk has no voxels")
        self._fill_value = array.fill_value
        self._chunk_bytes = math.prod(array.shards or array.chunks) * array.dtype.itemsize
        self._is_sharded = bool(array.shards)
        codecs = [type(one).__name__.lower() for one in array.compressors]
        self._codec = next((one for one in reversed(codecs) if "crc32c" not in one), "")
        return array

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return the bytes of a file or of a part of it, or None if there is none."""
        start, end = 0, None
        if isinstance(byte_range, RangeByteRequest):
            start, end = byte_range.start, byte_range.end
        elif isinstance(byte_range, SuffixByteRequest):
            start = -byte_range.suffix
        found = await asyncio.to_thread(self._content, key, start, end)
        return None if found is None else prototype.buffer.from_bytes(found)

    def _content(self, key: str, start: int, end: int | None) -> bytes | None:
        if key.rpartition("/")[2] not in METADATA:
            most = 2 * self._chunk_bytes + SPARE_BYTES
            found = self._part(key, start, end, most)
            if found is None:
                self._report_missing(key)
            # Of a shard, the parts from 0 on and at its end may be no chunks.
            elif (start > 0 or not self._is_sharded) and _stated_bytes(self._codec, found) > most:
                raise VolumeError(
                    f"{self.volume} has a chunk in {key} that unpacks to more than {most} bytes, "
                    "twice its voxels; it is damaged: copy the volume again"
                )
            return found
        if key not in self._metadata:
            try:
                self._metadata[key] = self._part(key, 0, None, MAX_JSON_BYTES)
            except PermissionError:
                self.is_forbidden, self._metadata[key] = True, None
        return self._metadata[key]

    def _part(self, key: str, start: int, end: int | None, most: int) -> bytes | None:
        """Return a file or a part of it, of at most ``most`` bytes; None if there is none."""
        is_whole = (start, end) == (0, None)
        wanted = 0 if is_whole else -start if end is None else end - start
        try:
            found = b""
            if wanted < most:  # a damaged index may claim any size
                found = self._files.cat_file(self._root + key, start, most if is_whole else end)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except TimeoutError as error:
            raise VolumeError(
                f"{self.volume} did not answer in time; check the address and the network"
            ) from error
        except Exception as error:
            if getattr(error, "status", None) in (401, 403):  # an error of aiohttp
                raise PermissionError(str(error)) from error
            raise
        if not is_whole and len(found) > wanted:  # a server that sends only whole files
            found = found[start:end]
        if not 0 < len(found) < most:
            raise VolumeError(
                f"{self.volume} has a file {key} of {len(found) or wanted} bytes, but its content "
                f"takes up to {most - 1}; it is damaged: copy the volume again"
            )
        return bytes(found)

    def _report_missing(self, key: str) -> None:
        if self.is_whole:
            raise VolumeError(f"{self.volume} lacks its file {key}; write or copy it again")
        if not self.is_sparse:
            warn_once(
                self.volume,
                "%s has no file for some chunks, such as %s; their voxels are %s, as zarr defines: "
                "if they should have others, copy the volume again",
                *(key, self._fill_value),
            )


def _stated_bytes(codec: str, packed: bytes) -> int:
    """Return the size to which a chunk says that it unpacks; 0 if it does not say so."""
    begin, width = (4, 4) if "blosc" in codec else (0, 4 if "lz4" in codec else 0)
    if "zstd" in codec:
        flags = int.from_bytes(packed[4:5])
        is_single = flags >> 5 & 1
        begin = 6 - is_single + (0, 1, 2, 4)[flags & 3]
        width = (is_single, 2, 4, 8)[flags >> 6]
    return int.from_bytes(packed[begin : begin + width], "little")


class _Folder(LocalFileSystem):
    """A folder, of which only regular files are read: a FIFO could block forever."""

    def cat_file(self, path: str, start: int, end: int | None) -> bytes:
        with open_regular(Path(path)) as file:
            first, last, _ = slice(start, end).indices(os.fstat(file.fileno()).st_size)
            file.seek(first)
            return file.read(last - first)


class _Zip(ZipFileSystem):
    """A zip file. Before Python 3.13, zipfile reads all that is before a part of a file."""

    def cat_file(self, path: str, start: int, end: int | None) -> bytes:
        one = self.zip.NameToInfo.get(path)
        if one is None or one.compress_type != zipfile.ZIP_STORED:
            return bytes(super().cat_file(path, start, end))
        first, last, _ = slice(start, end).indices(one.file_size)
        with self.zip._lock:
            self.zip.fp.seek(one.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", self.zip.fp.read(4))
            self.zip.fp.seek(one.header_offset + 30 + name_bytes + extra_bytes + first)
            return bytes(self.zip.fp.read(last - first))


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """Return the file system of fsspec at a URL, and the name of the file in it."""
    try:
        files, name = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise VolumeError(
            f"reading {url} needs a package: {error}; for https and s3, pip install "
            "'unet3d-parallel[remote]'"
        ) from error
    except ValueError as error:
        raise VolumeError(f"cannot read {url}: {error}; name a file, or a URL") from error
    return files, name.rstrip("/")


class _Remote:
    """A file system of fsspec whose server must answer in time and, once it has, may fail twice."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self._timeout_s: float | None = TIMEOUT_S

    def cat_file(self, name: str, start: int, end: int | None, attempts: int = 3) -> bytes:
        if not self._files.async_impl:
            return bytes(self._files.cat_file(name, start=start, end=end))
        timeout_s = self._timeout_s
        part = {"start": start, "end": end, "timeout": timeout_s}
        try:
            found = bytes(sync(self._files.loop, self._files._cat_file, name, **part))
            self._timeout_s = None  # several files are asked for before the first answer
            return found
        except (FileNotFoundError, PermissionError, TimeoutError):
            raise
        except Exception as error:
            if type(error).__name__ == "NoCredentialsError" and attempts:
                self._files = type(self._files)(anon=True)  # public buckets of S3 need none
            elif timeout_s or attempts == 1 or 400 <= getattr(error, "status", 0) < 500:
                raise
            return self.cat_file(name, start, end, attempts - 1)

    def open(self, name: str) -> Any:
        """Return a file that is open, and reads ahead."""
        self.cat_file(name, 0, 4)  # in time, or not at all
        return self._files.open(name)


async def _end_reads() -> None:
    """Wait for the chunks that zarr still reads after an error: Python would warn of each."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


atexit.register(lambda: zarr_loop[0] and zarr_sync(_end_reads()))
