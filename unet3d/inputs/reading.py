"""Reading untrusted files: only regular files, up to a limit of bytes.

A FIFO could block forever, a device has no end, and small JSON files can take much memory.
"""

import errno
import io
import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 32 * 2**20
"""More than any data set's list of files; parsed, such JSON takes up to 1 GB."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; OSError if it is a FIFO, a device or a folder."""
    try:
        # O_NONBLOCK: opening a FIFO does not wait for a writer.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError as error:  # a NUL, or text that no file system can hold
        raise OSError(errno.EINVAL, "no file can have such a name", str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file; OSError if it has more than ``max_bytes``."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        reason = f"it is larger than the {max_bytes:,} bytes that such a file may have"
        raise OSError(errno.EFBIG, reason, str(path))
    return content


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the plain values of a JSON file; infinity, NaN and names given twice are refused.

    Raises OSError like :func:`read_bytes`, and a one-line ValueError if the content is refused.
    """
    return plain_json(read_bytes(path, max_bytes))


def plain_json(content: bytes) -> Any:
    """Return the plain values of JSON, as :func:`read_json` does."""
    try:
        text = content.decode("utf-8-sig")
        return json.loads(
            text,
            parse_constant=_refuse,
            parse_float=_finite,
            object_pairs_hook=_without_duplicates,
        )
    except UnicodeDecodeError as error:
        raise ValueError("it is not text in UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:60]} is too large for a floating-point number")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {name[:60]!a} twice")
    return content
