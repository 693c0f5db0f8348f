"""Tasks that any number of processes share through a folder, on one machine or on several.

A process that begins a task claims it with a file that only one process can make. It holds a lock
on the file and touches it while it works. Another process takes the task over if the file was not
touched for :data:`LEASE_SECONDS`, or at once if a process of the same machine has died, which
releases its lock. A process that was stopped for longer than that and goes on does its task a
second time, so a task must give the same result whoever does it.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread

from unet3d.atomic import HOST, locked

LEASE_SECONDS = 600.0
"""Age of a claim from which its process counts as dead."""

TOUCHES = 10
"""How often a claim is touched in this time."""


class Tasks:
    """The claims of tasks in a folder, and the tasks that are done."""

    def __init__(self, folder: Path, lease_s: float = LEASE_SECONDS) -> None:
        """Use a folder, which is made if it is missing."""
        self._claims, self._done = folder / "claims", folder / "done"
        for one in (self._claims, self._done):
            one.mkdir(parents=True, exist_ok=True)
        self._lease_s = lease_s
        with tempfile.TemporaryFile(dir=self._claims) as file:
            # Ages are measured with the clock of the file system, which all processes share.
            self._ahead_s = os.fstat(file.fileno()).st_mtime - time.time()

    def done(self) -> set[str]:
        """Return the names of the tasks that are done."""
        return set(os.listdir(self._done))

    def claimed(self) -> dict[str, bool]:
        """Return for each claimed task whether its process still works, as far as is known."""
        works: dict[str, bool] = {}
        for path in sorted(self._claims.iterdir()):
            works[path.stem] = works.get(path.stem, False) or not self._is_given_up(path)
        return works

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Yield whether this process may do a task, which is then done at the end of the context.

        An error in the context gives the task back.
        """
        opened = self._opened(name)
        if opened is None:
            yield False
            return
        path, descriptor = opened
        ended = Event()
        Thread(target=self._touch, args=(path, ended), daemon=True).start()
        try:
            # Another process may have done the task just before.
            may_do = not os.path.exists(self._done / name)
            yield may_do
            with suppress(FileNotFoundError):  # all tasks are done, and their folder is deleted
                (self._done / name).touch()
        finally:
            ended.set()
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _opened(self, name: str) -> tuple[Path, int] | None:
        """Make and lock the file of a claim; None if another process works on the task."""
        for attempt in count():  # earlier ones are given up
            path = self._claims / f"{name}.{attempt}"
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                if not self._is_given_up(path):
                    return None
                continue
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(descriptor, HOST.encode())
            return path, descriptor
        return None

    def _touch(self, path: Path, ended: Event) -> None:
        while not ended.wait(self._lease_s / TOUCHES):
            with suppress(OSError):
                os.utime(path)

    def _is_given_up(self, path: Path) -> bool:
        """Return whether the process of a claim is dead, or has not touched it for too long."""
        try:
            age_s = time.time() + self._ahead_s - path.stat().st_mtime
            if age_s > self._lease_s:
                return True
            if path.read_text() == HOST:  # else a lock would not be seen here
                with locked(path):
                    return True
        except OSError:  # the lock is held, or the claim has ended
            pass
        return False
