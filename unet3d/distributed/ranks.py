"""The place of a process among the ranks of one job, and what it reports to its launcher.

The environment variables are those of torchrun, PyTorch's way of starting a process for each device
on one machine or many; ``unet3d train`` sets the same variables for the ranks that it starts.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unet3d.distributed import PARENT, SHARED_BY, is_launched, is_started
from unet3d.distributed.processes import die_with_parent
from unet3d.errors import ConfigError, DeviceError, LostRankError, RankError, Unet3dError
from unet3d.interruption import Interrupted, end_at_once

logger = logging.getLogger(__name__)

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Holds the path of the file in which a rank reports why it ends."""

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"

_WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables for how OpenMP threads wait: of the standard, of GNU's and of LLVM's library."""

LEAVE_SECONDS = 10.0
"""Time for a thread to end this process, once it has begun to report why."""

_ending = threading.RLock()
"""Held, and never released, by the thread that reports why this process ends."""

KINDS: dict[type[BaseException], str] = {
    LostRankError: "consequence",
    RankError: "hang",
    DeviceError: "device",
    Unet3dError: "explained",
    Interrupted: "interrupted",
}
"""Kinds of errors that end a rank: another rank died, another rank hangs, a device failed, another
explained error, or a signal."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of this rank, and how many ranks there are."""

    rank: int = 0
    """Number on all machines, from 0; rank 0 writes the run's files."""
    world_size: int = 1
    """Number of ranks on all machines."""
    local_rank: int = 0
    """Number among the ranks of this machine, from 0."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    restart_count: int = 0
    """How often this machine's ranks were started again after one had died."""

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Read torchrun's environment variables; without them this is the only rank."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = {name: os.environ.get(name, "") for name in names}
        missing = [name for name, value in values.items() if not value.isdigit()]
        if missing:
            raise ConfigError(
                f"RANK and WORLD_SIZE are set but {', '.join(missing)} is not a number; start "
                "the ranks with torchrun, or unset RANK"
            )
        numbers = {name.lower(): int(value) for name, value in values.items()}
        ranks = cls(**numbers, restart_count=int(os.environ.get(RESTART_COUNT, "0")))
        if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
            raise ConfigError(
                f"RANK is {ranks.rank} of {ranks.world_size}, LOCAL_RANK {ranks.local_rank} of "
                f"{ranks.local_world_size}; ranks count from 0"
            )
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """The purpose of ranks, which decides the advice when a rank is lost."""

    after_loss: str
    """What to do when a rank was killed."""
    after_silence: str
    """What to do when a rank hangs."""
    stop_seconds: float
    """Time for ranks that are asked to stop, before they are killed."""


TRAINING = Purpose(
    after_loss="--resume continues the run",
    after_silence="--resume continues the run; if it only needs longer, raise "
    "parallel.timeout_seconds",
    stop_seconds=120.0,  # in which they end their step and save
)

PREDICTION = Purpose(
    after_loss="give the same command again",
    after_silence="give the same command again",
    stop_seconds=10.0,  # nothing needs to be saved
)


def num_cores() -> int:
    """Return how many cores this process may use, which other commands may share."""
    is_linux = sys.platform == "linux"
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get(SHARED_BY, "1")))


def wait_passively() -> None:
    """Let waiting threads sleep if other programs use this machine.

    By default OpenMP threads wait actively: if one thread has no core, the waiting threads keep
    their cores busy until it gets one. On two cores at a load of 8, a step of a small network took
    2.8 s, and 1.1 s of CPU time, instead of 0.2 s and 0.13 s. Results and number of threads stay
    the same. Settings of the user are kept. Call it before PyTorch is imported.
    """
    if not any(variable in os.environ for variable in _WAITING_VARIABLES):
        if _busy_cores() > (os.cpu_count() or 1) / 2:
            os.environ[_WAITING_VARIABLES[0]] = "PASSIVE"


def _busy_cores() -> float:
    """Count running threads of other programs: now or over the last minute, the smaller number."""
    try:
        minute, _, _, now, _ = Path("/proc/loadavg").read_text().split()
    except OSError:
        return 0.0
    return min(float(minute), int(now.partition("/")[0]) - 1)


def die_with_launcher() -> None:
    """If another command started this process, let Linux kill the process when the command dies."""
    if is_started():
        die_with_parent(int(os.environ[PARENT]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def silence_torch() -> None:
    """Keep PyTorch's messages on waits and lost connections off the terminal.

    A message of unet3d says the same in one line. Call it before PyTorch is imported.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def leave(status: int) -> NoReturn:
    """End this process; if it is one of several ranks, without cleaning up.

    Resources shared with ranks that are gone, also on a GPU, cannot be released in order.
    """
    places = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if all(map(str.isdigit, places)) and places[1] != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        end_at_once(status)
    sys.exit(status)


def end_process(error: RankError) -> NoReturn:
    """Report why this rank ends, and end it, even if its main thread hangs.

    If the main thread reports at the same time, only one of the two threads does.
    """
    if not _ending.acquire(timeout=LEAVE_SECONDS):
        os._exit(1)  # the main thread has reported, and hangs in its clean-up
    report_end(error)
    if not is_launched():  # otherwise the launcher shows the error, once
        logger.error("Error: %s", " ".join(str(error).split()))
    leave(1)


def report_end(error: BaseException) -> None:
    """Write down why this rank ends, in the form and place that torch elastic expects.

    The calling thread must then end the process; another thread that calls this blocks until then.
    """
    _ending.acquire()
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    kind = next((KINDS[one] for one in type(error).__mro__ if one in KINDS), "unexpected")
    now = time.time()
    message = " ".join(str(error).split())
    if kind == "unexpected":
        message = f"{type(error).__name__}: {message}"
    # torchrun shows the call stack; an explained error needs no traceback.
    shown = traceback.format_exc() if kind == "unexpected" else message
    content = {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": shown, "timestamp": str(int(now))},
        },
        "kind": kind,
        "types": [one.__name__ for one in type(error).__mro__],
        "signal": error.signal_number if isinstance(error, Interrupted) else 0,
        "time": now,
    }
    with open(path, "w") as file:
        json.dump(content, file)
