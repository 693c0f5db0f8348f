"""Starts the ranks of one machine, restarts them if one dies, and reports their end.

PyTorch's elastic launcher does this, too, but listens on all interfaces and unpickles what it
receives. Here the store of the ranks and the sockets of gloo and NCCL are bound to the loopback
interface.
"""

import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from unet3d import errors
from unet3d.atomic import temporary_folder
from unet3d.distributed import PARENT, STORE_PORT, is_started
from unet3d.distributed.commands import POLL_SECONDS, CommandProcess, Say, end_all, stop
from unet3d.distributed.ranks import ERROR_FILE, RESTART_COUNT, TRAINING, Purpose, num_cores
from unet3d.errors import RankError, Unet3dError
from unet3d.interruption import SIGNALS, Interrupted, InterruptionRequest, deferred_interruption

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""Time for the remaining ranks to report why they end, after one has failed."""

MEETING = "unet3d-ranks"
"""Prefix of the names of temporary folders for the files of ranks."""


class Failure(NamedTuple):
    """How a rank failed."""

    rank: int
    exit_status: int | None
    """Exit status; negative: the signal that killed the rank; None: it still runs, but has reported
    why it ends."""
    report: dict[str, Any]
    """Its own report, if any; see :func:`unet3d.distributed.ranks.report_end`."""


def meeting_folder() -> AbstractContextManager[Path]:
    """Make a private temporary folder that no clean-up service deletes."""
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

    ``folder`` is for their files (:func:`meeting_folder`). If one dies or hangs, all are restarted,
    up to ``max_restarts`` times, but not after a requested stop or an explained error, which would
    repeat. ``say`` gets the lines of stderr, from threads, and stdout is discarded; without ``say``
    both go to the terminal.

    Raises Interrupted after the ranks have ended, or the error of the first one that failed.
    """
    if logging.getLogger("unet3d").isEnabledFor(logging.DEBUG):
        arguments = ["--debug", *arguments]
    from unet3d.distributed.rendezvous import store_for_ranks  # not above: it loads PyTorch

    with deferred_interruption(is_rank=is_started()) as request, store_for_ranks() as port:
        for restart_count in range(max_restarts + 1):
            variables = {
                **variables_of_ranks(num_ranks, on_gpus),
                STORE_PORT: str(port),
                RESTART_COUNT: str(restart_count),
            }
            ranks: dict[Path, CommandProcess] = {}
            try:
                for number in range(num_ranks):
                    path = folder / f"error-{restart_count}-{number}.json"
                    places = {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FILE: str(path)}
                    ranks[path] = CommandProcess(arguments, {**variables, **places}, say)
                failures = _wait(ranks, request, purpose.stop_seconds)
            finally:  # even after an error, no rank is left running
                end_all(ranks.values())
            if not failures:
                return
            reason = _reason(failures, purpose, request.signal_number)
            would_fail_again = any(
                one.report.get("kind") in ("explained", "device") for one in failures
            )
            is_last = would_fail_again or restart_count == max_restarts
            if is_last or request.signal_number is not None or isinstance(reason, Interrupted):
                raise reason
            what = str(reason).partition(";")[0]
            number = restart_count + 1
            logger.warning("%s; restarting all ranks (%d of %d)", what, number, max_restarts)


def _wait(
    ranks: Mapping[Path, CommandProcess], request: InterruptionRequest, stop_seconds: float
) -> list[Failure]:
    """Wait until all ranks have ended, and stop them all if one fails or a stop is requested.

    The keys of ``ranks`` are the files in which they report why they end. The result lacks ranks
    that were only stopped here because another one had failed.
    """
    while any(process.status() is None for process in ranks.values()):
        if request.signal_number is not None:
            stop(ranks.values(), request.signal_number, stop_seconds)
        elif failures := _failures(ranks):
            stop(ranks.values(), signal.SIGTERM, END_SECONDS)
            return failures
        time.sleep(POLL_SECONDS)
    return _failures(ranks)


def _failures(ranks: Mapping[Path, CommandProcess]) -> list[Failure]:
    """Return how ranks failed; a rank that has reported a reason may still be running.

    The GPU of such a rank may wait for a hanging rank, which only the launcher can end.
    """
    failures = []
    for rank, (path, process) in enumerate(ranks.items()):
        status, report = process.status(), {}
        with suppress(FileNotFoundError, ValueError):  # no report, or only a part of it yet
            report = json.loads(path.read_text())
        if status or report:
            failures.append(Failure(rank, status, report))
    return failures


def _reason(
    failures: Sequence[Failure], purpose: Purpose = TRAINING, stop_signal: int | None = None
) -> BaseException:
    """Return the error of the rank that failed first; ranks that only lost it count last.

    After a requested stop the reason is the stop, unless a rank failed otherwise, as when saving.
    """
    later: dict[str | None, int] = {"interrupted": 1, None: 2, "consequence": 3}

    def priority(failure: Failure) -> tuple[int, float]:
        return later.get(failure.report.get("kind"), 0), failure.report.get("time", 0.0)

    first = min(failures, key=priority)
    kind, status = first.report.get("kind"), first.exit_status or 0
    if stop_signal is not None and kind in later:
        return Interrupted(stop_signal)
    if kind == "interrupted":
        return Interrupted(first.report["signal"])
    if kind == "explained":
        known = next(name for name in first.report["types"] if hasattr(errors, name))
        error: Unet3dError = getattr(errors, known)(first.report["message"]["message"])
        return error
    if kind in ("device", "hang", "consequence"):  # while all ranks were at work
        return RankError(first.report["message"]["message"])
    if kind == "unexpected":
        reason = f"stopped with {first.report['message']['message']}; --debug shows where"
    elif status < 0:
        reason = f"was killed by {signal.Signals(-status).name}; {purpose.after_loss}"
    elif status - 128 in SIGNALS:  # while it loaded modules, before it could report
        return Interrupted(status - 128)
    else:
        reason = f"exited with status {status} and no message"
    return RankError(f"rank {first.rank} {reason}")


def variables_of_ranks(num_ranks: int, on_gpus: bool) -> dict[str, str]:
    """Return the environment variables of all ranks."""
    variables = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        PARENT: str(os.getpid()),
        # Interfaces that a user has set for runs on several machines do not apply here.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",  # without =: all interfaces whose names begin with lo
        "NCCL_RAS_ENABLE": "0",  # a service that answers any user of the machine
    }
    if not on_gpus:
        own = os.environ.get("OMP_NUM_THREADS")  # the user's setting is kept
        variables["OMP_NUM_THREADS"] = own or str(max(1, num_cores() // num_ranks))
    return variables
