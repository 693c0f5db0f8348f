"""Tasks that any number of processes share through a folder, or through an object store.

A process that begins a task claims it with a file that only one process can make, and touches it
while it works. Another process takes the task over if the file was not touched for
:data:`LEASE_SECONDS`. On a file system, the process holds a lock on the file, so that others of its
machine take over at once when it dies. A process that was stopped for longer and goes on does its
task a second time, so a task must give the same result whoever does it.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread

from unet3d.atomic import HOST, locked
from unet3d.images.files import url_of
from unet3d.images.objects import Objects

LEASE_SECONDS = 600.0
"""Age of a claim from which its process counts as dead."""

TOUCHES = 10
"""How often a claim is touched in this time."""

CLAIMS, DONE = "claims", "done"
"""Folders of claims, and of what is done."""

BEGUN = "begun"
"""Object among what is done: without it, another process has finished all, and deleted them."""


class Claim:
    """A task that this process works on."""

    def __init__(self, place: "_Folder | _Prefix", name: str, file: str, lease_s: float) -> None:
        """Touch the file of the claim from now on."""
        self.name = name
        self._place, self._file = place, file
        self._ended = Event()
        self._toucher = Thread(target=self._touch, args=(lease_s / TOUCHES,), daemon=True)
        self._toucher.start()

    def finish(self) -> None:
        """Note that the task is done."""
        with suppress(FileNotFoundError):  # another process did the last task, and deleted all
            self._place.write(f"{DONE}/{self.name}")
        self.give_back()

    def give_back(self) -> None:
        """End the claim; a task that is not done can be claimed again."""
        if not self._ended.is_set():
            self._ended.set()
            self._toucher.join()  # a late touch would make an object again
            self._place.delete(self._file)

    def _touch(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            with suppress(OSError):
                self._place.touch(self._file)


class Tasks:
    """The claims of tasks in a folder or below a URL, and the tasks that are done."""

    def __init__(
        self, folder: Path, lease_s: float = LEASE_SECONDS, *, begins: bool = True
    ) -> None:
        """Make the folder if this process ``begins`` to work, and does not only look."""
        is_url = bool(url_of(folder))
        self._place = _Prefix(folder, begins) if is_url else _Folder(folder, begins)
        self._lease_s = lease_s
        self.patience = 10 if is_url else 1
        """By how much longer to wait between looks, which cost money in object stores."""

    def done(self) -> set[str]:
        """Return the names of the tasks that are done."""
        return set(self._place.times(DONE))

    def seconds_per_task(self, names: Collection[str]) -> float | None:
        """Return the mean time between the ends of some tasks; None for fewer than two."""
        times = [time for name, time in self._place.times(DONE).items() if name in names]
        return (max(times) - min(times)) / (len(times) - 1) if len(times) > 1 else None

    def at_work(self) -> dict[str, bool]:
        """Return for each claimed task whether its process is alive, as far as is known."""
        return self._alive(self._place.times(CLAIMS))

    def _alive(self, claimed: Mapping[str, float]) -> dict[str, bool]:
        alive: dict[str, bool] = {}
        oldest = time.time() + self._place.ahead_s - self._lease_s
        for file, touched in claimed.items():
            name = file.partition(".")[0]
            is_dead = touched < oldest or self._place.is_dead(f"{CLAIMS}/{file}")
            alive[name] = alive.get(name, False) or not is_dead
        return alive

    def claims(self, names: Iterable[str]) -> Iterator[Claim]:
        """Begin, one by one, those of some tasks at which no other process works."""
        claimed = self._place.times(CLAIMS)
        alive = self._alive(claimed)
        for name in names:
            if alive.get(name):
                continue
            files = (f"{name}.{attempt}" for attempt in count())  # earlier ones are given up
            file = f"{CLAIMS}/{next(file for file in files if file not in claimed)}"
            with suppress(FileExistsError):  # another process was faster
                self._place.create(file)
                claim = Claim(self._place, name, file, self._lease_s)
                if not self._place.exists(f"{DONE}/{name}"):
                    yield claim
                else:  # another process did the task just before
                    claim.give_back()


class _Folder:
    """Claims on a file system."""

    def __init__(self, path: Path, begins: bool) -> None:
        self._path = path
        self._held: dict[str, int] = {}
        """Descriptors of claims, whose locks say who is alive."""
        for folder in (CLAIMS, DONE) if begins else ():
            (path / folder).mkdir(parents=True, exist_ok=True)
        self.ahead_s = 0.0
        # Who may only read the folder can still see what is done.
        with suppress(OSError), tempfile.TemporaryFile(dir=path) as file:
            # Ages are measured with the clock of the file system, which all processes share.
            self.ahead_s = os.fstat(file.fileno()).st_mtime - time.time()

    def times(self, folder: str) -> dict[str, float]:
        """Return when each file of a folder was touched."""
        times = {}
        for path in (self._path / folder).iterdir():
            with suppress(FileNotFoundError):  # it was given back just now
                times[path.name] = path.stat().st_mtime
        return times

    def exists(self, name: str) -> bool:
        return (self._path / name).exists()

    def write(self, name: str) -> None:
        (self._path / name).touch()

    def touch(self, name: str) -> None:
        os.utime(self._path / name)  # makes no file, if another process has deleted all

    def create(self, name: str) -> None:
        """Make and lock a file, or raise FileExistsError."""
        descriptor = os.open(self._path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, HOST.encode())  # from now on, the lock says who is alive
        self._held[name] = descriptor

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)
        os.close(self._held.pop(name))

    def is_dead(self, name: str) -> bool:
        """Return whether the process of a claim was one of this machine, and has died."""
        path = self._path / name
        with suppress(OSError):  # the lock is held, or the claim has ended
            if path.read_text() == HOST:  # locks of other machines may not be seen
                with locked(path):
                    return True
        return False


class _Prefix(Objects):
    """Claims in an object store, which has no locks."""

    def __init__(self, path: Path, begins: bool) -> None:
        super().__init__(path)
        self.ahead_s = 0.0
        if begins:
            self.write(f"{DONE}/{BEGUN}")
            now = time.time()
            self.ahead_s = super().times(DONE).get(BEGUN, now) - now

    def times(self, folder: str) -> dict[str, float]:
        times = super().times(folder)
        if folder == DONE and BEGUN not in times:
            raise FileNotFoundError("all tasks are done, or none was begun")
        return times

    def touch(self, name: str) -> None:
        self.write(name)

    def is_dead(self, name: str) -> bool:
        return False
