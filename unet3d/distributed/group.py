"""The ranks of one training, and what they tell one another beside gradients.

Two channels. A *store* of small values, kept by whoever started the ranks, which can be asked
without waiting and so never times out: who is how far, who is done. And a *gloo* group for
messages at every step, of which each is read one step after it was sent, so that nobody waits.
Gradients go through groups of their own; see :mod:`unet3d.parallel.replicas`.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _set_pg_timeout

from unet3d.distributed.ranks import Ranks
from unet3d.errors import LostRankError, RankError

Result = TypeVar("Result")

JOIN_SECONDS = 600
POLL = timedelta(seconds=0.3)
ENDLESS = timedelta(days=365)
GRACE_SECONDS = 2.0
"""How long a rank that misses another waits for the rest to say that they miss it too."""


class Group:
    """The ranks of one training, of which this process is one; it may be the only one."""

    def __init__(
        self, ranks: Ranks, store: Store | None = None, lasting: Store | None = None
    ) -> None:
        """Take up a place.

        Args:
            ranks: The place.
            store: That all ranks reach; None for a single rank.
            lasting: The same, where what is written outlives a restart.
        """
        self.ranks = ranks
        self.timeout = timedelta(seconds=JOIN_SECONDS)
        self._store = store
        self._lasting = lasting
        self._num_exchanges = 0
        self._stale_keys: deque[str] = deque()
        self._message: tuple[torch.Tensor, Any] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and shows."""
        return self.ranks.is_first

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.world_size

    def open(self, timeout_seconds: float) -> None:
        """Connect the ranks; all of them call it.

        Args:
            timeout_seconds: Silence after which a rank is taken to hang.
        """
        if self._store is None:
            return
        self.timeout = timedelta(seconds=timeout_seconds)
        self.note(-1, "the start")
        self.exchange(None)
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=self.ranks.rank,
            world_size=self.size,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        # From now on a rank may validate for long; who hangs is found out otherwise.
        _set_pg_timeout(ENDLESS)

    def begin(self, run: str) -> None:
        """Write down, for these ranks when they are restarted, that the run is theirs.

        Args:
            run: Its folder.
        """
        if self._lasting is not None:
            self._lasting.set(f"begun/{run}", "")

    def has_begun(self, run: str) -> bool:
        """Return whether these ranks have begun a run before they were restarted.

        Args:
            run: Its folder.
        """
        if self._lasting is None:
            return self.ranks.restart_count > 0
        return self._lasting.check([f"begun/{run}"])

    def new_group(self, device: torch.device) -> dist.ProcessGroup:
        """Return a group of all ranks that moves tensors of a kind of device.

        Args:
            device: Where this rank's tensors are.
        """
        if device.type == "cuda":
            # The messages of every step notice a lost rank first, and can say which.
            timeout = 2 * self.timeout + timedelta(minutes=1)
            group = dist.new_group(backend="nccl", timeout=timeout)
        else:
            group = dist.new_group(backend="gloo", timeout=self.timeout)
        return group  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the others, after the last message has come."""
        if self._store is None or not dist.is_initialized():
            return
        if self._message is not None:
            with self.translate_dist_errors():
                self._message[1].wait(self.timeout)
        self.exchange(None)  # whoever keeps the store, or listens, must not leave before the others
        dist.destroy_process_group()

    def note(self, step: int, text: str) -> None:
        """Say how far this rank is, for the case that it gets no further.

        Args:
            step: Steps since the beginning.
            text: The same, for people.
        """
        if self._store is not None:
            self._store.set(f"note/{self.ranks.rank}", json.dumps([step, text]))

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do work whose result is kept in files: the first rank, the others when it is there.

        On each machine one rank comes next, for a machine may have a disk of its own.

        Args:
            work: Fast where it has been done already.
        """
        if self._store is None:
            return work()
        key, machine = self._next_key(), self.ranks.rank - self.ranks.local_rank
        if not self.is_first:
            self._await([f"{key}/{machine if self.ranks.local_rank else 0}"])
        result = work()
        if self.ranks.local_rank == 0:
            self._store.set(f"{key}/{machine}", "done")
        return result

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Return what the first rank makes, however long it takes.

        Args:
            make: Its result must be plain values: lists, numbers, strings.
        """
        if self._store is None:
            return make()
        key = self._next_key()
        if self.is_first:
            self._store.set(key, json.dumps(make()))
        self._await([key])
        return json.loads(self._store.get(key))

    def object_from_first(self, make: Callable[[], Result]) -> Result:
        """Return what the first rank makes: anything, also large tensors.

        Args:
            make: Only called in the first rank.
        """
        if self._store is None:
            return make()
        content: list[Any] = [make() if self.is_first else None]
        self.exchange(None)
        with self.translate_dist_errors():
            dist.broadcast_object_list(content)
        result: Result = content[0]
        return result

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; all of them call it.

        Args:
            value: Plain values.

        Raises:
            RankError: For too long no rank got any further.
        """
        if self._store is None:
            return [value]
        key = self._next_key()
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        own = keys[self.ranks.rank]
        # Nobody reads this message: a rank that ends before it has sent it breaks its connections.
        alive = dist.all_reduce(torch.zeros(1), async_op=True) if dist.is_initialized() else None
        self._store.set(own, json.dumps(value))
        self._await(keys, self.timeout.total_seconds(), alive)
        values = [json.loads(self._store.get(key)) for key in keys]
        # Whoever has come to an exchange has read all of the one before.
        self._stale_keys.append(own)
        if len(self._stale_keys) > 2:
            self._store.delete_key(self._stale_keys.popleft())
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, the same in each of them to the bit."""
        return [sum(column) for column in zip(*self.exchange(list(values)), strict=True)]

    def all_reduce_flags(self, stop: int, save: bool) -> tuple[int, bool]:
        """Say what this rank wishes after a step, and return what all of them do now.

        The answer to a step's wishes comes after the next step, so that no rank waits for another;
        a single rank has it at once.

        Args:
            stop: Number of the signal that asks to stop, or 0.
            save: Whether a checkpoint is due.

        Raises:
            RankError: A rank died or hangs.
        """
        if self._store is None:
            return stop, save
        decided = [0, 0]
        if self._message is not None:
            wishes, work = self._message
            with self.translate_dist_errors():
                work.wait(self.timeout)
            decided = wishes.tolist()
            self._message = None
        if not decided[0]:
            wishes = torch.tensor([stop, int(save and not decided[1])])
            with self.translate_dist_errors():
                self._message = (wishes, dist.all_reduce(wishes, dist.ReduceOp.MAX, async_op=True))
        return decided[0], bool(decided[1])

    @contextmanager
    def translate_dist_errors(self) -> Iterator[None]:
        """Turn what a group of ranks says of a lost rank into which one it was, and where.

        Raises:
            RankError: A rank died or hangs.
        """
        try:
            yield
        except RuntimeError as error:  # gloo has no class of its own
            text = str(error).lower()
            hangs = "timed out" in text
            of_group = isinstance(error, dist.DistError) or "gloo" in text or hangs
            if self._store is None or not of_group:
                raise
            raise self._lost(hangs) from error

    def _lost(self, hangs: bool) -> RankError:
        """Return the error that names the rank that is missing; those that miss it say so."""
        store = self._required_store()
        try:
            store.set(f"missing/{self.ranks.rank}", "")
            time.sleep(GRACE_SECONDS)
            silent = [
                rank
                for rank in range(self.size)
                if rank != self.ranks.rank and not store.check([f"missing/{rank}"])
            ]
            notes = self._notes()
        except RuntimeError:  # the store is gone too
            return LostRankError("the other ranks of this training are gone")
        return self._error(
            silent or [r for r in range(self.size) if r != self.ranks.rank], notes, hangs
        )

    def _error(
        self, suspects: Sequence[int], notes: dict[int, tuple[int, str]], hangs: bool
    ) -> RankError:
        start = (-1, "the start")
        last = min(notes.get(rank, start)[0] for rank in suspects)
        names = [
            f"rank {rank} (in {notes.get(rank, start)[1]})"
            for rank in suspects
            if notes.get(rank, start)[0] == last
        ]
        if not hangs:
            return LostRankError(f"{', '.join(names)} is gone; --resume continues the run")
        return RankError(
            f"{', '.join(names)} hangs: nothing for {self.timeout.total_seconds():g} s; --resume "
            "continues the run, parallel.timeout_seconds waits longer"
        )

    def _notes(self) -> dict[int, tuple[int, str]]:
        store, notes = self._required_store(), {}
        for rank in range(self.size):
            if store.check([f"note/{rank}"]):
                step, text = json.loads(store.get(f"note/{rank}"))
                notes[rank] = (step, text)
        return notes

    def _await(
        self, keys: Sequence[str], limit_seconds: float | None = None, alive: Any = None
    ) -> None:
        """Wait until all keys are there; a signal can interrupt it.

        Args:
            keys: To wait for.
            limit_seconds: While no rank notes any progress; None: however long it takes.
            alive: A message that fails when a rank has ended, or None.
        """
        store = self._required_store()
        notes, changed = None, time.monotonic()
        while not self._came(keys):
            if alive is not None and alive.is_completed():
                with self.translate_dist_errors():
                    alive.wait()
            if limit_seconds is None:
                continue
            before, notes = notes, self._notes()
            if notes != before:
                changed = time.monotonic()
            elif time.monotonic() - changed > limit_seconds:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise self._error(missing, notes, hangs=True)

    def _came(self, keys: Sequence[str]) -> bool:
        """Wait for keys, but not so long that a signal would have to wait, too."""
        try:
            self._required_store().wait(list(keys), POLL)
        except dist.DistStoreError:
            return False
        except dist.DistError as error:
            raise LostRankError("the process that started the ranks is gone") from error
        return True

    def _required_store(self) -> Store:
        if self._store is None:
            raise RuntimeError("a single rank has nobody to talk to")
        return self._store

    def _next_key(self) -> str:
        """Return a key for the next thing that all ranks do together, in the same order."""
        self._num_exchanges += 1
        return f"exchange/{self._num_exchanges}"
