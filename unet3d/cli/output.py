"""Output of commands: logs, one-line errors, results on the terminal, JSON files."""

import gc
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.atomic import replacing
from unet3d.cli.command import is_debugging
from unet3d.errors import ConfigError, ResultExistsError, Unet3dError, reason_of
from unet3d.terminal import TerminalHandler

if TYPE_CHECKING:
    from unet3d.distributed.ranks import Ranks
    from unet3d.reports.tables import Table

SPLITS = "splits_final.json"
"""nnU-Net's file of folds, in the folder of a data set."""


class OneLineFormatter(logging.Formatter):
    """Makes each message one line without control characters, which file names may contain.

    With ``--debug`` it adds the level and the logger's name; tracebacks keep their lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line of a message."""
        from unet3d.inputs.plain_data import printable

        line = super().formatMessage(record)
        if is_debugging():
            line = f"{record.levelname} {record.name}: {line}"
        return printable(line, max_length=len(line))


def log_to_terminal() -> None:
    """Log to stderr, above a live line if there is one."""
    handler = TerminalHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("unet3d").setLevel(logging.INFO)


def begin_as_rank(quiet: bool = False) -> "Ranks":
    """Return the rank of this process, before PyTorch loads, and set its log level.

    The first rank logs all, or warnings if ``quiet``; the first of any other machine logs warnings;
    the rest log errors.
    """
    from unet3d.distributed.ranks import Ranks, silence_torch

    ranks, ours = Ranks.from_environment(), logging.getLogger("unet3d")
    if ranks.world_size > 1 and not is_debugging():
        silence_torch()
    if quiet or not ranks.is_first:
        ours.setLevel(logging.WARNING)
    if ranks.local_rank > 0:  # the first rank of this machine logs the same warnings
        ours.setLevel(logging.ERROR)
    return ranks


def show_error(error: Unet3dError, what: str = "Error") -> None:
    """Show an explained error as one line on stderr; ``what`` begins the line."""
    from unet3d.inputs.plain_data import printable

    line = f"{what}: {' '.join(str(error).split())}"
    click.echo(printable(line, max_length=len(line)), err=True)


def show_result(content: "str | Table") -> None:
    """Print a table, or a line that is never wrapped to the width of the terminal."""
    from rich.console import Console

    if isinstance(content, str):
        Console().print(content, highlight=False, markup=False, soft_wrap=True)
    else:
        Console().print(content.for_terminal())


def files_of(dataset: Path | None) -> tuple[Path, ...]:
    """Return the files that describe a data set."""
    return () if dataset is None else (dataset, dataset / "dataset.json", dataset / SPLITS)


def refuse_input(path: Path, *inputs: Path | None) -> None:
    """Refuse to write results over their inputs, or over a volume."""
    from unet3d.images.files import is_volume_file

    read = [os.path.realpath(one) for one in inputs if one is not None]
    if is_volume_file(path) or os.path.realpath(path) in read:
        raise ConfigError(
            f"{path} cannot hold the results: it is a volume or belongs to the input; name another"
        )


def check_result(path: Path | None, *inputs: Path | None, overwrite: bool) -> None:
    """Refuse a result file that is an input, exists or cannot be written, before the work begins.

    A path of None is an option that was not given.
    """
    if path is None:
        return
    refuse_input(path, *inputs)
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        with tempfile.TemporaryFile(dir=path.parent), suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):  # such as the link /dev/stdout
                raise OSError(EINVAL, "it is not a regular file", str(path))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}; name another") from error
    if not overwrite and os.path.lexists(path):
        raise ResultExistsError(f"{path} exists; add --overwrite to replace it")


@contextmanager
def writing_result(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary name for a result file, which appears once it is complete."""
    try:
        with replacing(path, may_exist=overwrite) as unfinished:
            yield unfinished
    except FileExistsError as error:
        raise ResultExistsError.meanwhile(path) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}; name another") from error


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show the current work on a terminal; yield a function that changes the text."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(text)) as status:
        yield lambda now: status.update(Text(now))


def write_json(path: Path | None, content: dict[str, Any], overwrite: bool) -> None:
    """Write the file of ``--json``, unless the path is None; its folder must exist."""
    if path is not None:
        text = json.dumps(content, indent=2) + os.linesep
        with writing_result(path, overwrite) as unfinished:
            unfinished.write_bytes(text.encode())


def load_torch() -> None:
    """Import PyTorch, and exclude its objects from garbage collection.

    That saves half a second of garbage collection, during the import and when the process ends.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
