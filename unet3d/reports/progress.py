"""The progress of a training: a live line on a terminal, plain lines in a log."""

import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
"""Reading a loss waits for the device, so it is not done at every step."""

LOG_SECONDS = 60.0
"""A log gets a line about a validation that goes on for so long, and then one in each such time."""

MAX_COLUMNS = 80
"""Width that every line fits."""

MAX_NAME_COLUMNS = 30
"""Width of a label's name where not all names fit."""

INDENT = "    "
"""Begins each further line about the same epoch."""


class ProgressLine:
    """Shows epoch, step, loss, Dice and the time left, validations included."""

    def __init__(
        self,
        console: Console,
        *,
        num_epochs: int,
        num_steps: int,
        validate_every: int,
        validation_seconds: float,
        quiet: bool,
    ) -> None:
        """Set up the display.

        Args:
            console: A terminal gets a live line; anything else a line per epoch.
            num_epochs: Epochs of the whole training.
            num_steps: Steps of one epoch.
            validate_every: Epochs between validations; the last epoch is validated too. 0: there
                are none.
            validation_seconds: What a validation took; 0: none was measured yet.
            quiet: Show nothing.
        """
        self._num_epochs = num_epochs
        self._num_steps = num_steps
        self._validate_every = validate_every
        self._quiet = quiet
        self._dice = "–"
        self._done = 0
        self._first_step: int | None = None
        self._began = 0.0
        self._step_seconds = 0.0
        self._last_validation = self._validation_seconds = validation_seconds
        self._validation_began: float | None = None
        self._next_refresh = 0.0
        self._next_line = 0.0
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            disable=quiet or not console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line while in the context."""
        with self._progress:
            self._task = self._progress.add_task("starting", total=None, status="")
            yield

    def wants_loss(self) -> bool:
        """Return whether it is time to show a new loss."""
        return not self._progress.disable and time.monotonic() >= self._next_refresh

    def step_done(self, epoch: int, step: int, loss: float) -> None:
        """Show one step.

        Args:
            epoch: Number of the epoch, from 0.
            step: Steps done in it.
            loss: Loss of the step, or of the one before it.
        """
        now = time.monotonic()
        self._next_refresh = now + REFRESH_SECONDS
        self._done = epoch * self._num_steps + step
        if self._first_step is None:
            self._first_step, self._began = self._done, now
        if self._done > self._first_step:
            self._step_seconds = (now - self._began) / (self._done - self._first_step)
        self._show(
            f"epoch {epoch + 1}/{self._num_epochs} step {step}/{self._num_steps}",
            f"loss {loss:.3f}  Dice {self._dice}",
            self._validations_until(epoch),
        )

    def validating(
        self, epoch: int, case: int, num_cases: int, window: int, num_windows: int
    ) -> None:
        """Show how far a validation is.

        Args:
            epoch: Number of the epoch that ends with it, from 0.
            case: Cases done.
            num_cases: Cases in all.
            window: Windows done of the next case; 0 where none was begun.
            num_windows: Windows of that case; at least 1.
        """
        now = time.monotonic()
        if self._validation_began is None:
            self._validation_began = now
            self._next_line = now + LOG_SECONDS
            self._next_refresh = 0.0
        part = min(1.0, (case + window / num_windows) / max(num_cases, 1))
        elapsed = now - self._validation_began
        if self._last_validation:
            self._validation_seconds = elapsed + (1 - part) * self._last_validation
        elif part > 0:
            self._validation_seconds = elapsed / part
        done = self._validations_until(epoch) + part
        text = f"validating case {min(case + 1, num_cases)}/{num_cases}"
        if self._progress.disable:
            if now >= self._next_line and not self._quiet:
                self._next_line = now + LOG_SECONDS
                left = (1 - part) * self._validation_seconds
                logger.info("epoch %d: %s, %s left of it", epoch + 1, text, duration(left))
        elif now >= self._next_refresh:
            self._next_refresh = now + REFRESH_SECONDS
            self._done = (epoch + 1) * self._num_steps
            text = f"{text} window {window}/{num_windows}"
            self._show(f"epoch {epoch + 1}/{self._num_epochs}", text, done)

    def predicting(self, case: int, num_cases: int, window: int, num_windows: int) -> None:
        """Show how far the prediction of the validation cases is, which comes last.

        Args:
            case: Cases done.
            num_cases: Cases in all.
            window: Windows done of the next case; 0 where none was begun.
            num_windows: Windows of that case; at least 1.
        """
        now = time.monotonic()
        text = f"case {min(case + 1, num_cases)}/{num_cases}"
        if case == window == 0:
            self._began = now  # of no step any more
            self._next_line = now + LOG_SECONDS
        part = (case + window / num_windows) / max(num_cases, 1)
        left = f"  {duration((1 / part - 1) * (now - self._began))} left" if part else ""
        if self._progress.disable:
            if now >= self._next_line and not self._quiet:
                self._next_line = now + LOG_SECONDS
                logger.info("predicting %s", text)
        elif now >= self._next_refresh:
            self._next_refresh = now + REFRESH_SECONDS
            self._progress.update(
                self._task,
                completed=part,
                total=1.0,
                description="predicting the validation",
                status=f"{text} window {window}/{num_windows}{left}",
                refresh=True,
            )

    def epoch_done(self, metrics: Mapping[str, Any], note: str | None = None) -> None:
        """Show one epoch.

        Args:
            metrics: Its line of ``metrics.jsonl``.
            note: What else there is to say of it, in a line of its own; None: nothing.
        """
        epoch, seconds = metrics["epoch"], metrics["seconds"]
        if self._validation_began is not None:
            # Steps are timed without what came between them.
            self._began += time.monotonic() - self._validation_began
            self._validation_began = None
        is_validated = "mean_dice" in metrics
        validation_seconds = metrics.get("validation_seconds")
        if validation_seconds is not None:
            self._last_validation = self._validation_seconds = validation_seconds
            seconds += validation_seconds
        if is_validated:
            self._dice = _score(metrics["mean_dice"])
        if self._quiet:
            return
        after = self._validations_after(epoch)
        left = (self._num_epochs - epoch) * metrics["seconds"] + after * self._validation_seconds
        took = f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"
        lines = _epoch_lines(
            f"epoch {epoch}/{self._num_epochs}: loss {metrics['loss']:.4f}",
            metrics if is_validated else None,
            f", {took} s, {self._left(left, after)}",
        )
        if note is not None:
            lines.append(INDENT + note)
        for text in lines:
            if self._progress.disable:
                logger.info("%s", text)
            elif is_validated:
                self._progress.console.print(text, highlight=False, markup=False)

    def _show(self, description: str, status: str, num_validations: float) -> None:
        """Show the bar, whose length is time: steps and validations as long as they take."""
        if self._step_seconds:
            step, validation = self._step_seconds, self._validation_seconds
        else:
            step, validation = 1.0, 0.0
        num_steps = self._num_epochs * self._num_steps
        of_validations = self._validations_until(self._num_epochs)
        total = num_steps * step + of_validations * validation
        completed = self._done * step + num_validations * validation
        if self._step_seconds:
            left = self._left(total - completed, of_validations - num_validations)
            status = f"{status}  {left}"
        self._progress.update(
            self._task,
            completed=completed,
            total=total,
            description=description,
            status=status,
            refresh=True,
        )

    def _left(self, seconds: float, num_validations: float) -> str:
        """Return the time left in words; more than that where a validation is not measured yet."""
        unknown = num_validations > 0 and self._validation_seconds == 0
        return f"{'over ' if unknown else ''}{duration(seconds)} left"

    def _validations_until(self, epoch: int) -> int:
        """Return how many validations the first epochs have."""
        if not self._validate_every:
            return 0
        number = epoch // self._validate_every
        is_last = epoch == self._num_epochs
        return number + (is_last and epoch % self._validate_every != 0)

    def _validations_after(self, epoch: int) -> int:
        return self._validations_until(self._num_epochs) - self._validations_until(epoch)


def duration(seconds: float) -> str:
    """Return seconds as people write them, such as ``2 h 05 min`` or ``41 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def list_within(names: list[str], columns: int) -> str:
    """Return as many names as fit, separated by commas, and how many are left out.

    Args:
        names: At least one.
        columns: Width of the text.
    """
    texts = [_printable(name) for name in names]
    ends = list(itertools.accumulate(cell_len(text) + len(", ") for text in texts))
    for shown in range(len(texts), 0, -1):
        more = f" and {len(texts) - shown} more" if shown < len(texts) else ""
        if ends[shown - 1] - len(", ") + len(more) <= columns:
            return ", ".join(texts[:shown]) + more
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    return _cut(texts[0], max(2, columns - len(more))) + more


def _epoch_lines(head: str, validation: Mapping[str, Any] | None, tail: str) -> list[str]:
    """Return the line of an epoch, and a second one where the labels' Dice has no place in it."""
    if validation is None:
        return [head + tail]
    head = f"{head}, Dice {_score(validation['mean_dice'])}"
    dice = [(_printable(name), value) for name, value in validation["dice"].items()]
    labels = ", ".join(f"{name} {_score(value)}" for name, value in dice)
    line = f"{head} ({labels}){tail}"
    if cell_len(line) <= MAX_COLUMNS:
        return [line]
    if len(INDENT) + cell_len(labels) <= MAX_COLUMNS:
        return [head + tail, INDENT + labels]
    known = sorted((value, name) for name, value in dice if value is not None)
    return [head + tail, _lowest(known)] if known else [head + tail]


def _lowest(dice: list[tuple[float, str]]) -> str:
    """Return the labels with the lowest Dice, as many as fit in a line."""
    line = f"{INDENT}lowest of {len(dice)} labels:" if len(dice) > 1 else INDENT[:-1]
    for number, (value, name) in enumerate(dice):
        text = f"{',' if number else ''} {_cut(name, MAX_NAME_COLUMNS)} {_score(value)}"
        if cell_len(line) + cell_len(text) > MAX_COLUMNS:
            break
        line += text
    return line


def _cut(text: str, columns: int) -> str:
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1).rstrip() + "…"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _score(dice: float | None) -> str:
    return "–" if dice is None else f"{dice:.3f}"
