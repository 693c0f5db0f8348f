"""The progress of a prediction: a live line on a terminal, nothing anywhere else."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Speed(ProgressColumn):
    """Windows a second, once there are some."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.3g}/s" if speed else "")


class ScanProgress:
    """Shows which scan is being segmented, what is done with it, and the windows that are done."""

    def __init__(self, console: Console, num_scans: int) -> None:
        """Set up the display.

        Args:
            console: Only a terminal gets the live line, which leaves nothing behind.
            num_scans: How many are to be segmented.
        """
        self._num_scans = num_scans
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[windows]}", markup=False),
            _Speed(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            # A result goes to stdout, which may be a file, and comes between two live lines.
            redirect_stdout=False,
            disable=not console.is_terminal,
        )

    @contextmanager
    def shown(self, number: int, name: str) -> Iterator[None]:
        """Show the line of one scan while in the context.

        Args:
            number: Of the scan, from 1.
            name: The scan's.
        """
        self._scan = f"{name} ({number}/{self._num_scans})" if self._num_scans > 1 else name
        self._task = self._progress.add_task(self._scan, total=None, windows="")
        try:
            with self._progress:
                yield
        finally:
            self._progress.remove_task(self._task)

    def stage(self, name: str) -> None:
        """Show what is done with the scan.

        Args:
            name: Such as ``reading``.
        """
        self._progress.update(self._task, description=f"{self._scan}: {name}")

    def windows_done(self, done: int, total: int) -> None:
        """Show how many windows are done.

        Args:
            done: Windows done; 0 begins anew, such as with smaller windows.
            total: Windows of the scan.
        """
        if done == 0:
            self._progress.reset(self._task, total=total)
            self.stage("predicting")
        elif done == total:
            self.stage("finishing")
        # One of several networks may have windows of another size.
        self._progress.update(
            self._task, completed=done, total=total, windows=f"window {done}/{total}"
        )
