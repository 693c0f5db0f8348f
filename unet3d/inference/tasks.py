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
from collections.abc import Collection
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread

from unet3d.atomic import HOST, locked

LEASE_SECONDS = 600.0
"""Age of a claim from which its process counts as dead."""

TOUCHES = 10
"""How often a claim is touched in this time."""


class Claim:
    """A task that this process works on."""

    def __init__(self, path: Path, descriptor: int, done: Path, lease_s: float) -> None:
        """Touch the file of the claim from now on."""
        self.name = done.name
        self._path, self._descriptor, self._done = path, descriptor, done
        self._ended = Event()
        Thread(target=self._touch, args=(lease_s / TOUCHES,), daemon=True).start()

    def finish(self) -> None:
        """Note that the task is done."""
        with suppress(FileNotFoundError):  # another process did the last task, and deleted all
            self._done.touch()
        self.give_back()

    def give_back(self) -> None:
        """End the claim; a task that is not done can be claimed again."""
        if not self._ended.is_set():
            self._ended.set()
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)

    def _touch(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            with suppress(OSError):
                os.utime(self._path)


class Tasks:
    """The claims of tasks in a folder, and the tasks that are done."""

    def __init__(self, folder: Path, lease_s: float = LEASE_SECONDS) -> None:
        """Use a folder, which is made if it is missing."""
        self._claims, self._done = folder / "claims", folder / "done"
        for one in (self._claims, self._done):
            one.mkdir(parents=True, exist_ok=True)
        self._lease_s = lease_s
        self._ahead_s = 0.0
        # Who may only read the folder can still see what is done.
        with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            # Ages are measured with the clock of the file system, which all processes share.
            self._ahead_s = os.fstat(file.fileno()).st_mtime - time.time()

    def done(self) -> set[str]:
        """Return the names of the tasks that are done."""
        return set(os.listdir(self._done))

    def seconds_per_task(self, names: Collection[str]) -> float | None:
        """Return the mean time between the ends of some tasks; None for fewer than two."""
        times = [(self._done / name).stat().st_mtime for name in names]
        return (max(times) - min(times)) / (len(times) - 1) if len(times) > 1 else None

    def at_work(self) -> dict[str, bool]:
        """Return for each claimed task whether its process is alive, as far as is known."""
        alive: dict[str, bool] = {}
        for path in self._claims.iterdir():
            alive[path.stem] = alive.get(path.stem, False) or not self._is_given_up(path)
        return alive

    def claim(self, name: str) -> Claim | None:
        """Begin a task; None if it is done, or another process works on it."""
        for attempt in count():  # earlier ones are given up
            path, done = self._claims / f"{name}.{attempt}", self._done / name
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                if not self._is_given_up(path):
                    return None
                continue
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(descriptor, HOST.encode())  # from now on, the lock says who is alive
            claim = Claim(path, descriptor, done, self._lease_s)
            if not os.path.exists(done):
                return claim
            claim.give_back()  # another process did the task just before
            return None
        return None

    def _is_given_up(self, path: Path) -> bool:
        """Return whether the process of a claim is dead, or has not touched it for too long."""
        try:
            age_s = time.time() + self._ahead_s - path.stat().st_mtime
            if age_s > self._lease_s:
                return True
            if path.read_text() == HOST:  # locks of other machines may not be seen
                with locked(path):
                    return True
        except OSError:  # the lock is held, or the claim has ended
            pass
        return False
