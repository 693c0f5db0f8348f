"""Running several ``unet3d`` commands, one after another or some of them at the same time.

Each is a process of its own, so that what one leaves in memory, or how it ends, is nothing to the
next. None outlives this process: Linux kills them when it dies (``die_with_launcher``).
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from unet3d.distributed.command_process import POLL_SECONDS, CommandProcess, Say, end_all, stop
from unet3d.distributed.launched import PARENT, SHARED_BY
from unet3d.distributed.purpose import TRAINING
from unet3d.distributed.ranks import num_cores
from unet3d.interruption import SIGNALS, Interrupted, deferred_interruption

STOP_SECONDS = TRAINING.stop_seconds + 15
"""Time for commands that are asked to stop; each may itself be waiting for ranks that save."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command."""

    name: str
    """What its lines begin with, where several run at the same time."""
    arguments: tuple[str, ...]
    """Arguments of ``unet3d``."""


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

    Each slot has words that are added to the arguments of the commands which run there. On CPUs,
    commands that run at the same time share the cores. Those that run always go on to their end;
    ``goes_on_after`` says whether others still begin after one that failed.

    Returns the exit status of each command that was run, by its name; negative: the signal that
    killed it. Raises Interrupted after all commands have ended.
    """
    waiting = deque(commands)
    statuses: dict[str, int] = {}
    variables = _variables(len(slots), on_cpu)
    running: dict[int, tuple[Command, CommandProcess]] = {}
    with deferred_interruption() as request, _ended_at_last(running):
        while waiting or running:
            for number, slot in enumerate(slots):
                if number not in running and waiting:
                    command = waiting.popleft()
                    own_say = None if len(slots) == 1 else _named(command, say)
                    process = CommandProcess([*command.arguments, *slot], variables, own_say)
                    running[number] = command, process
            if request.signal_number is not None:
                processes = [process for _, process in running.values()]
                stop(processes, request.signal_number, STOP_SECONDS)
                raise Interrupted(request.signal_number)
            for number, (command, process) in list(running.items()):
                status = process.status()
                if status is not None:
                    del running[number]
                    process.end()
                    statuses[command.name] = status
                    if status and not goes_on_after(command):
                        waiting.clear()
            time.sleep(POLL_SECONDS)
    return statuses


def _named(command: Command, say: Say) -> Say:
    return lambda line: say(f"{command.name}: {line}")


@contextmanager
def _ended_at_last(running: dict[int, tuple[Command, CommandProcess]]) -> Iterator[None]:
    """Leave no command running, whatever happens in the context."""
    try:
        yield
    finally:
        end_all([process for _, process in running.values()])


def _variables(num_slots: int, on_cpu: bool) -> dict[str, str]:
    variables = {PARENT: str(os.getpid()), SHARED_BY: str(num_slots)}
    if on_cpu and num_slots > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_slots))
    return variables


def in_words(status: int) -> str:
    """Return how a command ended that failed, by its exit status; negative: a signal killed it."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status - 128 in SIGNALS:
        return f"was stopped by {signal.Signals(status - 128).name}"
    return "failed"
