"""What commands write beside their results: errors in one line, JSON files."""

import gc
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.atomic import replacing
from unet3d.errors import ConfigError, ResultExistsError, Unet3dError, reason_of

if TYPE_CHECKING:
    from unet3d.distributed.ranks import Ranks


def begin_as_rank(quiet: bool = False) -> "Ranks":
    """Return the place of this process, of which the first rank alone logs; before PyTorch loads.

    Args:
        quiet: Whether it only warns, too.

    Raises:
        ConfigError: The variables of torchrun contradict one another.
    """
    from unet3d.distributed.ranks import Ranks, silence_torch

    ranks, ours = Ranks.from_environment(), logging.getLogger("unet3d")
    if ranks.world_size > 1 and not ours.isEnabledFor(logging.DEBUG):
        silence_torch()
    if quiet or not ranks.is_first:
        ours.setLevel(logging.WARNING)
    if ranks.local_rank > 0:  # what is wrong here, the first rank of this machine says
        ours.setLevel(logging.ERROR)
    return ranks


def show_error(error: Unet3dError, what: str = "Error") -> None:
    """Show an explained error as one line on stderr.

    Args:
        error: The error; its message may have several lines.
        what: Word that begins the line.
    """
    from unet3d.inputs.plain_data import printable

    line = f"{what}: {' '.join(str(error).split())}"
    click.echo(printable(line, max_length=len(line)), err=True)


def show_line(content: Any) -> None:
    """Print a line, which stays whole however wide the terminal is, or a table.

    Args:
        content: Text without markup, or what rich prints.
    """
    from rich.console import Console

    is_text = isinstance(content, str)
    Console().print(content, highlight=False, markup=False, soft_wrap=is_text)


def files_of(dataset: Path) -> tuple[Path, ...]:
    """Return the files that describe a data set.

    Args:
        dataset: Its folder, or its dataset.json.
    """
    return dataset, dataset / "dataset.json", dataset / "splits_final.json"


def refuse_input(path: Path | None, *inputs: Path) -> None:
    """Refuse to write results over what they are made from.

    Args:
        path: Where results go; None: nowhere.
        inputs: What the command reads, besides volumes.

    Raises:
        ConfigError: The file is one of those, or named like a volume.
    """
    if path is None:
        return
    from unet3d.images.files import is_volume_file

    if is_volume_file(path) or os.path.realpath(path) in map(os.path.realpath, inputs):
        raise ConfigError(f"{path} is no place for the results; name another file")


def check_writable(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before the work whose results they are to hold.

    Args:
        paths: Files of options; None: the option was not given.

    Raises:
        ConfigError: One of them cannot be written there.
    """
    for path in paths:
        if path is None:
            continue
        try:
            if path.is_dir():
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
            with tempfile.TemporaryFile(dir=path.parent), suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode):  # such as /dev/stdout, a link
                    raise OSError(EINVAL, "it is not a regular file", str(path))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {reason_of(error)}") from error


def check_results(*paths: Path | None, overwrite: bool) -> None:
    """Refuse files of options that exist, unless they may be replaced, or cannot be written.

    None stands for an option that was not given. Call it before the work.
    """
    check_writable(*paths)
    for path in paths:
        if path is not None and not overwrite and os.path.lexists(path):
            raise ResultExistsError(f"{path} exists; add --overwrite to replace it")


@contextmanager
def writing_result(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield the name to write a file of an option to; it appears once it is whole."""
    try:
        with replacing(path, may_exist=overwrite) as unfinished:
            yield unfinished
    except FileExistsError as error:
        raise ResultExistsError.meanwhile(path) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}") from error


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done, as long as it takes; nothing is left of it.

    Args:
        text: What is begun with.

    Yields:
        Takes what is done from then on.
    """
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(text)) as status:
        yield lambda now: status.update(Text(now))


def write_json(path: Path | None, content: dict[str, Any], overwrite: bool) -> None:
    """Write the file that ``--json`` asks for, if it was given; its folder exists."""
    if path is not None:
        text = json.dumps(content, indent=2) + os.linesep
        with writing_result(path, overwrite) as unfinished:
            unfinished.write_bytes(text.encode())


@contextmanager
def imports_at_once() -> Iterator[None]:
    """Import heavy modules in the context, without a search for garbage among what they make.

    PyTorch makes so much that stays that the search takes a tenth of a command's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
