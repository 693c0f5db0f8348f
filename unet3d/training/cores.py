"""How a training divides its work between the network's devices and the processes beside it.

Where a part of the network is on a CPU, another busy process costs it more than that process's
time: each operation waits for the slowest of its threads. So no core is given twice.
"""

import os
from collections.abc import Sequence

import torch

from unet3d.config import Config
from unet3d.distributed.ranks import num_cores

MAX_PROCESSES = 16
"""The most processes that prepare cases, or make patches, for GPUs."""
MAX_CUTTING = 8
"""The most processes where patches are only cut, and augmented on a GPU. For an H200 two were
enough at 128^3, four at 256^3; with 16, which start later, a training was no faster."""
MAX_ON_CPU = 4
"""The most processes beside a network on a CPU."""
CORES_OF_A_LOADER = 32
"""On a CPU a step takes so much longer than cutting its patches that below as many cores the
training process cuts them itself. With 16, patches of 96^3 and 32 to 256 channels, an epoch takes
5.2 s so, 5.2 with one process beside it and 6.3 with four, which also take 14 s to start."""


def is_on_cpu(devices: Sequence[torch.device]) -> bool:
    """Return whether a part of the network is on a CPU."""
    return any(device.type == "cpu" for device in devices)


def preparing_processes(config: Config, devices: Sequence[torch.device], num_ranks: int) -> int:
    """Return how many processes prepare cases, before the network is there; 0: this one."""
    if config.data.num_workers != "auto":
        return config.data.num_workers
    cores = num_cores() // num_ranks
    if is_on_cpu(devices):
        return max(0, min(MAX_ON_CPU, (cores - 1) // 2))
    return max(0, min(MAX_PROCESSES, cores - 1))


def loading_processes(config: Config, devices: Sequence[torch.device], num_ranks: int) -> int:
    """Return how many processes cut patches while the network trains; 0: this one."""
    if config.data.num_workers != "auto":
        return config.data.num_workers
    if not is_on_cpu(devices):
        most = preparing_processes(config, devices, num_ranks)
        return min(most, MAX_CUTTING)
    cores = num_cores() // num_ranks
    wanted = min(MAX_ON_CPU, cores // CORES_OF_A_LOADER)
    # Threads that the user asked for leave what they leave.
    return min(wanted, max(0, cores - torch.get_num_threads())) if _are_threads_set() else wanted


def leave_cores(num_processes: int, devices: Sequence[torch.device], num_ranks: int) -> None:
    """Have a network on a CPU compute with the cores that the processes beside it leave."""
    if is_on_cpu(devices) and not _are_threads_set():
        left = max(1, num_cores() // num_ranks - num_processes)
        torch.set_num_threads(min(torch.get_num_threads(), left))


def _are_threads_set() -> bool:
    """Return whether the user, or the launcher of ranks, has set the number of threads."""
    return "OMP_NUM_THREADS" in os.environ
