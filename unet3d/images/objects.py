"""Objects of a store such as S3, which processes write through fsspec and its package."""

import errno
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unet3d.errors import ConfigError, reason_of
from unet3d.images.files import is_store, place_of, url_of
from unet3d.images.zarr_store import StoreFiles, file_system

UNCACHED = {"use_listings_cache": False}
"""Option of fsspec: other processes write, too."""

EXISTS = ("PreconditionFailed", "412", "ConditionalRequestConflict")
"""Codes of S3 for an object that exists, or that another process is making at the moment."""

WORK = ".claims"
"""Name of the folder of claims in a store; readers of zarr ignore it."""


@contextmanager
def naming_place(path: Path) -> Iterator[None]:
    """Name a folder or URL in system errors, and raise those of libraries for S3 as such."""
    try:
        yield
    except OSError as error:
        kinds = (FileExistsError, FileNotFoundError, PermissionError, OSError)
        kind = next(one for one in kinds if isinstance(error, one))
        raise kind(error.errno, reason_of(error), place_of(path)) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("aiobotocore", "aiohttp", "botocore"):
            raise
        raise OSError(errno.EIO, " ".join(str(error).split()), place_of(path)) from error


def store_exists(path: Path) -> bool:
    """Return whether there is a store in a folder or at a URL."""
    with naming_place(path):
        files = StoreFiles(path)
        return files.node(files.name) is not None if url_of(path) else is_store(path)


class Objects:
    """The objects below a URL; all errors are OSError."""

    def __init__(self, path: Path) -> None:
        """Take a URL; nothing is asked."""
        self._path = path
        self._files, self._name = file_system(place_of(path), **UNCACHED)

    def create(self, name: str, content: bytes = b"") -> None:
        """Write an object, or raise FileExistsError; a store that cannot tell replaces it."""
        with naming_place(self._path):
            try:
                self._files.pipe_file(f"{self._name}/{name}", content, mode="create")
            except OSError as error:
                answer = getattr(error.__cause__, "response", {}).get("Error", {})
                if answer.get("Code") in EXISTS:
                    raise FileExistsError(str(error)) from error
                if error.errno != errno.ENOSYS:
                    raise
                self.write(name, content)

    def refuse_without_claims(self) -> None:
        """Raise ConfigError if the store cannot tell whether an object exists that is made."""
        name = f"{WORK}/{uuid.uuid4().hex}"
        self.write(name)
        try:
            self.create(name)
        except FileExistsError:
            return
        finally:
            self.delete(name)
        raise ConfigError(
            f"{place_of(self._path)} is in an object store without conditional writes, so blocks "
            "cannot be claimed; give each process a fixed share: --part K/N, 1/1 for a single one"
        )

    def write(self, name: str, content: bytes = b"") -> None:
        """Write an object, or replace it."""
        with naming_place(self._path):
            self._files.pipe_file(f"{self._name}/{name}", content)

    def exists(self, name: str) -> bool:
        """Return whether there is an object."""
        with naming_place(self._path):
            return bool(self._files.exists(f"{self._name}/{name}"))

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        with naming_place(self._path):
            return bytes(self._files.cat_file(f"{self._name}/{name}"))

    def times(self, folder: str) -> dict[str, float]:
        """Return the names of the objects in a folder, with the time when each was written."""
        with naming_place(self._path):
            found = self._files.find(f"{self._name}/{folder}", detail=True)
        return {
            name.rpartition("/")[2]: one["LastModified"].timestamp()
            for name, one in found.items()
            if one["type"] == "file"  # of a folder that was made meanwhile, s3fs gives itself
        }

    def delete(self, name: str) -> None:
        """Delete an object, which need not exist."""
        with naming_place(self._path):
            self._files.rm_file(f"{self._name}/{name}")

    def clear(self, folder: str) -> None:
        """Delete the objects of a folder, as far as that is allowed."""
        with naming_place(self._path), suppress(FileNotFoundError):
            self._files.rm(f"{self._name}/{folder}", recursive=True)
