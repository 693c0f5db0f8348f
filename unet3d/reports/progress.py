"""The progress of a training run: a live line on a terminal, plain lines in a log."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from unet3d.reports.tables import duration, score
from unet3d.terminal import live_line

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
"""Seconds between updates of the live line: reading a loss waits for the device."""

LOG_SECONDS = 60.0
"""Seconds between log lines during a validation, and before the first one."""

MAX_COLUMNS = 80
"""Most columns of a line."""

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
        quiet: bool,
    ) -> None:
        """Set up a live line on a terminal, and a line per epoch anywhere else.

        There are ``num_steps`` in an epoch; the last epoch is validated, too, unless
        ``validate_every`` is 0.
        """
        self._console = console
        self._num_epochs, self._num_steps = num_epochs, num_steps
        self._validate_every = validate_every
        self._quiet = quiet
        self._is_live = console.is_terminal and not quiet
        self._dice = score(None)
        self._began: tuple[int, float] | None = None
        """Number of steps done and the time then, from which the first epoch's steps are timed."""
        self._has_epoch = False
        self._step_seconds = self._validation_seconds = 0.0
        self._cases_began = self._next_refresh = self._next_line = 0.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line while in the context."""
        with live_line(self._console, is_shown=not self._quiet, stays=True) as self._show:
            yield

    def wants_loss(self) -> bool:
        """Return whether it is time to show a new loss."""
        return self._is_live and time.monotonic() >= self._next_refresh

    def step_done(self, epoch: int, step: int, loss: float) -> None:
        """Show the loss after some steps of an epoch; epochs count from 0."""
        now, done = time.monotonic(), epoch * self._num_steps + step
        self._next_refresh = now + REFRESH_SECONDS
        first, began = self._began = self._began or (done, now)
        if done > first and not self._has_epoch:
            self._step_seconds = (now - began) / (done - first)
        self._show_time(
            f"epoch {epoch + 1}/{self._num_epochs} step {step}/{self._num_steps}",
            f"loss {loss:.3f}  Dice {self._dice}",
            (done, self._validations_until(epoch)),
        )

    def validating(
        self, epoch: int, case: int, num_cases: int, window: int, num_windows: int
    ) -> None:
        """Show how many cases, and windows of the current one, a validation has done.

        It comes at the end of an epoch; epochs count from 0.
        """
        cases = (case, num_cases, window, num_windows)
        part, self._validation_seconds = self._cases_done(f"epoch {epoch + 1}: validating", *cases)
        if self._is_due():
            self._show_time(
                f"epoch {epoch + 1}/{self._num_epochs}",
                f"validating {_in_words(*cases)}",
                ((epoch + 1) * self._num_steps, self._validations_until(epoch) + part),
            )

    def predicting(self, case: int, num_cases: int, window: int, num_windows: int) -> None:
        """Show how many cases, and windows of the current one, the final validation has done."""
        cases = (case, num_cases, window, num_windows)
        part, seconds = self._cases_done("predicting", *cases)
        if self._is_due():
            left = f"  {duration((1 - part) * seconds)} left" if part else ""
            self._show("predicting the validation", part, 1.0, f"{_in_words(*cases)}{left}")

    def epoch_done(self, metrics: Mapping[str, Any], note: str | None = None) -> None:
        """Show an epoch's line of ``metrics.jsonl``, and further numbers in a second line.

        On a terminal, epochs without a validation are seen in the live line only.
        """
        epoch, seconds = metrics["epoch"], metrics["seconds"]
        self._has_epoch, self._step_seconds = True, seconds / self._num_steps
        is_validated = "mean_dice" in metrics
        if is_validated:
            self._dice = score(metrics["mean_dice"])
        if "validation_seconds" in metrics:
            self._validation_seconds = metrics["validation_seconds"]
            seconds += metrics["validation_seconds"]
        if self._quiet or (self._is_live and not is_validated):
            return
        *_, left = self._times(epoch * self._num_steps, self._validations_until(epoch))
        took = f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"
        lines = [
            f"epoch {epoch}/{self._num_epochs}: loss {metrics['loss']:.4f}"
            + (f", Dice {self._dice}" if is_validated else "")
            + f", {took} s, {left}"
        ]
        if is_validated:
            lines.append(INDENT + _labels(metrics["dice"], MAX_COLUMNS - len(INDENT)))
        if note:
            lines.append(INDENT + note)
        for text in lines:
            if self._is_live:
                self._console.print(text, highlight=False, markup=False)
            else:
                logger.info("%s", text)

    def _cases_done(
        self, doing: str, case: int, num_cases: int, window: int, num_windows: int
    ) -> tuple[float, float]:
        """Return the share of finished cases, and the time for all; log it occasionally."""
        now = time.monotonic()
        if case == window == 0 or not self._cases_began:
            self._cases_began, self._next_line, self._next_refresh = now, now + LOG_SECONDS, 0.0
        part = min(1.0, (case + window / num_windows) / max(num_cases, 1))
        seconds = (now - self._cases_began) / part if part else self._validation_seconds
        if not self._is_live and not self._quiet and now >= self._next_line:
            self._next_line = now + LOG_SECONDS
            left = duration((1 - part) * seconds)
            number = min(case + 1, num_cases)
            logger.info("%s case %d/%d, %s left", doing, number, num_cases, left)
        return part, seconds

    def _is_due(self) -> bool:
        """Return whether the live line is to be drawn again."""
        now = time.monotonic()
        if not self._is_live or now < self._next_refresh:
            return False
        self._next_refresh = now + REFRESH_SECONDS
        return True

    def _show_time(self, text: str, status: str, done: tuple[int, float]) -> None:
        """Show a bar over time; ``done`` counts finished steps and validations."""
        seconds, total, left = self._times(*done)
        self._show(text, seconds, total, f"{status}  {left}" if self._step_seconds else status)

    def _times(self, steps: int, validations: float) -> tuple[float, float, str]:
        """Return the seconds so far, the seconds in total, and the remaining time in words.

        The words begin with "over" while no validation has been measured.
        """
        step, validation = self._step_seconds or 1.0, self._validation_seconds
        every_validation = self._validations_until(self._num_epochs)
        done = steps * step + validations * validation
        total = self._num_epochs * self._num_steps * step + every_validation * validation
        over = "over " if every_validation > validations and not validation else ""
        return done, total, f"{over}{duration(total - done)} left"

    def _validations_until(self, epoch: int) -> int:
        """Return the number of validations in the first ``epoch`` epochs."""
        if not self._validate_every:
            return 0
        number, rest = divmod(epoch, self._validate_every)
        return number + (epoch == self._num_epochs and rest != 0)


def _in_words(case: int, num_cases: int, window: int, num_windows: int) -> str:
    return f"case {min(case + 1, num_cases)}/{num_cases} window {window}/{num_windows}"


def _labels(dice: Mapping[str, float | None], columns: int) -> str:
    """Return the Dice of each label, or the lowest ones if the line is too short."""
    texts = {}
    for name, value in dice.items():
        plain = "".join(letter if letter.isprintable() else "?" for letter in name)
        texts[name] = f"{plain} {score(value)}"
    text = ", ".join(texts.values())
    if cell_len(text) <= columns:
        return text
    lowest = sorted((value, name) for name, value in dice.items() if value is not None)
    text = "lowest: " + ", ".join(texts[name] for _, name in lowest)
    return set_cell_size(text, columns - 1).rstrip() + "…"
