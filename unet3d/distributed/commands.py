"""Running several ``unet3d`` commands, one after another or some of them at the same time.

Each is a process of its own, so that what one leaves in memory, or how it ends, is nothing to the
next. None outlives this process: Linux kills them when it dies (``die_with_launcher``).
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from unet3d.distributed.launched import PARENT, SHARED_BY
from unet3d.distributed.launcher import Say, import_variables
from unet3d.distributed.processes import blocked, said_by
from unet3d.distributed.purpose import TRAINING
from unet3d.distributed.ranks import num_cores
from unet3d.interruption import SIGNALS, Interrupted, deferred_interruption

POLL_SECONDS = 0.05

STOP_SECONDS = TRAINING.stop_seconds + 15
"""Time for commands that are asked to stop; each may itself be waiting for ranks that save."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command."""

    name: str
    """What its lines begin with, where several run at the same time."""
    arguments: tuple[str, ...]
    """Arguments of ``unet3d``."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    command: Command
    process: subprocess.Popen[str]
    reader: Thread | None

    def has_ended(self) -> bool:
        """Return whether it has, and all that it said is shown."""
        if self.process.poll() is None:
            return False
        if self.reader is not None:
            self.reader.join()
        return True


def run_commands(
    commands: Sequence[Command],
    slots: Sequence[Sequence[str]],
    *,
    on_cpu: bool,
    say: Say,
    goes_on_after: Callable[[Command], bool],
) -> dict[str, int]:
    """Run commands in their order, as many at a time as there are slots, and wait for all of them.

    With one slot a command writes to the terminal itself. With several, what they write to stderr
    is shown line by line, each with the name of its command, and their results are not.

    Args:
        commands: The commands.
        slots: What each slot adds to the arguments of the commands that run there.
        on_cpu: Whether they compute on CPUs, whose cores they then share.
        say: Shows a line.
        goes_on_after: Whether the commands that have not begun are still run after one has failed;
            those that run always go on.

    Returns:
        The exit status of each command that was run, by its name; negative: the signal that killed
        it.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after all commands have ended.
    """
    waiting = deque(commands)
    statuses: dict[str, int] = {}
    variables = _variables(len(slots), on_cpu)
    with deferred_interruption() as request, _ended_at_last() as running:
        while waiting or running:
            for number, slot in enumerate(slots):
                if number not in running and waiting:
                    is_alone = len(slots) == 1
                    running[number] = _start(waiting.popleft(), slot, variables, is_alone, say)
            if request.signal_number is not None:
                _stop(list(running.values()), request.signal_number)
                raise Interrupted(request.signal_number)
            for number, one in list(running.items()):
                if one.has_ended():
                    del running[number]
                    statuses[one.command.name] = status = one.process.returncode
                    if status and not goes_on_after(one.command):
                        waiting.clear()
            time.sleep(POLL_SECONDS)
    return statuses


@contextmanager
def _ended_at_last() -> Iterator[dict[int, _Running]]:
    """Leave no command running, whatever happens in the context."""
    running: dict[int, _Running] = {}
    try:
        yield running
    finally:
        for one in running.values():
            one.process.kill()
        for one in running.values():
            one.process.wait()


def _start(
    command: Command, slot: Sequence[str], variables: dict[str, str], is_alone: bool, say: Say
) -> _Running:
    # A session of its own: Ctrl-C reaches it once, from here, and when it can handle it.
    with blocked(*SIGNALS):
        process = subprocess.Popen(
            [sys.executable, "-m", "unet3d", *command.arguments, *slot],
            env=variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=None if is_alone else subprocess.DEVNULL,
            stderr=None if is_alone else subprocess.PIPE,
            text=True,
            errors="backslashreplace",
        )
    reader = None
    if process.stderr is not None:
        reader = said_by(process.stderr, lambda line: say(f"{command.name}: {line}"))
    return _Running(command=command, process=process, reader=reader)


def _stop(running: Sequence[_Running], signal_number: int) -> None:
    """Ask commands to stop, wait for them, and kill those that do not."""
    for one in running:
        one.process.send_signal(signal_number)
    deadline = time.monotonic() + STOP_SECONDS
    while any(one.process.poll() is None for one in running) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _variables(num_slots: int, on_cpu: bool) -> dict[str, str]:
    variables = {
        **os.environ,
        **import_variables(),
        PARENT: str(os.getpid()),
        SHARED_BY: str(num_slots),
    }
    if on_cpu and num_slots > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_slots))
    return variables


def in_words(status: int) -> str:
    """Return how a command ended that failed.

    Args:
        status: Its exit status; negative: the signal that killed it.
    """
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status - 128 in SIGNALS:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return "failed"
