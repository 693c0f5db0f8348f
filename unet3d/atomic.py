"""Files that are the old ones or the new ones at every moment, never half of either."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

PREFIX = ".unfinished-"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file through a temporary one beside it, flushed to the disk before the rename.

    Args:
        path: Where to; its folder exists.
        write: Receives the open binary file.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=PREFIX, suffix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp lets nobody else read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # an interruption may come after the rename
        raise


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of writers that were killed.

    Args:
        folder: That nobody else writes to now.
    """
    for leftover in folder.glob(f"{PREFIX}*"):
        leftover.unlink(missing_ok=True)
