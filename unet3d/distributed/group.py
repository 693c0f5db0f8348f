"""The ranks of one training run or prediction, and their messages other than gradients.

There are two channels. A *store* holds small values and outlives the ranks; it is polled at short
intervals, so it never times out. Each collective operation has a key there, numbered in order. A
*gloo* group carries the bytes of files, and a message for every step. The message is read one step
after it was sent, so no rank waits for another, and a lost rank is noticed within a step::

    step        1          2          3
    send        flags 1    flags 2    flags 3
    read                   flags 1    flags 2

Gradients go through groups of their own; see :mod:`unet3d.parallel.exchange`. While GPUs wait for
messages, the host reads none, so a thread watches the GPUs (`watch`). Ranks never unpickle data:
values are JSON, everything else is tensors of numbers.
"""

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unet3d.distributed import is_launched
from unet3d.distributed.ranks import ERROR_FILE, TRAINING, Purpose, Ranks
from unet3d.distributed.watch import JOIN_SECONDS, Watch
from unet3d.errors import LostRankError, Unet3dError
from unet3d.torch_private import Store, set_timeout

Result = TypeVar("Result")

ENDLESS = timedelta(days=365)

POLL = timedelta(seconds=0.3)

PIECE_BYTES = 16 * 1024**2
"""Bytes of a file in one message, which must arrive within the time-out for hanging ranks."""


class Group:
    """The ranks of one job; this process is one of them, perhaps the only one."""

    def __init__(
        self,
        ranks: Ranks,
        store: Store | None = None,
        lasting: Store | None = None,
        purpose: Purpose = TRAINING,
    ) -> None:
        """Join the ranks.

        The store holds messages of ranks and of PyTorch's process groups, and starts empty; the
        lasting store outlives a restart. A single rank needs neither.
        """
        self.ranks = ranks
        self.values = store
        """The store; what a rank has written there can be read while that rank waits."""
        self._lasting = lasting
        self._watch = None if store is None else Watch(store, ranks, purpose)
        self._numbers = itertools.count(1)
        self._stale_keys: deque[str] = deque()
        self._flags: tuple[torch.Tensor, dist.Work] | None = None
        """Flags of the last step, with their all-reduce in flight."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.ranks.is_first

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.world_size

    def open(self, timeout_seconds: float) -> None:
        """Connect the ranks; a collective call.

        A rank that is silent for ``timeout_seconds`` counts as hung.
        """
        if self._watch is None:
            return
        self._watch.timeout = timedelta(seconds=timeout_seconds)
        self.note(-1, "the start")
        self.exchange(None)
        dist.init_process_group(
            "gloo",
            store=self._watch.store,
            rank=self.ranks.rank,
            world_size=self.size,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        # From now on a rank may validate for long; the notes tell which one hangs.
        set_timeout(ENDLESS)

    def close(self) -> None:
        """Leave the others, after the last message has come."""
        if self._watch is None or not dist.is_initialized():
            return
        self._wait_for_flags()
        self.exchange(None)
        self._watch.close()
        dist.destroy_process_group()
        # The first rank may host the store, from which others may still read this exchange. So it
        # leaves last, but does not wait for ever for a rank that dies here.
        store, left = self._watch.store, [f"left/{rank}" for rank in range(1, self.size)]
        if not self.is_first:
            store.set(left[self.ranks.rank - 1], "")
        deadline = time.monotonic() + self._watch.timeout.total_seconds()
        while self.is_first and not _came(store, left) and time.monotonic() < deadline:
            pass

    def begin(self, run: str) -> None:
        """Record that these ranks have begun the run, in case they are restarted."""
        if self._lasting is not None:
            self._lasting.set(f"begun/{run}", "")

    def has_begun(self, run: str) -> bool:
        """Return whether these ranks had begun the run before they were restarted."""
        if self._lasting is None:
            return self.ranks.restart_count > 0
        return self._lasting.check([f"begun/{run}"])

    def new_group(self, device: torch.device, size: int | None = None) -> dist.ProcessGroup:
        """Return a process group for tensors on a kind of device; a collective call.

        It connects all ranks, or this rank's group of ``size`` consecutive ranks; the size divides
        the number of ranks.
        """
        if self._watch is None:
            raise RuntimeError("a single rank has no other to form a group with")
        backend, timeout = "gloo", self._watch.timeout
        if device.type == "cuda":
            # Otherwise NCCL 2.28 registers the memory of captured messages, and replays hang.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            # A longer time-out than the watch's: NCCL names no rank, and misses captured messages.
            backend, timeout = "nccl", 2 * timeout + timedelta(minutes=1)
        if size is None:
            return dist.new_group(backend=backend, timeout=timeout)  # type: ignore[no-any-return]
        own: dist.ProcessGroup
        own, _ = dist.new_subgroups(size, backend=backend, timeout=timeout)  # type: ignore[no-untyped-call]
        return own

    def note(self, step: int, text: str) -> None:
        """Report the progress of this rank, in steps since the beginning and in words."""
        if self._watch is not None:
            self._watch.note(step, text)

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do work with results in files: in the first rank, then in one rank per machine.

        Each machine may have its own disk. The remaining ranks come last, and find the files.
        """
        if self._watch is None:
            return work()
        ranks = self.ranks
        key, machine = self._next_key(), ranks.rank - ranks.local_rank
        if not ranks.is_first:
            _await(self._watch.store, f"{key}/{machine if ranks.local_rank else 0}")
        result = work()
        if ranks.local_rank == 0:
            self._watch.store.set(f"{key}/{machine}", "done")
        return result

    def claiming(self) -> Callable[[int], bool]:
        """Return a function that claims a number, once for all ranks; a collective call.

        It returns whether this rank is the first to claim the number.
        """
        if self._watch is None:
            return lambda number: True
        key, store = self._next_key(), self._watch.store
        return lambda number: bool(store.add(f"{key}/{number}", 1) == 1)

    def from_first(
        self,
        make: Callable[[], Result],
        *,
        to_plain: Callable[[Result], Any] = lambda made: made,
        from_plain: Callable[[Any], Result] = lambda plain: plain,
        shares_errors: bool = False,
    ) -> Result:
        """Return the result of the first rank, without a timeout; a single rank returns its own.

        ``to_plain`` turns it into lists, numbers and strings; ``from_plain`` converts these back.
        With ``shares_errors`` all ranks raise the error of the first rank, and can continue after
        it.
        """
        if self._watch is None:
            return make()
        key, store = self._next_key(), self._watch.store
        if self.is_first:
            try:
                made = make()
            except Exception as error:  # even MemoryError, which does not end the first rank
                if shares_errors:
                    store.set(key, json.dumps({"error": str(error)}))
                raise
            store.set(key, json.dumps({"made": to_plain(made)}))
        _await(store, key)
        sent = json.loads(store.get(key))
        if "error" in sent:
            raise Unet3dError(sent["error"])
        return from_plain(sent["made"])

    def file_from_first(self, path: Path, read: Callable[[Path], Result]) -> Result:
        """Read a file that only the first rank can see; the other ranks read a temporary copy."""
        if self._watch is None:
            return read(path)
        if self.is_first:
            found = read(path)
            self._broadcast_file(path, self._watch)
            return found
        # In this folder, which the launcher deletes, no copy of a killed rank remains.
        error_file = os.environ.get(ERROR_FILE, "") if is_launched() else ""
        with NamedTemporaryFile(prefix="unet3d-", dir=os.path.dirname(error_file) or None) as copy:
            self._broadcast_file(Path(copy.name), self._watch)
            return read(Path(copy.name))

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; a collective call."""
        if self._watch is None:
            return [value]
        store, key = self._watch.store, self._next_key()
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        own = keys[self.ranks.rank]
        # The sum is not used: the message fails if a rank dies, which breaks its connections.
        alive = dist.all_reduce(torch.zeros(1), async_op=True) if dist.is_initialized() else None
        store.set(own, json.dumps(value))
        _await_all(self._watch, keys, alive)
        values = [json.loads(store.get(key)) for key in keys]
        # A rank that has reached this exchange has read all values of the one before.
        self._stale_keys.append(own)
        if len(self._stale_keys) > 2:
            store.delete_key(self._stale_keys.popleft())
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, the same in each of them to the bit."""
        return [sum(column) for column in zip(*self.exchange(list(values)), strict=True)]

    def all_reduce_flags(self, stop: int, save: bool) -> tuple[int, bool]:
        """Send this rank's flags of a step, and return the flags of all ranks in the previous step.

        Each returned flag is the maximum over all ranks. A single rank returns its own flags at
        once.
        """
        if self._watch is None:
            return stop, save
        reduced = self._wait_for_flags()
        if not reduced[0]:
            flags = torch.tensor([stop, int(save and not reduced[1])])
            with self._watch.translate_dist_errors():
                self._flags = flags, dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True)
        return reduced[0], bool(reduced[1])

    def agree(self, stop: int, shards: dist.ProcessGroup | None) -> int:
        """Return the largest ``stop`` of this replica's ranks; a collective call of these ranks.

        Ranks with the slabs of one volume compute it together. A signal reaches them at different
        times, so they agree before each volume that all of them compute it, or none. Without
        ``shards`` the replica is one rank.
        """
        if shards is None:
            return stop
        flag = torch.tensor([stop])
        with self.translate_dist_errors():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=shards)
        return int(flag.item())

    def watching(self, *devices: torch.device) -> AbstractContextManager[None]:
        """Return a context in which messages are queued; see ``Watch.queueing``."""
        return nullcontext() if self._watch is None else self._watch.queueing(*devices)

    def translate_dist_errors(self) -> AbstractContextManager[None]:
        """Turn an error of a process group into one that names the lost rank and its last step."""
        return nullcontext() if self._watch is None else self._watch.translate_dist_errors()

    def _wait_for_flags(self) -> list[int]:
        """Return the last step's flags, each the maximum over ranks; zeros: none in flight."""
        if self._flags is None or self._watch is None:
            return [0, 0]
        (flags, work), self._flags = self._flags, None
        with self._watch.translate_dist_errors():
            work.wait(self._watch.timeout)
        return flags.tolist()

    def _broadcast_file(self, path: Path, watch: Watch) -> None:
        """Send the bytes of the first rank's file to all others, which write them."""
        num_bytes = self.from_first(lambda: path.stat().st_size)
        content = torch.from_file(
            str(path), shared=not self.is_first, size=num_bytes, dtype=torch.uint8
        )
        self.exchange(None)  # now all ranks are ready to receive it
        with watch.translate_dist_errors():
            for piece in torch.split(content, PIECE_BYTES):
                dist.broadcast(piece, 0, async_op=True).wait(watch.timeout)

    def _next_key(self) -> str:
        return f"exchange/{next(self._numbers)}"


def _await(store: Store, key: str) -> None:
    """Wait for a key, however long; a signal can interrupt it."""
    while not _came(store, [key]):
        pass


def _await_all(watch: Watch, keys: Sequence[str], alive: Any) -> None:
    """Wait until all ranks have written their keys; raise if one dies or none makes progress."""
    notes, changed = None, time.monotonic()
    while not _came(watch.store, keys):
        # Ask again: a rank that has read all keys may have left meanwhile.
        if alive is not None and alive.is_completed() and not watch.store.check(list(keys)):
            with watch.translate_dist_errors():
                alive.wait()
        before, notes = notes, watch.notes()
        if notes != before:
            changed = time.monotonic()
        elif time.monotonic() - changed > watch.timeout.total_seconds():
            missing = [rank for rank, key in enumerate(keys) if not watch.store.check([key])]
            if missing:
                raise watch.error(missing, hangs=True)


def _came(store: Store, keys: Sequence[str]) -> bool:
    """Return whether keys exist, after a wait so short that signals are handled."""
    try:
        store.wait(list(keys), POLL)
    except dist.DistStoreError:
        return False
    except dist.DistError as error:
        raise LostRankError("the process that started the ranks is gone") from error
    return True
