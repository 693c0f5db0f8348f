"""The progress of a training: a live line on a terminal, plain lines in a log."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
"""Reading a loss waits for the device, so it is not done at every step."""


class ProgressLine:
    """Shows epoch, step, loss, Dice and the time left."""

    def __init__(self, console: Console, num_epochs: int, num_steps: int, quiet: bool) -> None:
        """Set up the display.

        Args:
            console: A terminal gets a live line; anything else a line per epoch.
            num_epochs: Epochs of the whole training.
            num_steps: Steps of one epoch.
            quiet: Show nothing.
        """
        self._num_epochs = num_epochs
        self._num_steps = num_steps
        self._quiet = quiet
        self._dice = "–"
        self._first_step: int | None = None
        self._began = 0.0
        self._next_refresh = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=quiet or not console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line while in the context."""
        with self._progress:
            self._task = self._progress.add_task(
                "starting", total=self._num_epochs * self._num_steps, status=""
            )
            yield

    def wants_loss(self) -> bool:
        """Return whether it is time to show a new loss."""
        return not self._progress.disable and time.monotonic() >= self._next_refresh

    def step_done(self, epoch: int, step: int, loss: float) -> None:
        """Show one step.

        Args:
            epoch: Number of the epoch, from 0.
            step: Steps done in it.
            loss: Loss of the step.
        """
        now = time.monotonic()
        self._next_refresh = now + REFRESH_SECONDS
        done = epoch * self._num_steps + step
        if self._first_step is None:
            self._first_step, self._began = done, now
        left = ""
        if done > self._first_step:
            rate = (now - self._began) / (done - self._first_step)
            left = f"{duration(rate * (self._num_epochs * self._num_steps - done))} left"
        self._progress.update(
            self._task,
            completed=done,
            description=f"epoch {epoch + 1}/{self._num_epochs} step {step}/{self._num_steps}",
            status=f"loss {loss:.3f}  Dice {self._dice}  {left}",
            refresh=True,
        )

    def epoch_done(self, metrics: dict[str, Any], seconds_left: float) -> None:
        """Show one epoch.

        Args:
            metrics: Its line of ``metrics.jsonl``.
            seconds_left: Until the end of training.
        """
        scores = ""
        if "mean_dice" in metrics:
            self._dice = _score(metrics["mean_dice"])
            of_labels = ", ".join(f"{k} {_score(v)}" for k, v in metrics["dice"].items())
            scores = f", Dice {self._dice} ({of_labels})"
        if self._quiet:
            return
        text = (
            f"epoch {metrics['epoch']}/{self._num_epochs}: loss {metrics['loss']:.4f}{scores}, "
            f"{metrics['seconds']:.1f} s, {duration(seconds_left)} left"
        )
        if self._progress.disable:
            logger.info("%s", text)
        elif scores:
            self._progress.console.print(text, highlight=False, markup=False)


def duration(seconds: float) -> str:
    """Return seconds as people write them, such as ``2 h 05 min`` or ``41 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _score(dice: float | None) -> str:
    return "–" if dice is None else f"{dice:.3f}"
