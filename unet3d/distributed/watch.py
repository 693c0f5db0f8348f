"""The progress of each rank, and which rank is lost when others, or their GPUs, wait in vain.

Every rank leaves notes in a store that can be read without waiting, even when all other connections
are broken. A rank that misses another rank writes that there, too: the lost rank is the one that
misses no other rank.

When main threads wait for one another, gloo's time limit shows that a rank hangs. But messages of
GPUs are queued, and the GPU waits for them: without any limit, if they are captured in a CUDA
graph. The main thread then blocks in the next call that waits for the GPU, where no exception and
no signal reaches it. So a thread watches the progress of the GPU::

    main thread   queue 6, 7 ── read a loss ................................ (for ever)
    GPU           6 ── 7, which waits for rank 1 ........................... (for ever)
    thread        5    6    6    6    6    6    6   rank 1 is named, the process ends

The main thread may also block while it queues: a driver that allocates memory or loads a kernel
waits for messages in flight. But queueing may take long anyway, because kernels are compiled the
first time. So each watching thread also leaves signs of life, and a rank that gives none is lost.

The watching thread calls nothing of CUDA, which might wait for a call of the main thread: the GPU
itself writes its progress to host memory. Only time in which the thread runs is counted, so ranks
that were all suspended do not take one another for lost. The thread may end the process at any
moment, as safely as a kill: files are renamed when they are whole, and child processes end, too.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from unet3d.distributed.ranks import TRAINING, Purpose, Ranks, end_process
from unet3d.errors import LostRankError, RankError
from unet3d.torch_private import Store

JOIN_SECONDS = 600

GRACE_SECONDS = 2.0
"""How long a rank that misses another rank waits for the others to report that they miss it,
too."""

POLL_SECONDS = 1.0
"""Longest interval between two checks by the thread; a quarter of the time-out if that is
shorter."""

QUEUEING_SECONDS = 300.0
"""Additional time-out while the main thread queues work and the GPU has none: kernels are compiled
the first time."""


class GpuProgress:
    """The progress of a GPU, as a number that the GPU copies to host memory."""

    def __init__(self, device: torch.device) -> None:
        self._next = torch.zeros((), dtype=torch.int64, device=device)
        self._noted = torch.zeros((), dtype=torch.int64, pin_memory=True)

    def queue(self, number: int) -> None:
        """Have the GPU note a number once it has done all work now in its current stream."""
        self._next.fill_(number)
        self._noted.copy_(self._next, non_blocking=True)

    def reached(self) -> int:
        """Return the last number that the GPU has noted, or 0, without a call to the GPU."""
        return int(self._noted)


PROGRESS: dict[str, Callable[[torch.device], GpuProgress]] = {"cuda": GpuProgress}
"""Class for the progress of a device, by device type. For other types gloo waits, and times out."""


class _Device:
    """What the main thread queues on a device, and what the watching thread sees of it."""

    def __init__(self, progress: GpuProgress) -> None:
        self.progress = progress
        self.num_queued = 0
        self.depth = 0
        """Number of nested contexts in which the main thread is queueing."""
        self.silent_seconds = 0.0
        """Seconds without progress while progress was due."""
        self._seen = (0, False)

    def silence(self, seconds: float) -> float:
        """Add ``seconds`` to the silence, and return it, less the extra time for queueing."""
        reached = self.progress.reached()
        is_waited_for = reached < self.num_queued
        before, self._seen = self._seen, (reached, is_waited_for)
        is_idle = not is_waited_for and self.depth == 0
        self.silent_seconds += seconds
        if is_idle or self._seen != before:
            self.silent_seconds = 0.0
        return self.silent_seconds - (0.0 if is_waited_for else QUEUEING_SECONDS)


class Watch:
    """Keeps the notes of all ranks, names the lost rank, and ends this process if necessary."""

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        purpose: Purpose = TRAINING,
        end: Callable[[RankError], object] = end_process,
    ) -> None:
        """Start without any notes, and without a device to watch."""
        self.store = store
        self.timeout = timedelta(seconds=JOIN_SECONDS)
        self._ranks = ranks
        self._others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        self._purpose = purpose
        self._has_missed = False
        self._end = end
        self._devices: dict[torch.device, _Device] = {}
        self._signs: dict[int, tuple[bytes | None, float]] = {}
        """The last sign of life of each other rank, and the seconds since it came."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, step: int, text: str) -> None:
        """Write down how far this rank is."""
        if self._has_missed:  # but could go on, as ranks may after an out-of-memory error
            self.store.delete_key(f"missing/{self._ranks.rank}")
            self._has_missed = False
        self.store.set(f"note/{self._ranks.rank}", json.dumps([step, text]))

    def notes(self) -> list[tuple[int, str]]:
        """Return the last note of each rank: steps since the beginning, and words."""
        written = [self._get(f"note/{rank}") for rank in range(self._ranks.world_size)]
        return [(-1, "the start") if one is None else tuple(json.loads(one)) for one in written]

    @contextmanager
    def translate_dist_errors(self) -> Iterator[None]:
        """Turn an error of a process group into one that names the lost rank and its last step."""
        try:
            yield
        except RuntimeError as error:  # gloo has no class of its own
            text = str(error).lower()
            hangs = "timed out" in text
            if not (isinstance(error, dist.DistError) or "gloo" in text or hangs):
                raise
            self._has_missed = True
            raise self.lost(hangs) from error

    def is_missed(self) -> bool:
        """Return whether another rank currently reports that it misses a rank."""
        return any(self._get(f"missing/{rank}") is not None for rank in self._others)

    def lost(self, hangs: bool) -> RankError:
        """Return the error that names the missing rank: the rank that reports no missing rank.

        Takes ``GRACE_SECONDS``; any thread may call it.
        """
        try:
            self.store.set(f"missing/{self._ranks.rank}", "")
            time.sleep(GRACE_SECONDS)
            silent = [one for one in self._others if not self.store.check([f"missing/{one}"])]
        except RuntimeError:  # the store is gone too
            return LostRankError("the other ranks are gone")
        return self.error(silent or self._others, hangs)

    def error(self, suspects: Sequence[int], hangs: bool) -> RankError:
        """Return the error that names the suspects with the least progress."""
        notes = self.notes()
        last = min(notes[rank][0] for rank in suspects)
        names = ", ".join(
            f"rank {rank} (in {notes[rank][1]})" for rank in suspects if notes[rank][0] == last
        )
        if not hangs:
            return LostRankError(f"{names} is gone; {self._purpose.after_loss}")
        return RankError(
            f"{names} hangs: no sign of life for {self.timeout.total_seconds():g} s; "
            f"{self._purpose.after_silence}"
        )

    @contextmanager
    def queueing(self, *devices: torch.device) -> Iterator[None]:
        """Watch over devices from this context on, until they have done what is queued in it.

        If the caller waits for some of the work before it has queued the rest, that part needs an
        inner context that ends before the wait. Otherwise the wait counts as queueing, which has a
        longer time-out.

        No graph may be under capture when the context ends. After an error in the context, its work
        is not watched: the error itself tells what the devices wait for.
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
        """End the watch; call it when all queued work is certain to end."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            with suppress(RuntimeError):  # the store is gone
                self.store.delete_key(f"alive/{self._ranks.rank}")

    def _watched(self, device: torch.device) -> _Device:
        if device not in self._devices:
            self._devices[device] = _Device(PROGRESS[device.type](device))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self._devices[device]

    def _look(self) -> None:
        """Look at the devices until the end of the watch, or of the process."""
        limit = self.timeout.total_seconds()
        poll_seconds = min(POLL_SECONDS, limit / 4)
        for number in itertools.count():
            if self._closed.wait(poll_seconds):
                return
            self._give_sign(number)
            devices = list(self._devices.values())
            silence = max(one.silence(poll_seconds) for one in devices)
            is_quiet = max(one.silent_seconds for one in devices) >= limit / 4
            is_still = is_quiet and self._is_still(poll_seconds, limit)
            # All ranks that miss a rank must report it at the same time, or they name one another.
            # Some notice it on their CPUs, or later, so this rank joins as soon as another one
            # reports.
            if is_still or silence >= limit or (silence >= limit / 4 and self.is_missed()):
                error = self.lost(hangs=True)
                if not self._closed.is_set():
                    self._end(error)
                return

    def _give_sign(self, number: int) -> None:
        """Write a sign of life; if the store is gone, the calls that read it will report that."""
        with suppress(RuntimeError):
            self.store.set(f"alive/{self._ranks.rank}", str(number))

    def _is_still(self, seconds: float, limit: float) -> bool:
        """Return whether another rank has given no sign of life for as long as the limit."""
        for rank in self._others:
            sign = self._get(f"alive/{rank}")
            last, since = self._signs.get(rank, (None, 0.0))
            self._signs[rank] = sign, since + seconds if sign is not None and sign == last else 0.0
        return any(since >= limit for _, since in self._signs.values())

    def _get(self, key: str) -> bytes | None:
        """Return what a rank has written; None: nothing, or the store is gone."""
        with suppress(RuntimeError):
            return self.store.get(key) if self.store.check([key]) else None
        return None
