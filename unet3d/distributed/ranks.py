"""The place of a process among those of one training, and what it tells the one that started it.

The variables are those of torchrun, which is PyTorch's way of starting a process for each device,
on one machine or many; ``unet3d train`` uses the same launcher for itself.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Literal, NoReturn

from unet3d.errors import ConfigError

LAUNCHED = "UNET3D_LAUNCHED"
"""Holds the process id of the ``unet3d train`` that has started the ranks, and reports for them."""

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Kind = Literal["explained", "unexpected", "interrupted", "consequence"]
"""What ended a rank: a reason that we explain; one that we do not; a signal; the end of another."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which of how many processes this one is."""

    rank: int = 0
    """From 0; the first one writes the run's files."""
    world_size: int = 1
    """How many there are, on all machines."""
    local_rank: int = 0
    """Among those of this machine."""
    local_world_size: int = 1
    """How many there are on this machine."""
    restart_count: int = 0
    """How often this machine's own have been started anew after one had died."""

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Return what torchrun says, or the only rank where nothing has started several.

        Raises:
            ConfigError: The variables contradict one another.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [os.environ.get(name, "") for name in names]
        missing = [name for name, value in zip(names, values, strict=True) if not value.isdigit()]
        if missing:
            raise ConfigError(
                f"RANK and WORLD_SIZE are set but {', '.join(missing)} is no number; start the "
                "ranks with torchrun, or unset RANK"
            )
        restart_count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        rank, world_size, local_rank, local_world_size = map(int, values)
        ranks = cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            restart_count=int(restart_count),
        )
        if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
            raise ConfigError(
                f"RANK is {ranks.rank} of {ranks.world_size}, LOCAL_RANK {ranks.local_rank} of "
                f"{ranks.local_world_size}; ranks count from 0"
            )
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and shows."""
        return self.rank == 0


def is_launched() -> bool:
    """Return whether ``unet3d train`` has started this process as one of its ranks."""
    return LAUNCHED in os.environ


def die_with_parent() -> None:
    """Have Linux kill this process when the one that started it dies, however it dies."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHED)
    if launcher is not None and os.getppid() != int(launcher):  # it died before this was asked for
        os._exit(1)


def silence_torch() -> None:
    """Keep what PyTorch says of waits and lost connections off the terminal; we say it in a line.

    It must be called before PyTorch is imported.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def leave(status: int) -> NoReturn:
    """End this process; one of several at once.

    What it still shares with ranks that are gone, on a GPU too, has no orderly end.

    Args:
        status: For whoever started it.
    """
    if Ranks.from_environment().world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def report_end(error: BaseException, kind: Kind, signal_number: int = 0) -> None:
    """Write down why this rank ends, in the form and place that torch elastic wants.

    Args:
        error: The reason.
        kind: Of the reason.
        signal_number: Where somebody asked to stop.
    """
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return
    now = time.time()
    message = " ".join(str(error).split())
    if kind == "unexpected":
        message = f"{type(error).__name__}: {message}"
    # torchrun shows this; an error that we explain needs no traceback.
    shown = traceback.format_exc() if kind == "unexpected" else message
    content = {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": shown, "timestamp": str(int(now))},
        },
        "kind": kind,
        "signal": signal_number,
        "time": now,
    }
    with open(path, "w") as file:
        json.dump(content, file)
