"""Ctrl-C, SIGTERM and SIGHUP: what they do while modules load, before a training, and during it.

::

    while the program starts,     the process ends at once: nothing has been written, and an
    ends, or loads modules        exception in the middle of an import can be lost, or leave
                                  broken modules (stop_on_signals)
    while a command runs          Interrupted is raised, so that what was begun is cleaned up
                                  (interruptible)
    while PyTorch asks Python     the same, but at the end of that (postponed_interruption)
    what each operation does
    during a training             a request, which is granted after the step
                                  (deferred_interruption)

A second signal ends the process at once. Only small modules are imported here, because this must be
in force before anything else is loaded.

Another program that uses this package has handlers of its own. The last two take their place, in
the main thread, and give it back.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

REPEAT_SECONDS = 0.05
"""After what time an interruption that Python could not pass on is repeated."""

_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


class Interrupted(BaseException):
    """The user or the system asked to stop.

    Like KeyboardInterrupt it is no ``Exception``: nobody shall take it for a fault of their own.
    """

    def __init__(self, signal_number: int, can_resume: bool = False) -> None:
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


class _Stop:
    """Handler of the signals, where nothing is deferred."""

    def __init__(self) -> None:
        self.is_rank = False
        self.may_raise = False
        self.num_postponing = 0
        self.postponed: int | None = None
        self._has_raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._has_raised:
            if not self.is_rank:
                os._exit(128 + number)
        elif self.may_raise and self.num_postponing:
            self._has_raised = True
            self.postponed = number
        elif self.may_raise and not _is_importing(frame):
            self._has_raised = True
            raise Interrupted(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        try:
            if not self.is_rank:
                os.write(2, f"Stopped by {signal.Signals(number).name}\n".encode())
        finally:
            os._exit(128 + number)

    def repeat(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Raise an interruption again that came where Python cannot pass it on, as in __del__."""
        error = unraisable.exc_value
        if not isinstance(error, Interrupted):
            sys.__unraisablehook__(unraisable)
            return
        self._has_raised = False
        number = error.signal_number
        signal.signal(signal.SIGALRM, lambda _, frame: self(number, frame))
        signal.setitimer(signal.ITIMER_REAL, REPEAT_SECONDS)


_stop = _Stop()


def stop_on_signals(is_rank: bool) -> None:
    """Have the signals end this program, from now on and until it ends.

    Args:
        is_rank: Whether another command has started this process, as a rank or for a fold; that one
            tells the user then, and a second signal changes nothing, because terminals and
            launchers send it twice.
    """
    _stop.is_rank = is_rank
    sys.unraisablehook = _stop.repeat
    for number in _wanted():
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher starts ranks without them


@contextmanager
def interruptible() -> Iterator[None]:
    """Have the signals of :func:`stop_on_signals` raise in this context.

    Raises:
        Interrupted: There was a signal.
    """
    _stop.may_raise = True
    try:
        yield
    finally:
        _stop.may_raise = False


@contextmanager
def postponed_interruption() -> Iterator[None]:
    """Have the signals that would raise in this context raise at its end; a second one ends all.

    PyTorch's C++ code calls Python for each operation while fake tensors are in use. In some of
    these calls it expects no exception, and ends the process by ``abort`` where there is one.
    Another program's handlers are called at the end of the context, too.

    Raises:
        Interrupted: There was a signal in the context.
    """
    handler: object = signal.getsignal(signal.SIGINT)
    if handler is not _stop:
        request = InterruptionRequest()
        try:
            with deferred_interruption() as request:
                yield
        finally:
            if request.signal_number is not None:
                signal.raise_signal(request.signal_number)
        return
    _stop.num_postponing += 1
    try:
        yield
    finally:
        _stop.num_postponing -= 1
        if _stop.postponed is not None and not _stop.num_postponing:
            number, _stop.postponed = _stop.postponed, None
            raise Interrupted(number)


@contextmanager
def deferred_interruption(is_rank: bool = False) -> Iterator[InterruptionRequest]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request; a second one acts at once.

    Only the main thread can do so, in which Python runs handlers; in another one nothing changes.

    Args:
        is_rank: Whether another command has started this process, as a rank or for a fold; then a
            second signal changes nothing, because that command passes on what a terminal, or a
            service's manager, has already sent to all.
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

    for number in _wanted():
        previous[number] = signal.signal(number, remember)
    try:
        yield request
    finally:
        restore()


def _wanted() -> list[signal.Signals]:
    """Return the signals to handle: not SIGHUP where nohup has had it ignored; in threads none."""
    if threading.current_thread() is not threading.main_thread():
        return []
    handlers = {one: signal.getsignal(one) for one in SIGNALS}
    if handlers[signal.SIGHUP] is signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    # None: a handler that is not Python's, which could not be put back.
    return [one for one, handler in handlers.items() if handler is not None]


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False
