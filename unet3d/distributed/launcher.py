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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.atomic import temporary_folder
from unet3d.distributed.command_process import POLL_SECONDS, CommandProcess, Say, end_all, stop
from unet3d.distributed.launched import (
    LAUNCHED,
    MEETING_FOLDER,
    STORE_PORT,
    is_one_of_several,
)
from unet3d.distributed.purpose import TRAINING, Purpose
from unet3d.distributed.ranks import ERROR_FILE, RESTART_COUNT, Kind, num_cores
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


@dataclass(frozen=True, kw_only=True)
class _Rank:
    number: int
    process: CommandProcess
    error_file: Path

    def failure(self) -> Failure | None:
        """Return how it failed; None: it runs or has come to its end."""
        status = self.process.status()
        if not status:
            return None
        try:
            report = json.loads(self.error_file.read_text())
        except (FileNotFoundError, ValueError):  # none, or it was killed while it wrote
            report = {}
        return Failure(rank=self.number, exit_status=status, noticed_at=time.time(), report=report)


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
            with _started(arguments, num_ranks, variables, folder, say) as ranks:
                failures = _wait(ranks, request, purpose.stop_seconds)
            if not failures:
                return
            if request.signal_number is not None:
                raise _reason_of_stop(failures, request.signal_number, purpose)
            reason = _reason(failures, purpose)
            is_final = isinstance(reason, Interrupted) or any(
                one.kind == "explained" for one in failures
            )
            if is_final or restart_count == max_restarts:
                raise reason
            what = str(reason).partition(";")[0]
            number = f"{restart_count + 1} of {max_restarts}"
            logger.warning("%s; all ranks are started again (%s)", what, number)


@contextmanager
def _started(
    arguments: Sequence[str],
    num_ranks: int,
    variables: dict[str, str],
    folder: Path,
    say: Say | None,
) -> Iterator[list[_Rank]]:
    """Start the ranks, and leave none of them running."""
    ranks: list[_Rank] = []
    try:
        for number in range(num_ranks):
            error_file = folder / f"error-{variables[RESTART_COUNT]}-{number}.json"
            places = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                ERROR_FILE: str(error_file),
            }
            process = CommandProcess(arguments, {**variables, **places}, say)
            ranks.append(_Rank(number=number, process=process, error_file=error_file))
        yield ranks
    finally:
        end_all([rank.process for rank in ranks])


def _wait(
    ranks: Sequence[_Rank], request: InterruptionRequest, stop_seconds: float
) -> list[Failure]:
    """Wait until all ranks have ended; if one fails, or somebody asks to stop, ask all of them.

    Ranks that only ended because they were asked to are no failures.
    """
    processes, leaving_since = [rank.process for rank in ranks], dict[int, float]()
    while any(rank.process.status() is None for rank in ranks):
        if request.signal_number is not None:
            stop(processes, request.signal_number, stop_seconds)
            return _failures(ranks)
        failures = _failures(ranks)
        if failures:
            stop(processes, signal.SIGTERM, END_SECONDS)
            return failures
        if _is_stuck(ranks, leaving_since):
            stop(processes, signal.SIGTERM, END_SECONDS)
            return _failures(ranks)
        time.sleep(POLL_SECONDS)
    return _failures(ranks)


def _is_stuck(ranks: Sequence[_Rank], leaving_since: dict[int, float]) -> bool:
    """Return whether a rank has said why it ends, and does not."""
    now = time.monotonic()
    leaving = [rank for rank in ranks if rank.process.status() is None and rank.error_file.exists()]
    return any(
        now - leaving_since.setdefault(rank.number, now) > LEAVING_SECONDS for rank in leaving
    )


def _failures(ranks: Sequence[_Rank]) -> list[Failure]:
    return [failure for rank in ranks if (failure := rank.failure()) is not None]


def _reason_of_stop(
    failures: Sequence[Failure], signal_number: int, purpose: Purpose = TRAINING
) -> BaseException:
    """Return that the ranks were asked to stop, or why one of them could not save."""
    for failure in failures:
        if failure.kind in ("explained", "unexpected", "hang"):
            return _reason([failure], purpose)
    return Interrupted(signal_number)


def _reason(failures: Sequence[Failure], purpose: Purpose = TRAINING) -> BaseException:
    """Return why the first rank failed; the errors of ranks that only lost it do not count."""
    later: dict[Kind | None, int] = {None: 1, "consequence": 2}

    def priority(failure: Failure) -> tuple[int, float]:
        noted_at = float(failure.report.get("time", failure.noticed_at))
        return later.get(failure.kind, 0), noted_at

    first = min(failures, key=priority)
    kind, status = first.kind, first.exit_status
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
    """Return what the ranks find in their environment, besides their places."""
    variables = {
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
