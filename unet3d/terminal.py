"""The terminal of the command line: its log, and a live line with a bar."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

LOG_SECONDS = 20.0
"""Seconds between log lines about the progress of work on many cases."""


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Logs to a stream; on a terminal above rich's live line, which replaces ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        if self.stream.isatty():
            self.stream = sys.stderr
        super().emit(record)


class Show(Protocol):
    """Shows the current work: the amount done, the total, and a note."""

    def __call__(
        self, text: str, done: float | None = None, total: float | None = None, status: str = ""
    ) -> None:
        """Change the line; without a total the bar has no end."""


@contextmanager
def live_line(
    console: "Console", *, is_shown: bool = True, stays: bool = False, takes_stdout: bool = True
) -> Iterator[Show]:
    """Show a line with a bar while in the context, if the console is a terminal.

    The line is erased at the end unless it ``stays``. Output printed to the same terminal meanwhile
    appears above it, including stdout if ``takes_stdout``.
    """
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    with Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
        TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        expand=True,
        transient=not stays,
        redirect_stdout=takes_stdout,
        disable=not is_shown or not console.is_terminal,
    ) as progress:
        task = progress.add_task("starting", total=None, status="")

        def show(
            text: str, done: float | None = None, total: float | None = None, status: str = ""
        ) -> None:
            progress.update(
                task, description=text, completed=done, total=total, status=status, refresh=True
            )

        yield show


@contextmanager
def counting(doing: str, num_cases: int) -> Iterator[Callable[[int], object]]:
    """Show how many cases are done: as a bar on our terminal, else as occasional log lines.

    Yields a function that takes the number of finished cases.
    """
    if num_cases < 2 or not logger.isEnabledFor(logging.INFO):
        yield lambda num_done: None
        return
    from rich.console import Console
    from rich.file_proxy import FileProxy

    console = Console(stderr=True)
    # Another program that uses this package has its own terminal and log.
    is_ours = any(isinstance(one, TerminalHandler) for one in logging.getLogger().handlers)
    has_live_line = isinstance(sys.stderr, FileProxy)
    if not is_ours or has_live_line or not console.is_terminal:
        yield _in_log(doing, num_cases)
        return
    with live_line(console) as show:
        text = f"{doing} {num_cases} cases"
        yield lambda num_done: show(text, num_done, num_cases, f"{num_done}/{num_cases}")


def _in_log(doing: str, num_cases: int) -> Callable[[int], None]:
    next_line = time.monotonic() + LOG_SECONDS

    def watch(num_done: int) -> None:
        nonlocal next_line
        if num_done < num_cases and time.monotonic() >= next_line:
            next_line = time.monotonic() + LOG_SECONDS
            logger.info("%s %d cases: %d done", doing, num_cases, num_done)

    return watch
