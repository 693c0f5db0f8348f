"""``unet3d`` commands in processes of their own: ranks, or commands that run one after another."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO

import unet3d
from unet3d.distributed.processes import blocked
from unet3d.interruption import SIGNALS

Say = Callable[[str], object]
"""Shows a line."""

POLL_SECONDS = 0.05

LAST_WORDS_SECONDS = 10.0
"""How long a process that a command has started may outlive it, and hold its output open."""


class CommandProcess:
    """A command whose stderr goes to ``say``, from a thread, and its results nowhere.

    Where ``say`` is None, both go to the terminal.
    """

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], say: Say | None
    ) -> None:
        # A session of its own: Ctrl-C reaches it once, from here. It receives signals when it can
        # handle them.
        with blocked(*SIGNALS):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unet3d", *arguments],
                env={**os.environ, **import_variables(), **variables},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=None if say is None else subprocess.DEVNULL,
                stderr=None if say is None else subprocess.PIPE,
                text=True,
                errors="backslashreplace",
            )
        self._reader = None
        if say is not None and self._process.stderr is not None:
            self._reader = Thread(target=_pass_on, args=(self._process.stderr, say), daemon=True)
            self._reader.start()

    def status(self) -> int | None:
        """Return the exit status, or the signal that killed it, negative; None: it runs."""
        return self._process.poll()

    def send(self, signal_number: int) -> None:
        """Send a signal."""
        self._process.send_signal(signal_number)

    def end(self) -> None:
        """Kill the process if it runs, and see that all it said is shown."""
        self._process.kill()
        self._process.wait()
        if self._reader is not None:
            self._reader.join(LAST_WORDS_SECONDS)


def stop(processes: Sequence[CommandProcess], signal_number: int, within_seconds: float) -> None:
    """Ask commands to stop, wait for them, and kill those that do not."""
    for process in processes:
        process.send(signal_number)
    deadline = time.monotonic() + within_seconds
    while any(p.status() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    end_all(processes)


def end_all(processes: Sequence[CommandProcess]) -> None:
    """Kill the commands that run, all at once, and show what they said."""
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        process.end()


def import_variables() -> dict[str, str]:
    """Return the variables with which a Python process imports exactly what this one does.

    ``PYTHONPATH`` alone is not enough: its relative entries mean something else after a change of
    the current folder, and entries that the program added to ``sys.path`` are not in it. So the
    whole of ``sys.path`` is handed on, with absolute paths, and nothing is put before it.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    package = str(Path(unet3d.__file__).parent.parent)
    if package not in paths:  # its folder was taken off the path after the import
        paths.insert(0, package)
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}


def _pass_on(stream: IO[str], say: Say) -> None:
    with stream:
        for line in stream:
            say(line.rstrip())
