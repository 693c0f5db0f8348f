"""Noticing that a GPU of this rank waits for ever for another rank.

Where main threads wait for one another, gloo's time limit names a rank that hangs. But messages of
GPUs are queued, and it is the GPU that waits for them: without any limit, if they are captured in a
CUDA graph. The main thread then stops in the next call that waits for the GPU, where no exception
and no signal reaches it. So a thread looks how far the GPU is::

    main thread   queue 6, 7 ── read a loss ................................ (for ever)
    GPU           6 ── 7, which waits for rank 1 ........................... (for ever)
    thread        5    6    6    6    6    6    6   rank 1 is named, the process ends

The thread makes no call of CUDA, which might wait for the main thread's: the GPU itself writes into
host memory how far it is. Only time in which the thread looks is counted, so ranks that were all
suspended and go on do not take one another for lost.

To end a process there is as safe as to kill it, which tests do at random moments. Files are written
beside their names and then renamed; of ``metrics.jsonl`` a line that was not finished is dropped by
whoever reads it, and its epoch runs again; what this process has started ends with it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from unet3d.distributed.rank_watch import RankWatch
from unet3d.distributed.ranks import end_process
from unet3d.errors import RankError

POLL_SECONDS = 1.0
"""How often the thread looks, at least; it takes a rank four looks to be lost."""

QUEUEING_SECONDS = 300.0
"""What the main thread may take longer to queue work than a GPU may take for it: the first time,
kernels are compiled. It stops there only if so much is queued that the driver takes no more."""


class Progress(Protocol):
    """How far a device is, as a number that grows."""

    def queue(self, number: int) -> None:
        """Have the device note a number when it has done all that is queued by now."""
        ...

    def reached(self) -> int:
        """Return the last number that it has noted, or 0, without asking the device."""
        ...


class GpuProgress:
    """The number lies in host memory, to which a GPU copies it."""

    def __init__(self, device: torch.device) -> None:
        """Allocate the number."""
        self._next = torch.zeros((), dtype=torch.int64, device=device)
        self._noted = torch.zeros((), dtype=torch.int64, pin_memory=True)

    def queue(self, number: int) -> None:
        """Queue the copy on the GPU's current stream; see :class:`Progress`."""
        self._next.fill_(number)
        self._noted.copy_(self._next, non_blocking=True)

    def reached(self) -> int:
        """Read host memory; see :class:`Progress`."""
        return int(self._noted)


PROGRESS: dict[str, Callable[[torch.device], Progress]] = {"cuda": GpuProgress}
"""What tells how far a device is, by its type; on others, gloo waits, which has its own limit."""


class _Device:
    """What the main thread queues on a device; all else is the watching thread's."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.num_queued = 0
        self.depth = 0
        """Contexts in which the main thread is queueing, one in another."""
        self._silent_seconds = 0.0
        self._seen = (0, False)

    def silence(self, seconds: float) -> float:
        """Return for how many seconds too little has happened; negative: there is more time."""
        reached = self.progress.reached()
        is_waited_for = reached < self.num_queued
        before, self._seen = self._seen, (reached, is_waited_for)
        is_idle = not is_waited_for and self.depth == 0
        if is_idle or self._seen != before:
            self._silent_seconds = 0.0
        else:
            self._silent_seconds += seconds
        return self._silent_seconds - (0.0 if is_waited_for else QUEUEING_SECONDS)


class DeviceWatch:
    """Ends this rank when one of its devices gets no further."""

    def __init__(self, ranks: RankWatch, end: Callable[[RankError], object] = end_process) -> None:
        """Watch nothing yet."""
        self._ranks = ranks
        self._end = end
        self._devices: dict[torch.device, _Device] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def queueing(self, *devices: torch.device) -> Iterator[None]:
        """Watch over devices from this context on, until they have done what is queued in it.

        Where work is waited for before all is queued, it needs a context of its own inside, which
        ends before the wait: else that counts as time to queue, of which there is more.

        Nothing may be captured where the context ends. An error in it leaves what was queued alone:
        whoever gets it knows what the devices wait for.
        """
        watched = [self._watched(device) for device in devices if device.type in PROGRESS]
        for one in watched:
            one.depth += 1
        try:
            yield
        finally:
            for one in watched:
                one.depth -= 1
        for one in watched:
            one.num_queued += 1
            one.progress.queue(one.num_queued)

    def close(self) -> None:
        """End the watch: all that was queued will be done."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watched(self, device: torch.device) -> _Device:
        if device not in self._devices:
            self._devices[device] = _Device(PROGRESS[device.type](device))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self._devices[device]

    def _watch(self) -> None:
        """Look until the end of the watch, or of the process."""
        limit = self._ranks.timeout.total_seconds()
        poll_seconds = min(POLL_SECONDS, limit / 4)
        while not self._closed.wait(poll_seconds):
            silence = max(one.silence(poll_seconds) for one in list(self._devices.values()))
            # All ranks that miss one must say so at the same time, or they name one another; some
            # notice it on their CPUs, or later.
            if silence >= limit or (silence >= limit / 4 and self._ranks.is_missed()):
                error = self._ranks.lost(hangs=True)
                if not self._closed.is_set():
                    self._end(error)
                return
