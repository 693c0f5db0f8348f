"""Starting the ranks of one machine with PyTorch's elastic launcher, and reporting their end."""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import unet3d
from unet3d.distributed.interruption import Interrupted
from unet3d.distributed.ranks import LAUNCHED, num_cores
from unet3d.errors import RankError, Unet3dError

POLL_SECONDS = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(arguments: Sequence[str], num_ranks: int, max_restarts: int, on_gpus: bool) -> None:
    """Run a ``unet3d`` command in several ranks on this machine, until all have ended.

    Args:
        arguments: Arguments of ``unet3d``, the same for every rank.
        num_ranks: Number of processes.
        max_restarts: How often all ranks are started again when one dies.
        on_gpus: Whether they compute on GPUs; on CPUs they share the cores.

    Raises:
        Interrupted: Ctrl-C or SIGTERM, after the ranks have ended.
        Unet3dError: A rank failed; the reason of the first one that did.
    """
    debug = logging.getLogger("unet3d").isEnabledFor(logging.DEBUG)
    with (
        tempfile.TemporaryDirectory(prefix="unet3d-ranks-") as logs,
        _environment(_variables(num_ranks, on_gpus)),
        _signals_restored(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            monitor_interval=POLL_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        if not debug:
            _silence_elastic()
        try:
            elastic_launch(config, sys.executable)("-m", "unet3d", *arguments)
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from error
        except ChildFailedError as error:
            raise _reason(error.failures) from error


def _reason(failures: Mapping[int, ProcessFailure]) -> Exception:
    """Return why the first rank failed; the errors of ranks that only lost it do not count."""
    order = {"explained": 0, "interrupted": 0, "unexpected": 0, None: 1, "consequence": 2}

    def priority(rank: int) -> tuple[int, float]:
        content = failures[rank].error_file_data
        return order[content.get("kind")], float(content.get("time", failures[rank].timestamp))

    rank = min(failures, key=priority)
    failure = failures[rank]
    content: dict[str, Any] = failure.error_file_data
    kind = content.get("kind")
    if kind == "interrupted":
        return Interrupted(content["signal"])
    if kind in ("explained", "consequence"):
        return Unet3dError(content["message"]["message"])
    if kind == "unexpected":
        reason = f"stopped with {content['message']['message']}; --debug shows where"
    elif failure.exitcode < 0:
        reason = f"was killed by {failure.signal_name()}; --resume continues the run"
    else:
        reason = f"ended with status {failure.exitcode} without a word"
    return RankError(f"rank {rank} {reason}")


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


def _variables(num_ranks: int, on_gpus: bool) -> dict[str, str]:
    """Return what the ranks find in their environment."""
    variables = import_variables() | {LAUNCHED: str(os.getpid())}
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may not resolve to itself
        # Seconds for ranks that are asked to stop, in which they end their step and save. PyTorch
        # before 2.13 does not read it and waits 30.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
    }
    if not on_gpus:
        defaults["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_ranks))
    # What the user has set stands.
    return variables | {key: os.environ.get(key, value) for key, value in defaults.items()}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore the signal handlers that the launcher replaces for the rest of the process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence_elastic() -> None:
    """Keep torch elastic's messages on each failure and signal off the terminal."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
