"""What ``unet3d predict`` shows: a line for each finished scan, and a live line meanwhile."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console

from unet3d.cli.output import show_error
from unet3d.errors import Unet3dError
from unet3d.inference.job import Progress
from unet3d.reports.tables import duration
from unet3d.terminal import live_line

REFRESH_SECONDS = 0.5


class TerminalProgress(Progress):
    """Shows results on stdout, and the rest on stderr."""

    def __init__(self, *, is_live: bool) -> None:
        """Show a live line on a terminal if ``is_live``; live lines of several ranks would mix."""
        self._console = Console(stderr=True, force_terminal=None if is_live else False)

    def said(self, line: str) -> None:
        """Show a line about a finished scan."""
        click.echo(line)

    def warned(self, what: str, line: str) -> None:
        """Show why scans are not segmented."""
        show_error(Unet3dError(line), what)

    @contextmanager
    def scan(self, number: int, num_scans: int, name: str) -> Iterator[None]:
        """Show the live line of a scan."""
        self._scan = f"{name} ({number}/{num_scans})" if num_scans > 1 else name
        self._began = self._next_refresh = time.monotonic()
        # A result goes to stdout, which may be a file, and comes between two live lines.
        with live_line(self._console, takes_stdout=False) as self._show:
            yield

    def stage(self, name: str) -> None:
        """Show the current stage of work on the scan."""
        self._show(f"{self._scan}: {name}")

    def done(self, done: int, total: int, unit: str = "window") -> None:
        """Show how many windows are done; 0 if the scan starts over, as in smaller batches."""
        now = time.monotonic()
        if done == 0:
            self._began = now
        elif now < self._next_refresh and done < total:
            return
        self._next_refresh = now + REFRESH_SECONDS
        name = "finishing" if done == total else "predicting"
        status, seconds = f"{unit} {done}/{total}", now - self._began
        if done and seconds:
            left = duration((total / done - 1) * seconds)
            status += f"  {done / seconds:.3g}/s  {left} left"
        self._show(f"{self._scan}: {name}", done, total, status)
