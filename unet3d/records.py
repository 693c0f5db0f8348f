"""Small JSON records, each in a file named by a key of all that its content depends on."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from unet3d.atomic import write_atomically
from unet3d.errors import DatasetError

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

FORMAT = 1
"""Part of every key: raise it whenever preparation gives other arrays for the same settings."""


def recall(path: Path, read: Callable[[Any], Content]) -> Content | None:
    """Return what was measured earlier, or None where nothing was or its file is damaged.

    Args:
        path: Where :func:`remember` put it.
        read: From the file's JSON to its meaning; ValueError, TypeError or KeyError where it has
            none.
    """
    try:
        return read(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        logger.warning("%s is damaged and not used; it is replaced when it is measured again", path)
        return None


def remember(path: Path, content: Mapping[str, object]) -> None:
    """Write what was measured.

    Args:
        path: In the cache folder.
        content: The measurement, and for people what it depends on.

    Raises:
        DatasetError: The cache folder cannot be written to.
    """
    text = json.dumps(content, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise DatasetError(
            f"cannot write {path}: {error.strerror}; set data.cache to a folder with space that "
            "you can write to"
        ) from error


def key_of(parts: Any) -> str:
    """Return the key of plain values: hashes of files, settings."""
    return hashlib.sha256(json.dumps([FORMAT, parts], sort_keys=True).encode()).hexdigest()
