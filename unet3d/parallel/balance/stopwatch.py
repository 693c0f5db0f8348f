"""Times taken on devices, and a file for each thing that was measured, so that it is measured once.

A file is named by a key of all that its content depends on: it may be absent, but never stale.
"""

import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from unet3d import __version__

logger = logging.getLogger(__name__)


NUM_WARM_UP_RUNS = 2
NUM_TIMED_RUNS = 5
NUM_LONG_RUNS = 3
"""Timed runs where they take :data:`LONG_SECONDS` together: long runs vary little."""
LONG_SECONDS = 3.0


def median_seconds(
    run: Callable[[], object],
    devices: Iterable[torch.device],
    num_warm_up_runs: int = NUM_WARM_UP_RUNS,
    hopeless_seconds: float = math.inf,
) -> float:
    """Return the median time of a few runs, each from idle devices to idle devices.

    Args:
        run: The function that is timed.
        devices: All devices that it uses.
        num_warm_up_runs: Runs before those that count.
        hopeless_seconds: A time that is not worth a third run.
    """
    devices = tuple(devices)
    for _ in range(num_warm_up_runs):
        run()
    seconds: list[float] = []
    while len(seconds) < NUM_TIMED_RUNS:
        wait_for(devices)
        began = time.perf_counter()
        run()
        wait_for(devices)
        seconds.append(time.perf_counter() - began)
        is_long = len(seconds) >= NUM_LONG_RUNS and sum(seconds) >= LONG_SECONDS
        if is_long or (len(seconds) > 1 and min(seconds) >= hopeless_seconds):
            break
    return statistics.median(seconds)


def recorded(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that does the same without the time that Python takes to launch it.

    A busy stage launches ahead, so its blocks take only their time on the GPU.

    Args:
        run: Always launches the same work. Nothing is captured for a CPU, which has no launches.
        device: The device of all its work.
    """
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        for _ in range(NUM_WARM_UP_RUNS):
            run()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=stream):
            run()
    replay: Callable[[], object] = graph.replay
    return replay


def hardware(device: torch.device) -> str:
    """Return a description of a device, as far as times depend on it.

    Args:
        device: A device of this machine.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} of {platform.node()}, {torch.get_num_threads()} threads"


def versions() -> list[str | None]:
    """Return the versions of the software that times depend on."""
    return [torch.__version__, torch.version.cuda, __version__]


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until devices have done all that was launched.

    Args:
        devices: GPUs; others have nothing to wait for.
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
