"""Small values that processes tell one another, in files of a folder that only one user can open.

PyTorch's own store for one machine (FileStore) only ever appends, so the notes of every step would
fill the disk: 80 bytes each, gigabytes a day. Its TCPStore listens on all interfaces.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fcntl import LOCK_EX, LOCK_SH, flock
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from unet3d.errors import LostRankError, RankError, reason_of

POLL_SECONDS = 0.01
LENGTH_BYTES = 8


class ValueStore(Protocol):
    """What is used of a store: PyTorch's, which also connects machines, or the folder below."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value in place of the one before."""

    def get(self, key: str, /) -> bytes:
        """Return a value, which must be there."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys are there."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a value and return whether there was one."""


class FolderStore:
    """A file for each key.

    A value that replaces another must be shorter than a page of 4 KiB: so much is written whole or
    not at all, also if the writer is killed.
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder.

        Args:
            folder: Made where it is missing; the one above it exists.
        """
        self._folder = folder
        with self._explained():
            folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str, /) -> None:
        """Store a value in place of the one before.

        Raises:
            RankError: The file cannot be written.
        """
        content = value.encode()
        content = len(content).to_bytes(LENGTH_BYTES) + content
        with self._explained(), self._opened(key, os.O_WRONLY | os.O_CREAT, LOCK_EX) as descriptor:
            # In place, because a rename over an old file takes a disk 0.8 ms.
            if os.pwrite(descriptor, content, 0) != len(content):
                raise RankError(f"cannot write to {self._folder}: make space there, or set TMPDIR")

    def get(self, key: str, /) -> bytes:
        """Return a value, which must be there.

        Raises:
            RankError: The file cannot be read.
            LostRankError: It was not written to its end.
        """
        with self._explained(), self._opened(key, os.O_RDONLY, LOCK_SH) as descriptor:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES])
        if len(content) < end:
            raise LostRankError("another rank ended while it wrote to the others")
        return content[LENGTH_BYTES:end]  # behind it may be the rest of a longer one

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys are there."""
        return all(self._is_there(key) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: They do not come in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"not all of {', '.join(keys)} came within {timeout}")
            time.sleep(POLL_SECONDS)

    def delete_key(self, key: str, /) -> bool:
        """Delete a value and return whether there was one."""
        is_there = self._is_there(key)
        self._path(key).unlink(missing_ok=True)
        return is_there

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _is_there(self, key: str) -> bool:
        try:
            return self._path(key).stat().st_size > 0  # it is empty until it is written
        except FileNotFoundError:
            return False

    @contextmanager
    def _opened(self, key: str, flags: int, lock: int) -> Iterator[int]:
        descriptor = os.open(self._path(key), flags | os.O_CLOEXEC, 0o600)
        try:
            flock(descriptor, lock)  # released with the descriptor, and when the process ends
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RankError(
                f"the ranks cannot meet in {self._folder}: {reason_of(error)}; make space there, "
                "or set TMPDIR to another folder"
            ) from error
