"""Files of a zarr store in a folder, in a zip file or at a URL, read through one interface."""

import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from unet3d.errors import VolumeError
from unet3d.images.files import ZARR_METADATA, ZIP_SUFFIXES, file_and_dataset, url_of
from unet3d.inputs.reading import MAX_JSON_BYTES, open_regular

TIMEOUT_S = 10.0
"""Seconds in which a server must answer for the first time; later fsspec's own limits hold."""

Read = Callable[[str, int, int | None], bytes]
"""Returns the bytes of a file from a start, which may count from the end, to an end."""


def joined(folder: str, name: str) -> str:
    """Return the name of a file in a folder; the outermost folder of a zip file has no name."""
    return f"{folder}/{name}" if folder else name


class StoreFiles:
    """The files of the store in which a volume lies. A name is a path, or a URL."""

    def __init__(self, path: Path) -> None:
        """Take the path of a volume; nothing is read from a folder."""
        file, inside = file_and_dataset(path)
        url = url_of(file)
        self.volume = url_of(path) or str(path)
        """What to call the volume in messages."""
        self._is_forbidden = False
        self._metadata: dict[str, bytes | None] = {}
        remote = _Remote(url) if url else None
        self._read: Read = remote.read if remote else _in_folder
        self.root = remote.name if remote else os.path.abspath(path)
        """Name of the volume's folder."""
        if file.name.lower().endswith(ZIP_SUFFIXES) and (url or os.path.isfile(file)):
            try:
                archive = _Zip(remote.opened() if remote else file)
            except ValueError as error:  # of fsspec
                raise VolumeError(
                    f"{self.volume} is at a server that does not send parts of files; download it"
                ) from error
            self._read, self.root = archive.read, f"{archive.root}{inside}".strip("/")

    def metadata(self, name: str) -> bytes | None:
        """Return a file of metadata, which is read once; None if there is none."""
        if name not in self._metadata:
            try:
                self._metadata[name] = self.read(name, MAX_JSON_BYTES)
            except PermissionError:  # where nobody may list files, so are those that do not exist
                self._is_forbidden, self._metadata[name] = True, None
        return self._metadata[name]

    def refuse_forbidden(self) -> None:
        """Raise VolumeError if metadata seem to be missing that may not be read."""
        if self._is_forbidden:
            raise VolumeError(f"{self.volume} may not be read; ask for the right to read it")

    def read(
        self, name: str, max_bytes: int, start: int = 0, end: int | None = None
    ) -> bytes | None:
        """Return a file or a part of it, of at most ``max_bytes``; None if there is none.

        A negative start counts from the end.
        """
        is_whole = (start, end) == (0, None)
        wanted = max_bytes + 1 if is_whole else -start if end is None else end - start
        found = b""
        if 0 < wanted <= max_bytes + is_whole:
            try:
                found = self._read(name, start, wanted if is_whole else end)
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
        if not (0 < len(found) <= max_bytes if is_whole else len(found) == wanted):
            size = f"more than {max_bytes}" if len(found) > max_bytes else str(len(found))
            needs = f"its content takes up to {max_bytes}" if is_whole else f"{wanted} are needed"
            raise VolumeError(
                f"{self.volume} has a file {name.removeprefix(self.root).strip('/')} of {size} "
                f"bytes, but {needs}; it is damaged: copy the volume again"
            )
        return found


def _in_folder(name: str, start: int, end: int | None) -> bytes:
    with open_regular(Path(name)) as file:
        first, last, _ = slice(start, end).indices(os.fstat(file.fileno()).st_size)
        file.seek(first)
        return file.read(last - first)


class _Zip:
    """A zip file of a store, which may be in a folder in it."""

    def __init__(self, file: Any) -> None:
        self._packed, self._lock = zipfile.ZipFile(file), Lock()
        names = self._packed.namelist()
        outermost = min(
            (name for name in names if name.rpartition("/")[2] in ZARR_METADATA),
            key=lambda name: (name.count("/"), name),
            default="",
        )
        self.root = outermost[: outermost.rfind("/") + 1]

    def read(self, name: str, start: int, end: int | None) -> bytes:
        with self._lock:
            try:
                one = self._packed.getinfo(name)
            except KeyError as error:
                raise FileNotFoundError(name) from error
            first, last, _ = slice(start, end).indices(one.file_size)
            if one.compress_type == zipfile.ZIP_STORED and last - first < one.file_size:
                # zipfile would read everything before the part.
                file: Any = self._packed.fp
                file.seek(one.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
                file.seek(one.header_offset + 30 + name_bytes + extra_bytes + first)
                return bytes(file.read(last - first))
            with self._packed.open(one) as unpacked:
                unpacked.seek(first)
                return unpacked.read(last - first)


class _Remote:
    """Files at URLs of any kind that fsspec knows."""

    def __init__(self, url: str) -> None:
        import fsspec  # takes time, and few volumes are remote

        try:
            self._files, self.name = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise VolumeError(
                f"reading {url} needs a package: {error}; for https and s3, pip install "
                "'unet3d-parallel[remote]'"
            ) from error
        except ValueError as error:
            raise VolumeError(f"cannot read {url}: {error}; name a file, or a URL") from error
        self.name = self.name.rstrip("/")
        self._timeout_s: float | None = TIMEOUT_S

    def read(self, name: str, start: int, end: int | None, attempts: int = 3) -> bytes:
        """Return a part of a file; a server that has answered once may fail twice."""
        from fsspec.asyn import sync

        if not self._files.async_impl:
            return bytes(self._files.cat_file(name, start=start, end=end))
        timeout_s, self._timeout_s = self._timeout_s, None
        part = {"start": start, "end": end, "timeout": timeout_s}
        try:
            return bytes(sync(self._files.loop, self._files._cat_file, name, **part))
        except (FileNotFoundError, PermissionError, TimeoutError):
            raise
        except Exception as error:
            if type(error).__name__ == "NoCredentialsError" and attempts:
                self._files = type(self._files)(anon=True)  # public buckets of S3 need none
            elif timeout_s or attempts == 1 or 400 <= getattr(error, "status", 0) < 500:
                raise
            return self.read(name, start, end, attempts - 1)

    def opened(self) -> Any:
        """Return the file as one that is open, and reads ahead."""
        self.read(self.name, 0, 4)  # in time, or not at all
        return self._files.open(self.name)
