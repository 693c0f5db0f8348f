"""The number of processes that prepare data for a network's devices, and how long devices wait.

If a part of the network runs on a CPU, another busy process slows it by more than the processor
time that the process takes, because each operation waits for its slowest thread. So no core is
assigned twice.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unet3d.config import Config
from unet3d.distributed.ranks import num_cores
from unet3d.patches.patches import Batch

MAX_PROCESSES = 16
"""The most processes that prepare cases, or make patches, for GPUs."""
MAX_CUTTING = 8
"""The most processes that only cut patches, if a GPU augments them. For an H200 two sufficed at
128^3, four at 256^3; with 16, which start later, a training run was no faster."""
MAX_ON_CPU = 4
"""The most processes beside a network on a CPU."""
CORES_OF_A_LOADER = 32
"""Cores for each process that cuts patches for a network on a CPU. With fewer cores the training
process cuts them itself, because a step takes much longer than cutting. With 16 cores, patches of
96^3 and 32 to 256 channels, an epoch takes 5.2 s without such a process, 5.2 s with one and 6.3 s
with four, which take 14 s to start."""


TOLERATED_SHARE = 0.1
"""Share of an epoch's time that a device may wait for data without a message."""


def is_on_cpu(devices: Sequence[torch.device]) -> bool:
    """Return whether a part of the network is on a CPU."""
    return any(device.type == "cpu" for device in devices)


def preparing_processes(config: Config, devices: Sequence[torch.device], num_ranks: int) -> int:
    """Return how many processes prepare cases, before there is a network; 0: this process."""
    if config.data.num_workers != "auto":
        return config.data.num_workers
    cores = num_cores() // num_ranks
    if is_on_cpu(devices):
        return max(0, min(MAX_ON_CPU, (cores - 1) // 2))
    return max(0, min(MAX_PROCESSES, cores - 1))


def loading_processes(config: Config, devices: Sequence[torch.device], num_ranks: int) -> int:
    """Return how many processes cut patches while the network trains; 0: this process."""
    if config.data.num_workers != "auto":
        return config.data.num_workers
    if not is_on_cpu(devices):
        most = preparing_processes(config, devices, num_ranks)
        return min(most, MAX_CUTTING)
    cores = num_cores() // num_ranks
    wanted = min(MAX_ON_CPU, cores // CORES_OF_A_LOADER)
    # A number of threads set by the user is kept; the remaining cores are for processes.
    return min(wanted, max(0, cores - torch.get_num_threads())) if _are_threads_set() else wanted


def leave_cores(num_processes: int, devices: Sequence[torch.device], num_ranks: int) -> None:
    """Limit the threads of a network on a CPU to the cores that other processes leave free."""
    if is_on_cpu(devices) and not _are_threads_set():
        left = max(1, num_cores() // num_ranks - num_processes)
        torch.set_num_threads(min(torch.get_num_threads(), left))


def _are_threads_set() -> bool:
    """Return whether the user, or the launcher of ranks, has set the number of threads."""
    return "OMP_NUM_THREADS" in os.environ


class DataClock:
    """Measures how long one device waits for its batches.

    The host is ahead of a GPU, so a batch that the host waits for may arrive while the GPU still
    runs the previous step. So events are recorded on the GPU's stream: the first is complete when
    the previous step is done, the second when the batch is there and the host goes on. Only
    :meth:`read` waits for them. A CPU runs operations synchronously, so the host's clock suffices.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with no time; the current stream of the device computes the steps."""
        self._device = device
        self._host_seconds = 0.0
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, and time the wait for each, without the work on it."""
        iterator = iter(batches)
        while True:
            idle, began = self._event(), time.monotonic()
            batch = next(iterator, None)
            if batch is None:
                return
            elapsed = time.monotonic() - began
            ready = self._event()
            if idle is None or ready is None:
                self._host_seconds += elapsed
            else:
                self._gaps.append((idle, ready))
            yield batch

    def read(self) -> float:
        """Return the seconds since the last call; this waits until the GPU has its last batch."""
        seconds, self._host_seconds = self._host_seconds, 0.0
        if self._gaps:
            self._gaps[-1][1].synchronize()
            seconds += sum(idle.elapsed_time(ready) for idle, ready in self._gaps) / 1000
            self._gaps.clear()
        return seconds

    def _event(self) -> torch.cuda.Event | None:
        """Return an event that has been recorded on the GPU; None where the device is a CPU."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def waiting_note(
    metrics: Mapping[str, Any], loading_seconds: float, device: torch.device, is_augmented: bool
) -> str | None:
    """Return a note on the wait for data in an epoch, with advice; None: no long wait.

    ``loading_seconds`` is how long this process waited for patches.
    """
    waited, seconds = metrics["waited_seconds"], metrics["seconds"]
    if waited <= TOLERATED_SHARE * seconds:
        return None
    percent = f"{100 * waited / seconds:.0f} %"
    if loading_seconds <= TOLERATED_SHARE * seconds and device.type != "cpu":
        # A GPU also waits if it runs steps faster than this process queues them.
        return f"waited {percent} for the host, which queues such short steps too slowly"
    less = " or less patches.augmentation" if is_augmented else ""
    return f"waited {percent} for data: try more data.num_workers{less}"
