"""Files and folders that are the old ones or the new ones at every moment, never half of either.

Everything is written beside its final name, flushed to the disk, and only then renamed. The folder
is flushed last, because a rename is lost in a power cut until then::

    write_atomically    a file, written through an open binary file
    replacing           a file, written by whatever takes a path
    creating            the same, unless a file has the name by then
    new_folder          a folder with all that is in it
    replacing_folder    the same, in place of another
    append              a line behind others
"""

import errno
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PREFIX = ".unfinished-"
"""How the names of temporary files and folders begin."""

_LEFTOVER = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}-.*", re.DOTALL)

MAX_ENDING = 16
"""Letters of the final name that a temporary name ends in: enough for every file ending."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file with what a function writes.

    Args:
        path: Where to; its folder exists.
        write: Receives the open binary file.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path) as unfinished, unfinished.open("xb") as file:
        write(file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file with the one that is written in the meantime.

    Args:
        path: Where to; its folder exists.

    Yields:
        The name to write to, in the same folder and with the same ending.

    Raises:
        OSError: The file cannot be written, or a device or a pipe has its name. Only if the folder
            cannot be flushed, which comes last, is the new file in its place.
    """
    with _publishing(path, lambda unfinished: _replace(unfinished, path)) as unfinished:
        yield unfinished


@contextmanager
def creating(path: Path) -> Iterator[Path]:
    """Make a file from the one that is written in the meantime, and never replace another.

    Whether the name is free is not asked before, but decided by the file system in the end: of
    several writers at once, the first wins.

    Args:
        path: Where to; its folder exists.

    Yields:
        The name to write to, in the same folder and with the same ending.

    Raises:
        FileExistsError: Something has the name by now, be it a link that leads nowhere.
        OSError: The file cannot be written. Only if the folder cannot be flushed, which comes
            last, is the new file in its place.
    """
    with _publishing(path, lambda unfinished: _link(unfinished, path)) as unfinished:
        yield unfinished


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder that appears with everything that is written into it, or not at all.

    Args:
        path: Where to; the folders above it are made where they are missing.

    Yields:
        The empty folder to fill, beside ``path``.

    Raises:
        OSError: The folder cannot be written, or one that is not empty has its name.
    """
    with unfinished_folder(path) as unfinished:
        yield unfinished
        publish_folder(unfinished, path)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Replace a folder and all that is in it with one that is filled in the meantime.

    A folder cannot be renamed onto another. So the old one is renamed before the new one, and a
    kill between the two leaves it beside, under a temporary name; nothing of it is deleted before
    the new one is in its place.

    Args:
        path: The folder, and no link to one.

    Yields:
        The empty folder to fill, beside ``path``.

    Raises:
        OSError: The folder cannot be written, or the old one not be moved.
    """
    with unfinished_folder(path) as unfinished:
        yield unfinished
        _flush_all(unfinished)
        old = _unfinished(path)
        os.rename(path, old)
        try:
            os.rename(unfinished, path)
        except OSError:
            os.rename(old, path)
            raise
        _flush(path.absolute().parent)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Make a hidden folder for what is to be published, and delete it in the end.

    Args:
        path: Beside which the folder is made; folders above it are made where they are missing.

    Yields:
        The empty folder.

    Raises:
        OSError: The folder cannot be made.
    """
    unfinished = _unfinished(path)
    make_folder(unfinished.parent)
    try:
        unfinished.mkdir()
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # it is gone if it was published


def publish_folder(folder: Path, path: Path) -> None:
    """Flush a folder with everything in it, then give it its name.

    Args:
        folder: On the same file system as ``path``.
        path: Its new name.

    Raises:
        OSError: A file cannot be flushed, or a folder that is not empty has the name.
    """
    _flush_all(folder)
    os.rename(folder, path)
    _flush(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are missing.

    Args:
        path: The folder.

    Raises:
        OSError: It cannot be made, or a file has its name.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        _flush(folder.parent)


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file. A writer that is killed may leave a part of the content.

    Args:
        path: The file, which is made where it is missing.
        content: What to add.

    Raises:
        OSError: The file cannot be written.
    """
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(content)
    _flush(path)
    if is_new:
        _flush(path.parent)


def remove_leftovers(folder: Path, older_than_s: float = 0.0) -> None:
    """Delete the temporary files and folders of writers that were killed.

    Args:
        folder: Where they wrote; what others put there stays, whatever its name begins with.
        older_than_s: Age in seconds below which one may belong to a writer at work. With 0 nobody
            else may write to the folder now.

    Raises:
        OSError: One of them cannot be deleted.
    """
    for leftover in filter(is_leftover, folder.iterdir()):
        try:
            status = leftover.lstat()
            if older_than_s and time.time() - status.st_mtime < older_than_s:
                continue
            shutil.rmtree(leftover) if stat.S_ISDIR(status.st_mode) else leftover.unlink()
        except FileNotFoundError:  # another process cleans too
            continue


def is_leftover(path: Path) -> bool:
    """Return whether a name is that of a temporary file or folder of ours.

    Args:
        path: What a folder lists.
    """
    return _LEFTOVER.fullmatch(path.name) is not None


@contextmanager
def _publishing(path: Path, publish: Callable[[Path], object]) -> Iterator[Path]:
    unfinished = _unfinished(path)
    try:
        yield unfinished
        _flush(unfinished)
        publish(unfinished)
    finally:
        unfinished.unlink(missing_ok=True)  # an interruption may come after the rename
    _flush(path.parent)


def _replace(unfinished: Path, path: Path) -> None:
    """Give a file its final name, unless a device or a pipe has it, which root could replace."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    os.replace(unfinished, path)


def _link(unfinished: Path, path: Path) -> None:
    """Give a file its final name beside its temporary one, or raise FileExistsError."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        # Over NFS, the answer to a link that was made may be lost, and the link asked for again.
        if not os.path.lexists(path) or not os.path.samestat(os.lstat(unfinished), os.lstat(path)):
            raise
    except OSError:
        # FAT, and some file systems of other machines, have no links. An empty file takes the name
        # first: only a kill between these two lines leaves it there.
        path.open("xb").close()
        try:
            os.replace(unfinished, path)
        except OSError:
            path.unlink()
            raise


def _unfinished(path: Path) -> Path:
    return path.absolute().parent / f"{PREFIX}{uuid.uuid4().hex}-{path.name[-MAX_ENDING:]}"


def _flush_all(folder: Path) -> None:
    for inside, _, names in os.walk(folder):
        for name in names:
            _flush(Path(inside, name))
        _flush(Path(inside))


def _flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no flush of a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
