"""Live lines on a terminal, which leave nothing behind: a bar, and logging above it."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

_is_left_alone: ContextVar[bool] = ContextVar("is_left_alone", default=False)


@contextmanager
def no_bars() -> Iterator[None]:
    """Show no bar in the context: the terminal is that of a program which uses this package."""
    token = _is_left_alone.set(True)
    try:
        yield
    finally:
        _is_left_alone.reset(token)


@contextmanager
def live(display: AbstractContextManager[Any]) -> Iterator[None]:
    """Show a live line of rich while in the context, with the log above it.

    The line replaces ``sys.stderr``: a log that went on to the old stream would stand in the line.
    """
    stream = sys.stderr
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
        and handler.stream is stream
        and stream.isatty()
    ]
    with display:
        for handler in handlers:
            handler.setStream(sys.stderr)
        try:
            yield
        finally:
            for handler in handlers:
                handler.setStream(stream)


@contextmanager
def bar(text: str, total: int) -> Iterator[Callable[[int], object] | None]:
    """Show a bar on a terminal while in the context; gives what takes how many steps are done.

    It gives None where stderr is no terminal, has another live line, or is left alone
    (:func:`no_bars`).
    """
    if _is_left_alone.get():
        yield None
        return
    from rich.console import Console
    from rich.file_proxy import FileProxy
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal or isinstance(sys.stderr, FileProxy):
        yield None
        return
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )
    task = progress.add_task(text, total=total)
    with live(progress):
        yield lambda done: progress.update(task, completed=done)
