"""The terminal of the command line: its log, and a bar that leaves nothing behind."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

logger = logging.getLogger(__name__)

LOG_SECONDS = 20.0
"""How often work on many cases that goes on says how far it is."""


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Logs to a stream; on a terminal above a live line of rich, which replaces ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        if self.stream.isatty():
            self.stream = sys.stderr
        super().emit(record)


@contextmanager
def counting(doing: str, num_cases: int) -> Iterator[Callable[[int], object]]:
    """Show how many cases are done: in a bar on our terminal, else in a line now and then.

    Yields what takes how many are done.
    """
    if num_cases < 2 or not logger.isEnabledFor(logging.INFO):
        yield lambda num_done: None
        return
    from rich.console import Console
    from rich.file_proxy import FileProxy
    from rich.progress import Progress

    console = Console(stderr=True)
    # Another program that uses this package has a terminal, and a log, of its own.
    is_ours = any(isinstance(one, TerminalHandler) for one in logging.getLogger().handlers)
    has_live_line = isinstance(sys.stderr, FileProxy)
    if not is_ours or has_live_line or not console.is_terminal:
        yield _in_log(doing, num_cases)
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{doing} {num_cases} cases", total=num_cases)
        yield lambda num_done: progress.update(task, completed=num_done)


def _in_log(doing: str, num_cases: int) -> Callable[[int], None]:
    next_line = time.monotonic() + LOG_SECONDS

    def watch(num_done: int) -> None:
        nonlocal next_line
        if num_done < num_cases and time.monotonic() >= next_line:
            next_line = time.monotonic() + LOG_SECONDS
            logger.info("%s %d cases: %d done", doing, num_cases, num_done)

    return watch
