"""Atomic writing: a file or folder is always the old one or the new one, never a part of either.

Everything is written beside its final name, flushed to the disk, and only then renamed. The folder
is flushed last, because a power cut could otherwise undo the rename.

The writing process holds a lock on unpublished files, which the system releases even after SIGKILL.
The next process that writes to the same folder deletes temporary files without a lock, and restores
a folder whose replacement was interrupted.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from unet3d.errors import CacheError
from unet3d.interruption import at_sudden_end, postponed_interruption

PREFIX = ".unfinished-"
"""Prefix of temporary files and folders, which are published or deleted."""

REPLACED = ".replaced-"
"""Prefix of a temporary folder that holds an old folder while a new one replaces it."""

MAX_ENDING = 16
"""A temporary name ends in this many letters of the final name: enough for every file ending."""

ELSEWHERE_SECONDS = 24 * 3600.0
"""Age in seconds from which a temporary file of another machine counts as left behind."""

HOST = hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]
"""Identifies this machine in names of files."""

_NAME = re.compile(
    f"({re.escape(PREFIX)}|{re.escape(REPLACED)})([0-9a-f]{{8}})[0-9a-f]{{24}}(-.*)?", re.DOTALL
)
"""Matches temporary names; the second group identifies the machine that made the file."""

_swept: set[Path] = set()


def users_cache() -> Path:
    """Return the path ``unet3d`` in the user's cache folder; CacheError if there is none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unet3d"
    except RuntimeError as error:  # no HOME, and a user that the system does not know
        raise CacheError(
            "there is no cache folder, because this user has no home folder; set data.cache"
        ) from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file, whose folder exists, with what a function writes to an open binary file."""
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        write(file)


@contextmanager
def replacing(path: Path, *, may_exist: bool = True) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which then replaces a file.

    A device or a pipe is refused, and the new file keeps the permissions of the old one. Without
    ``may_exist``, an existing file raises FileExistsError, even if it appears only meanwhile.
    """
    with _temporary(path, Path.touch) as unfinished:
        yield unfinished
        flush(unfinished)
        if not may_exist:
            _claim(unfinished, path)
        else:
            if os.path.lexists(path) and not (path.is_symlink() or path.is_file() or path.is_dir()):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            _keep_permissions(unfinished, path)
            os.replace(unfinished, path)
    flush(path.absolute().parent)


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder, and publish it with its content, or leave nothing.

    Raises FileExistsError if a folder of that name exists that is neither empty nor to be replaced.
    """
    with unfinished_folder(path) as unfinished:
        yield unfinished
        publish_folder(unfinished, path, replace=replace)


@contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Make a hidden folder beside a path for files to publish, and delete it at the end."""
    make_folder(path.absolute().parent)
    with _temporary(path, Path.mkdir) as unfinished:
        yield unfinished


def publish_folder(folder: Path, path: Path, *, replace: bool = False) -> None:
    """Flush a folder with everything in it, then give it a name on the same file system.

    A folder to be replaced is deleted only after the new one is in its place.
    """
    _flush_all(folder)
    parent = path.absolute().parent
    with ExitStack() as stack:
        if replace and path.is_dir():
            # A folder cannot be renamed onto another.
            aside = stack.enter_context(_temporary(path, Path.mkdir, REPLACED))
            os.rename(path, aside / path.name)
        try:
            os.rename(folder, path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise FileExistsError(error.errno, error.strerror, str(path)) from error
        flush(parent)


@contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Make a private folder for temporary files, and delete it at the end."""
    with _temporary(Path(tempfile.gettempdir(), name), lambda path: path.mkdir(0o700)) as folder:
        yield folder


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush their entries to the disk."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        flush(folder.parent)


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file; a writer that is killed may leave a part of the content."""
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(content)
    flush(path)
    if is_new:
        flush(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[os.stat_result]:
    """Lock a file or a folder, or raise BlockingIOError if another process holds the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, elsewhere_s: float = ELSEWHERE_SECONDS) -> None:
    """Delete temporary files of killed processes in a folder, or restore what they replaced.

    Files of other users, files locked by a living process and files with other names stay. Locks of
    other machines may be invisible here, so their files stay until ``elsewhere_s`` seconds old.
    """
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is not None:
            with suppress(OSError), locked(path) as status:
                is_dead = name[2] == HOST or time.time() - status.st_mtime >= elsewhere_s
                if is_dead and status.st_uid == os.getuid():
                    _clear(path)


def is_leftover(path: Path) -> bool:
    """Return whether a path has the name of a temporary file or folder of unet3d."""
    return _NAME.fullmatch(path.name) is not None


@contextmanager
def _temporary(final: Path, make: Callable[[Path], object], prefix: str = PREFIX) -> Iterator[Path]:
    """Make a locked temporary file or folder beside another, and delete it at the end."""
    folder = final.absolute().parent
    if folder not in _swept:
        _swept.add(folder)
        with suppress(OSError):
            remove_leftovers(folder)
    with ExitStack() as stack:
        with postponed_interruption():
            is_ours = False
            while not is_ours:  # until it is locked, another process may delete it as a leftover
                path = folder / f"{prefix}{HOST}{uuid.uuid4().hex[:24]}-{final.name[-MAX_ENDING:]}"
                make(path)
                try:
                    stack.enter_context(locked(path))
                    is_ours = path.exists()
                except OSError as error:  # a file system without locks, where nothing is deleted
                    is_ours = not isinstance(error, BlockingIOError | FileNotFoundError)
            clear = partial(_clear, path)
            stack.enter_context(at_sudden_end(clear))
            stack.callback(clear)
        yield path


def _clear(path: Path) -> None:
    """Delete a temporary file or folder, unless it was published; put back what it replaced."""
    with postponed_interruption():
        if path.name.startswith(REPLACED) and path.is_dir():
            for old in path.iterdir():
                if not os.path.lexists(path.parent / old.name):
                    os.rename(old, path.parent / old.name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _claim(unfinished: Path, path: Path) -> None:
    """Give a file its final name, or raise FileExistsError."""
    try:
        os.link(unfinished, path)
    except OSError:
        # The name is taken, or the file system, such as FAT, has no hard links. Then an empty file
        # claims the name first; only a kill between the next two lines would leave it empty.
        path.open("xb").close()
        os.replace(unfinished, path)


def _keep_permissions(unfinished: Path, path: Path) -> None:
    """Give a file the mode and, where the system allows it, the owner of the file it replaces."""
    with suppress(FileNotFoundError, PermissionError):
        old, new = path.lstat(), unfinished.lstat()
        if not stat.S_ISREG(old.st_mode):  # a link's own mode says nothing
            return
        os.chmod(unfinished, old.st_mode & 0o777)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            os.chown(unfinished, old.st_uid, old.st_gid)


def _flush_all(folder: Path) -> None:
    for inside, _, names in os.walk(folder):
        for name in names:
            flush(Path(inside, name))
        flush(Path(inside))


def flush(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
