"""What Ctrl-C, SIGTERM and SIGHUP do while modules load, during a command and in a training run.

While the program starts, ends or loads modules, a signal ends the process at once, because an
exception in the middle of an import can be lost, or leave broken modules. While a command runs,
:class:`Interrupted` is raised, so that unfinished work is cleaned up; during a training run a
signal is a request, which takes effect after the step. A second signal ends the process at once.

Only small modules are imported here, because handlers must be set before anything else is loaded.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

REPEAT_SECONDS = 0.05
"""Delay before an interruption that Python ignored is raised again."""

_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


class Interrupted(BaseException):
    """The user or the system asked to stop; like KeyboardInterrupt, not an Exception."""

    def __init__(self, signal_number: int, can_resume: bool = False) -> None:
        """Take the signal, and whether the work so far is saved."""
        super().__init__(signal.Signals(signal_number).name)
        self.can_resume = can_resume
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number


class InterruptionRequest:
    """Whether a stop was requested."""

    def __init__(self) -> None:
        self.signal_number: int | None = None


_last_actions: dict[Callable[[], object], int] = {}
"""Cleanups, each with the id of the process that added it, because forked processes copy them."""


@contextmanager
def at_sudden_end(action: Callable[[], object]) -> Iterator[None]:
    """Run a cleanup if this process ends at once within the context, except by SIGKILL."""
    _last_actions[action] = os.getpid()
    try:
        yield
    finally:
        del _last_actions[action]


def end_at_once(status: int) -> NoReturn:
    """End this process without unwinding, after the cleanups of :func:`at_sudden_end`."""
    for action, process in list(_last_actions.items()):
        if process == os.getpid():
            with suppress(Exception):
                action()
    os._exit(status)


class _Stop:
    """Signal handler for times when stopping is not deferred."""

    def __init__(self) -> None:
        self.is_rank = False
        self.may_raise = False
        self._has_raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._has_raised and self.is_rank:
            return
        if not self._has_raised and self.may_raise and not _is_importing(frame):
            self._has_raised = True
            raise Interrupted(number)
        if not self.is_rank:
            with suppress(OSError):
                os.write(2, f"Stopped by {signal.Signals(number).name}\n".encode())
        end_at_once(128 + number)

    def repeat(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Raise an interruption again if it came where Python ignores exceptions, as in __del__."""
        error = unraisable.exc_value
        if isinstance(error, Interrupted):
            self._has_raised = False
            number = error.signal_number
            signal.signal(signal.SIGALRM, lambda _, frame: self(number, frame))
            signal.setitimer(signal.ITIMER_REAL, REPEAT_SECONDS)
        else:
            sys.__unraisablehook__(unraisable)


_stop = _Stop()


def stop_on_signals(is_rank: bool) -> None:
    """Handle the signals from now on: they end this program.

    ``is_rank``: another command has started this process, as a rank or for a fold, and reports to
    the user. Then a second signal is ignored, because terminals and launchers send it twice.
    """
    _stop.is_rank = is_rank
    sys.unraisablehook = _stop.repeat
    for number in _wanted():
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked when a launcher starts a rank


@contextmanager
def interruptible() -> Iterator[None]:
    """Have the signals of :func:`stop_on_signals` raise Interrupted in this context."""
    _stop.may_raise = True
    try:
        yield
    finally:
        _stop.may_raise = False


@contextmanager
def postponed_interruption() -> Iterator[None]:
    """Postpone a signal to the end of this context, also for another program's handler.

    While fake tensors are in use, PyTorch's C++ code calls Python for each operation. An exception
    in some of these calls would abort the process.
    """
    request = InterruptionRequest()
    try:
        with deferred_interruption(is_rank=True) as request:
            yield
    finally:
        if request.signal_number is not None:
            signal.raise_signal(request.signal_number)


@contextmanager
def deferred_interruption(is_rank: bool = False) -> Iterator[InterruptionRequest]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request; a second one acts at once.

    Python runs handlers in the main thread only, so in other threads this is a no-op. Another
    program's handlers are restored. A rank ignores a second signal.
    """
    request = InterruptionRequest()
    previous: dict[int, Any] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        if not is_rank:
            restore()

    def restore() -> None:
        while previous:
            number, handler = previous.popitem()
            signal.signal(number, handler)

    for number in _wanted():
        previous[number] = signal.signal(number, remember)
    try:
        yield request
    finally:
        restore()


def _wanted() -> list[signal.Signals]:
    """Return the signals to handle: none outside the main thread; not SIGHUP under nohup."""
    if threading.current_thread() is not threading.main_thread():
        return []
    handlers = {one: signal.getsignal(one) for one in SIGNALS}
    if handlers[signal.SIGHUP] is signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    # None: a handler that was not set by Python, and could not be restored.
    return [one for one, handler in handlers.items() if handler is not None]


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False
