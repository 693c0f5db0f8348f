"""How long a device has nothing to do because its next batch is not there, and what helps."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unet3d.distributed.ranks import num_cores
from unet3d.patches.patches import Batch
from unet3d.training.cores import is_on_cpu

TOLERATED_SHARE = 0.1
"""Share of an epoch's steps that a device may wait without a word about it."""


class DataClock:
    """Measures how long one device waits for its batches.

    Where the device is a GPU, the host is ahead of it, and a batch that the host waits for may come
    while the step before still runs. So events are recorded on the GPU's stream: the first is
    complete when the step before is done, the second when the batch is there and the host goes on.
    Nothing waits for them before :meth:`read`. A CPU computes a step while the host launches it,
    so there the host's own clock is right.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with no time; the current stream of the device computes the steps."""
        self._device = device
        self._host_seconds = 0.0
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, and time how long each is waited for, without what is done with it."""
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
    metrics: Mapping[str, Any],
    loading_seconds: float,
    devices: Sequence[torch.device],
    num_workers: int,
    num_ranks: int,
) -> str | None:
    """Return what to say of an epoch that waited for its data, and what helps; None: nothing.

    ``loading_seconds`` is how long this process waited for patches to be cut, by ``num_workers``
    processes of each of ``num_ranks`` on this machine. The devices are the network's.
    """
    waited, seconds, on_cpu = metrics["waited_seconds"], metrics["seconds"], is_on_cpu(devices)
    if waited <= TOLERATED_SHARE * seconds:
        return None
    percent = f"{100 * waited / seconds:.0f} %"
    if loading_seconds <= TOLERATED_SHARE * seconds and not on_cpu:
        # A GPU also waits while this process queues the work of steps that are shorter.
        return f"waited {percent} for the host, which queues such short steps too slowly"
    helps = "more cores, or data.cache on a faster disk"
    # A network on a CPU computes with every core that it can get.
    used = torch.get_num_threads() if on_cpu else 1
    if used + num_workers < num_cores() // num_ranks:
        helps = f"more data.num_workers (now {num_workers})"
    elif on_cpu:
        helps = "more cores, or less of patches.augmentation"
    return f"waited {percent} for data: try {helps}"
