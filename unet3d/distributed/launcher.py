"""Starting the ranks of one machine, again when one dies, and reporting their end.

PyTorch's elastic launcher does this too, but on the way it listens on all interfaces and unpickles
what it is sent. Here the store in which the ranks meet and the sockets of gloo and NCCL stay on the
loopback interface.
"""

import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.atomic import temporary_folder
from unet3d.distributed import LAUNCHED, MEETING_FOLDER, STORE_PORT, is_one_of_several
from unet3d.distributed.commands import POLL_SECONDS, CommandProcess, Say, end_all, stop
from unet3d.distributed.ranks import (
    ERROR_FILE,
    RESTART_COUNT,
    TRAINING,
    Kind,
    Purpose,
    num_cores,
)
from unet3d.errors import RankError, Unet3dError
from unet3d.interruption import SIGNALS, Interrupted, InterruptionRequest, deferred_interruption

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""Time for ranks that cannot go on without another, in which they say so."""

LEAVING_SECONDS = 5.0
"""Time for a rank to end that has said why. It may take long where its GPU still waits for a rank
that hangs, which nobody else ends."""

MEETING = "unet3d-ranks"
"""How the names of the folders begin that ranks have for their files."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank ended that did not come to its end."""

    rank: int
    exit_status: int
    """Its exit status; negative: the signal that killed it."""
    noticed_at: float
    """Seconds since the epoch when the launcher noticed."""
    report: dict[str, Any]
    """What it wrote down itself; see :func:`unet3d.distributed.ranks.report_end`."""

    @property
    def kind(self) -> Kind | None:
        """Kind of the reason that it wrote down; None: it wrote nothing."""
        return self.report.get("kind")


class _Rank(CommandProcess):
    """A rank that was started, and where it writes down why it ends."""

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        say: Say | None,
        number: int,
        error_file: Path,
    ) -> None:
        places = {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FILE: str(error_file)}
        super().__init__(arguments, {**variables, **places}, say)
        self.number = number
        self._error_file = error_file
        self._leaving_since: float | None = None

    def failure(self) -> Failure | None:
        """Return how it failed; None: it runs or has come to its end."""
        status = self.status()
        if not status:
            return None
        try:
            report = json.loads(self._error_file.read_text())
        except (FileNotFoundError, ValueError):  # none, or it was killed while it wrote
            report = {}
        return Failure(rank=self.number, exit_status=status, noticed_at=time.time(), report=report)

    def is_stuck(self) -> bool:
        """Return whether it has said why it ends, and does not."""
        if self.status() is not None or not self._error_file.exists():
            return False
        self._leaving_since = self._leaving_since or time.monotonic()
        return time.monotonic() - self._leaving_since > LEAVING_SECONDS


def meeting_folder() -> AbstractContextManager[Path]:
    """Make a temporary folder that only this user can open, and that no service tidies up."""
    return temporary_folder(MEETING)


def launch(
    arguments: Sequence[str],
    folder: Path,
    *,
    num_ranks: int,
    max_restarts: int,
    on_gpus: bool,
    purpose: Purpose = TRAINING,
    say: Say | None = None,
) -> None:
    """Run a ``unet3d`` command in several ranks on this machine, until all have ended.

    They have a folder for their files (:func:`meeting_folder`). If one dies or hangs, all are
    started again, ``max_restarts`` times; not if one was asked to stop, nor after an explained
    error, which would come again. With ``say``, it takes the lines that they write to stderr, from
    threads, and nothing is left of their results; else both go to the terminal.

    Raises Interrupted after the ranks have ended, or Unet3dError for the first one that failed.
    """
    if logging.getLogger("unet3d").isEnabledFor(logging.DEBUG):
        arguments = ["--debug", *arguments]
    from unet3d.distributed.rendezvous import store_for_ranks  # not above: it loads PyTorch

    with deferred_interruption(is_rank=is_one_of_several()) as request, store_for_ranks() as port:
        for restart_count in range(max_restarts + 1):
            variables = {
                **_variables(num_ranks, on_gpus),
                MEETING_FOLDER: str(folder),
                STORE_PORT: str(port),
                RESTART_COUNT: str(restart_count),
            }
            ranks: list[_Rank] = []
            try:
                for number in range(num_ranks):
                    error_file = folder / f"error-{restart_count}-{number}.json"
                    ranks.append(_Rank(arguments, variables, say, number, error_file))
                failures = _wait(ranks, request, purpose.stop_seconds)
            finally:  # whatever happens, none is left running
                end_all(ranks)
            if not failures:
                return
            reason = _reason(failures, purpose, request.signal_number)
            is_final = isinstance(reason, Interrupted) or any(
                one.kind == "explained" for one in failures
            )
            if is_final or request.signal_number is not None or restart_count == max_restarts:
                raise reason
            what = str(reason).partition(";")[0]
            number = restart_count + 1
            logger.warning("%s; all ranks are started again (%d of %d)", what, number, max_restarts)


def _wait(
    ranks: Sequence[_Rank], request: InterruptionRequest, stop_seconds: float
) -> list[Failure]:
    """Wait until all ranks have ended; if one fails, or somebody asks to stop, ask all of them.

    Ranks that only ended because another one failed are no failures.
    """
    while any(rank.status() is None for rank in ranks):
        if request.signal_number is not None:
            stop(ranks, request.signal_number, stop_seconds)
            break
        failures = _failures(ranks)
        if failures or any([rank.is_stuck() for rank in ranks]):
            stop(ranks, signal.SIGTERM, END_SECONDS)
            return failures or _failures(ranks)
        time.sleep(POLL_SECONDS)
    return _failures(ranks)


def _failures(ranks: Sequence[_Rank]) -> list[Failure]:
    return [failure for rank in ranks if (failure := rank.failure()) is not None]


def _reason(
    failures: Sequence[Failure], purpose: Purpose = TRAINING, stop_signal: int | None = None
) -> BaseException:
    """Return why the first rank failed; the errors of ranks that only lost it do not count.

    Where all were asked to stop, that is the reason, unless one of them could not save.
    """
    later: dict[Kind | None, int] = {"interrupted": 1, None: 2, "consequence": 3}

    def priority(failure: Failure) -> tuple[int, float]:
        noted_at = float(failure.report.get("time", failure.noticed_at))
        return later.get(failure.kind, 0), noted_at

    first = min(failures, key=priority)
    kind, status = first.kind, first.exit_status
    if stop_signal is not None and kind in later:
        return Interrupted(stop_signal)
    if kind == "interrupted":
        return Interrupted(first.report["signal"])
    if kind in ("explained", "hang", "consequence"):
        return Unet3dError(first.report["message"]["message"])
    if kind == "unexpected":
        reason = f"stopped with {first.report['message']['message']}; --debug shows where"
    elif status < 0:
        name = signal.Signals(-status).name
        reason = f"was killed by {name}; {purpose.after_loss}"
    elif status - 128 in SIGNALS:  # while its modules were loaded
        return Interrupted(status - 128)
    else:
        reason = f"ended with status {status} without a word"
    return RankError(f"rank {first.rank} {reason}")


def _variables(num_ranks: int, on_gpus: bool) -> dict[str, str]:
    """Return what all ranks find in their environment."""
    variables = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        LAUNCHED: str(os.getpid()),
        # What a user has set for several machines is not asked for here.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",  # without the sign: every interface that begins with lo
        "NCCL_RAS_ENABLE": "0",  # a service that answers everybody on the machine
    }
    if not on_gpus:
        own = os.environ.get("OMP_NUM_THREADS")  # what the user has set stands
        variables["OMP_NUM_THREADS"] = own or str(max(1, num_cores() // num_ranks))
    return variables
