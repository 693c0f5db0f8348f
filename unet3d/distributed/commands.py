"""Running ``unet3d`` commands in processes: ranks, or commands one after another or in parallel.

Separate processes keep the memory or a crash of one command from affecting the next. No command
outlives this process: Linux kills all commands when the process dies (``die_with_launcher``).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import IO

import unet3d
from unet3d.distributed import PARENT, SHARED_BY
from unet3d.distributed.processes import blocked
from unet3d.distributed.ranks import TRAINING, num_cores
from unet3d.interruption import SIGNALS, Interrupted, deferred_interruption

Say = Callable[[str], object]
"""Shows a line."""

POLL_SECONDS = 0.05

LAST_WORDS_SECONDS = 10.0
"""Longest wait for the end of a command's output: a process that it has started may outlive it and
hold the output open."""

STOP_SECONDS = TRAINING.stop_seconds + 15
"""Time for commands that are asked to stop; each may itself be waiting for ranks that save."""


_waiting: list[subprocess.Popen[str]] = []
"""Processes that wait for their command."""


@contextmanager
def loading_ahead(command: str, num_processes: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Start processes for the next commands, with the variables that PyTorch reads when it loads.

    They load PyTorch while this process does. Their ``command`` then reads a line from stdin: the
    arguments of the actual command, and further variables. Processes that no command needed are
    killed when the context ends, or by :func:`end_waiting`.
    """
    try:
        for _ in range(num_processes):
            _waiting.append(_started([command], variables, None, subprocess.PIPE))
        yield
    finally:
        end_waiting()


def end_waiting() -> None:
    """Kill the processes that still wait for their command."""
    while _waiting:
        with _waiting.pop() as process:
            process.kill()


def _started(
    arguments: Sequence[str], variables: Mapping[str, str], say: Say | None, stdin: int
) -> subprocess.Popen[str]:
    # In a session of its own, it gets Ctrl-C only once, from here. Signals stay blocked until it
    # can handle them.
    with blocked(*SIGNALS):
        return subprocess.Popen(
            [sys.executable, "-m", "unet3d", *arguments],
            env={**os.environ, **import_variables(), **variables},
            start_new_session=True,
            stdin=stdin,
            stdout=None if say is None else subprocess.DEVNULL,
            stderr=None if say is None else subprocess.PIPE,
            text=True,
            errors="backslashreplace",
        )


def _told(
    process: subprocess.Popen[str], arguments: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Give a waiting process its command; if it has died, that is found as for any command."""
    assert process.stdin is not None  # it is a pipe
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps([list(arguments), dict(variables)]) + "\n")
    return process


class CommandProcess:
    """A command whose stderr goes to ``say``, from a thread, and whose stdout is discarded.

    If ``say`` is None, both go to the terminal.
    """

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], say: Say | None
    ) -> None:
        if say is None and _waiting:
            self._process = _told(_waiting.pop(0), arguments, variables)
        else:
            self._process = _started(arguments, variables, say, subprocess.DEVNULL)
        self._reader = None
        if say is not None and self._process.stderr is not None:
            self._reader = Thread(target=_pass_on, args=(self._process.stderr, say), daemon=True)
            self._reader.start()

    def status(self) -> int | None:
        """Return the exit status, negative if a signal killed it; None: it is still running."""
        return self._process.poll()

    def send(self, signal_number: int) -> None:
        """Send a signal."""
        self._process.send_signal(signal_number)

    def end(self) -> None:
        """Kill the process if it runs, and show its remaining output."""
        self._process.kill()
        self._process.wait()
        if self._reader is not None:
            self._reader.join(LAST_WORDS_SECONDS)


def stop(processes: Collection[CommandProcess], signal_number: int, within_seconds: float) -> None:
    """Ask commands to stop, wait for them, and kill the remaining ones."""
    for process in processes:
        process.send(signal_number)
    deadline = time.monotonic() + within_seconds
    while any(p.status() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    end_all(processes)


def end_all(processes: Collection[CommandProcess]) -> None:
    """Kill all running commands, and show their remaining output."""
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        process.end()


def import_variables() -> dict[str, str]:
    """Return the variables with which a Python process imports exactly what this one does.

    ``PYTHONPATH`` alone is not enough: its relative entries change meaning with the current folder,
    and it lacks entries that the program added to ``sys.path``. So all of ``sys.path`` is passed
    on, with absolute paths, and nothing is put before it.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    package = str(Path(unet3d.__file__).parent.parent)
    if package not in paths:  # its folder was taken off the path after the import
        paths.insert(0, package)
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}


def run_commands(
    commands: Mapping[str, Sequence[str]],
    slots: Sequence[Sequence[str]],
    *,
    on_cpu: bool,
    say: Say,
    goes_on_after: Callable[[str], bool],
) -> dict[str, int]:
    """Run commands in order, at most one per slot in parallel, and wait for all of them.

    A command has a name and arguments of ``unet3d``; the words of its slot are appended. With one
    slot, commands write to the terminal. With several, each line of stderr is shown with the name
    of its command, and stdout is discarded. On CPUs, parallel commands share the cores. Running
    commands always continue to their end; ``goes_on_after`` says whether others still start after a
    failure.

    Returns the exit status of each command that was run, by its name; negative: the signal that
    killed it. Raises Interrupted after all commands have ended.
    """
    waiting = list(commands)
    statuses: dict[str, int] = {}
    variables = _variables(len(slots), on_cpu)
    running: dict[int, tuple[str, CommandProcess]] = {}
    with deferred_interruption() as request:
        try:
            while waiting or running:
                for number, slot in enumerate(slots):
                    if number not in running and waiting:
                        name = waiting.pop(0)
                        own_say = None if len(slots) == 1 else _named(name, say)
                        process = CommandProcess([*commands[name], *slot], variables, own_say)
                        running[number] = name, process
                if request.signal_number is not None:
                    processes = [process for _, process in running.values()]
                    stop(processes, request.signal_number, STOP_SECONDS)
                    raise Interrupted(request.signal_number)
                for number, (name, process) in list(running.items()):
                    status = process.status()
                    if status is not None:
                        del running[number]
                        process.end()
                        statuses[name] = status
                        if status and not goes_on_after(name):
                            waiting.clear()
                time.sleep(POLL_SECONDS)
        finally:  # even after an error, no command is left running
            end_all([process for _, process in running.values()])
    return statuses


def in_words(status: int) -> str:
    """Describe how a failed command ended, by its exit status; negative: a signal killed it."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status - 128 in SIGNALS:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return "failed"


def _named(name: str, say: Say) -> Say:
    return lambda line: say(f"{name}: {line}")


def _pass_on(stream: IO[str], say: Say) -> None:
    with stream:
        for line in stream:
            say(line.rstrip())


def _variables(num_slots: int, on_cpu: bool) -> dict[str, str]:
    variables = {PARENT: str(os.getpid()), SHARED_BY: str(num_slots)}
    if on_cpu and num_slots > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_slots))
    return variables
