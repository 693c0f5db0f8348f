"""What ``unet3d predict`` shows while it works: a line for each scan, and a live one."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console

from unet3d.cli.output import show_error
from unet3d.errors import Unet3dError
from unet3d.inference.segmentation import Progress
from unet3d.reports.progress import ScanProgress


class TerminalProgress(Progress):
    """Shows results on stdout, and the rest on stderr."""

    def __init__(self, *, is_live: bool) -> None:
        """Say whether a terminal gets a live line, which those of other ranks would mix with."""
        self._console = Console(stderr=True, force_terminal=None if is_live else False)
        self._live = ScanProgress(self._console, 0)

    def said(self, line: str) -> None:
        """Show what became of a scan."""
        click.echo(line)

    def failed(self, error: Unet3dError) -> None:
        """Show why a scan is left out."""
        show_error(error, "Skipped")

    def left(self, line: str) -> None:
        """Show which scans remain."""
        click.echo(line, err=True)

    @contextmanager
    def scan(self, number: int, num_scans: int, name: str) -> Iterator[None]:
        """Show the live line of a scan."""
        self._live = ScanProgress(self._console, num_scans)
        with self._live.shown(number, name):
            yield

    def stage(self, name: str) -> None:
        """Show what is done with it."""
        self._live.stage(name)

    def windows_done(self, done: int, total: int) -> None:
        """Show how many windows are done."""
        self._live.windows_done(done, total)
