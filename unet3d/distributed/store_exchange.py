"""Exchange of plain values between ranks through a store, which never times out by itself.

Each thing that all ranks do together has a key, numbered in the order in which they do it.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unet3d.distributed.rank_watch import RankWatch
from unet3d.distributed.ranks import Ranks
from unet3d.errors import LostRankError
from unet3d.torch_private import Store

Result = TypeVar("Result")

POLL = timedelta(seconds=0.3)


class StoreExchange:
    """Plain values of every rank, or of the first one, in all of them."""

    def __init__(self, store: Store, ranks: Ranks, watch: RankWatch) -> None:
        """Start with the first key."""
        self._store = store
        self._ranks = ranks
        self._watch = watch
        self._num_keys = 0
        self._stale_keys: deque[str] = deque()

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do work whose result is kept in files: the first rank, then the others.

        On each machine one rank comes next, because a machine may have a disk of its own.
        """
        ranks = self._ranks
        key, machine = self._next_key(), ranks.rank - ranks.local_rank
        if not ranks.is_first:
            self._await([f"{key}/{machine if ranks.local_rank else 0}"])
        result = work()
        if ranks.local_rank == 0:
            self._store.set(f"{key}/{machine}", "done")
        return result

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Return what the first rank makes, however long it takes."""
        key = self._next_key()
        if self._ranks.is_first:
            self._store.set(key, json.dumps(make()))
        self._await([key])
        return json.loads(self._store.get(key))

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        key = self._next_key()
        keys = [f"{key}/{rank}" for rank in range(self._ranks.world_size)]
        own = keys[self._ranks.rank]
        # Nobody reads this message: a rank that ends before it has sent it breaks its connections.
        alive = dist.all_reduce(torch.zeros(1), async_op=True) if dist.is_initialized() else None
        self._store.set(own, json.dumps(value))
        self._await(keys, self._watch.timeout.total_seconds(), alive)
        values = [json.loads(self._store.get(key)) for key in keys]
        # A rank that comes to an exchange has read all of the one before.
        self._stale_keys.append(own)
        if len(self._stale_keys) > 2:
            self._store.delete_key(self._stale_keys.popleft())
        return values

    def _next_key(self) -> str:
        self._num_keys += 1
        return f"exchange/{self._num_keys}"

    def _await(
        self, keys: Sequence[str], limit_seconds: float | None = None, alive: Any = None
    ) -> None:
        """Wait until all keys are there; a signal can interrupt it."""
        notes, changed = None, time.monotonic()
        while not self._came(keys):
            if alive is not None and alive.is_completed():
                with self._watch.translate_dist_errors():
                    alive.wait()
            if limit_seconds is None:
                continue
            before, notes = notes, self._watch.notes()
            if notes != before:
                changed = time.monotonic()
            elif time.monotonic() - changed > limit_seconds:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if missing:
                    raise self._watch.hanging(missing)

    def _came(self, keys: Sequence[str]) -> bool:
        """Wait for keys, but not so long that a signal would have to wait, too."""
        try:
            self._store.wait(list(keys), POLL)
        except dist.DistStoreError:
            return False
        except dist.DistError as error:
            raise LostRankError("the process that started the ranks is gone") from error
        return True
