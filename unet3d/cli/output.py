"""What commands write beside their results: errors in one line, JSON files."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from unet3d.atomic import write_atomically
from unet3d.errors import ConfigError, Unet3dError

MAX_NAMES = 10
"""Names that one line lists."""


def show_error(error: Unet3dError, what: str = "Error") -> None:
    """Show an explained error as one line on stderr.

    Args:
        error: The error; its message may have several lines.
        what: Word that begins the line.
    """
    from unet3d.plain_data import printable

    line = f"{what}: {' '.join(str(error).split())}"
    click.echo(printable(line, max_length=len(line)), err=True)


def some(names: Sequence[object]) -> str:
    """Return the first names, and how many more there are.

    Args:
        names: At least one.
    """
    more = len(names) - MAX_NAMES
    listed = ", ".join(map(str, names[:MAX_NAMES]))
    return f"{listed} and {more} more" if more > 0 else listed


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the file that ``--json`` asks for.

    Args:
        path: The file; its folder exists.
        content: Plain values.

    Raises:
        ConfigError: It cannot be written there.
    """
    text = json.dumps(content, indent=2) + os.linesep
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
