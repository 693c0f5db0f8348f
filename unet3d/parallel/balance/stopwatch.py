"""Times taken on devices, and a file for each thing that was measured, so that it is measured once.

A file is named by a key of all that its content depends on: it is never stale, only not there.
"""

import logging
import platform
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from unet3d import __version__

logger = logging.getLogger(__name__)


NUM_WARM_UP_RUNS = 2
NUM_TIMED_RUNS = 5


def median_seconds(
    run: Callable[[], object],
    devices: Iterable[torch.device],
    num_warm_up_runs: int = NUM_WARM_UP_RUNS,
) -> float:
    """Return the median time of a few runs, each from idle devices to idle devices.

    Args:
        run: What is timed.
        devices: All that it uses.
        num_warm_up_runs: Runs before those that count.
    """
    devices = tuple(devices)
    seconds = []
    for _ in range(num_warm_up_runs + NUM_TIMED_RUNS):
        _wait_for(devices)
        began = time.perf_counter()
        run()
        _wait_for(devices)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[num_warm_up_runs:])


def recorded(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return what does the same without the time that Python takes to launch it.

    A stage that is busy launches ahead, so its blocks take what they take on the GPU.

    Args:
        run: Launches always the same; nothing is recorded for a CPU, where there is no launch.
        device: Of all its work.
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
    """Return what a device is, as far as times depend on it.

    Args:
        device: Of this machine.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} of {platform.node()}, {torch.get_num_threads()} threads"


def versions() -> list[str | None]:
    """Return the versions of the software that times depend on."""
    return [torch.__version__, torch.version.cuda, __version__]


def _wait_for(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
