"""Ctrl-C and SIGTERM as a request to stop at the next safe moment."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """The user or the system asked to stop."""

    def __init__(self, signal_number: int, can_resume: bool = True) -> None:
        """Say which signal asked.

        Args:
            signal_number: The signal, such as SIGTERM.
            can_resume: Whether what was done so far is saved.
        """
        super().__init__(signal.Signals(signal_number).name)
        self.can_resume = can_resume
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number


class InterruptionRequest:
    """Whether somebody has asked to stop."""

    def __init__(self) -> None:
        self.signal_number: int | None = None


@contextmanager
def deferred_interruption(is_rank: bool = False) -> Iterator[InterruptionRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one acts at once.

    Args:
        is_rank: Whether this is one of several ranks; then a second signal changes nothing,
            because a launcher passes on what the terminal has already sent to all.
    """
    request = InterruptionRequest()
    previous: dict[int, object] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        if not is_rank:
            restore()

    def restore() -> None:
        while previous:
            number, handler = previous.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, remember)
    try:
        yield request
    finally:
        restore()
