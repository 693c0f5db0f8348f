"""Small JSON records in the cache; each file is named by a key of its inputs."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from unet3d.atomic import make_folder, write_atomically
from unet3d.errors import CacheError, reason_of
from unet3d.inputs.plain_data import key_of
from unet3d.inputs.reading import read_json

logger = logging.getLogger(__name__)

Content = TypeVar("Content")


def recall(path: Path, read: Callable[[Any], Content]) -> Content | None:
    """Return the result of ``read`` for a record, or None if it is missing or damaged."""
    try:
        return read(read_record(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, AttributeError):
        logger.warning("%s is damaged and not used; a new one replaces it", path)
        return None


def remember(path: Path, content: Mapping[str, object]) -> None:
    """Write a record into the cache folder; CacheError if that fails."""
    with writing_cache(path.parent):
        make_folder(path.parent)
        write_record(path, content)


def read_record(path: Path) -> dict[str, Any]:
    """Return what :func:`write_record` wrote; anything else is a ValueError or an OSError."""
    content = read_json(path)
    if not isinstance(content, dict) or content.pop("checksum", None) != key_of(content):
        raise ValueError(f"{path.name} has another checksum")
    return content


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Replace a file with plain values and their checksum."""
    plain = json.loads(json.dumps(content))  # the checksum is of the values as read back
    text = json.dumps({**plain, "checksum": key_of(plain)}, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Turn an OSError while writing to the cache folder into a CacheError that explains it."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write the cache folder {folder}: {reason_of(error)}; set data.cache to a "
            "folder with space that you can write to"
        ) from error
