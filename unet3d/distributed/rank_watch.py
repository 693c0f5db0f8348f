"""How far each rank is, and which one is missing where the others wait in vain.

The notes are in a store that can be asked without waiting, so they can be read when every other
connection is broken.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from unet3d.distributed.purpose import TRAINING, Purpose
from unet3d.distributed.ranks import Ranks
from unet3d.errors import LostRankError, RankError
from unet3d.torch_private import Store

GRACE_SECONDS = 2.0
"""How long a rank that misses another waits for the rest to say that they miss it too."""

START = (-1, "the start")
"""How far a rank is that has not written a note."""

Notes = dict[int, tuple[int, str]]
"""Steps since the beginning by rank, and the same for people."""


class RankWatch:
    """Keeps the notes of all ranks, and names the one that is lost."""

    def __init__(
        self, store: Store, ranks: Ranks, timeout: timedelta, purpose: Purpose = TRAINING
    ) -> None:
        """Start without any notes."""
        self.timeout = timeout
        self._store = store
        self._ranks = ranks
        self._purpose = purpose
        self._has_missed = False

    def note(self, step: int, text: str) -> None:
        """Write down how far this rank is."""
        if self._has_missed:  # but could go on: ranks may do so when memory has run out
            self._store.delete_key(f"missing/{self._ranks.rank}")
            self._has_missed = False
        self._store.set(f"note/{self._ranks.rank}", json.dumps([step, text]))

    def notes(self) -> Notes:
        """Return what the ranks have written down last."""
        notes = {}
        for rank in range(self._ranks.world_size):
            if self._store.check([f"note/{rank}"]):
                step, text = json.loads(self._store.get(f"note/{rank}"))
                notes[rank] = (step, text)
        return notes

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

    def hanging(self, suspects: Sequence[int]) -> RankError:
        """Return the error that names the ranks which hang."""
        return self._error(suspects, self.notes(), hangs=True)

    def is_missed(self) -> bool:
        """Return whether another rank says now that it misses one."""
        try:
            return any(self._store.check([f"missing/{rank}"]) for rank in self._others())
        except (RuntimeError, RankError):  # the store is gone
            return False

    def lost(self, hangs: bool) -> RankError:
        """Return the error that names the missing rank: the one that does not miss another.

        Takes ``GRACE_SECONDS``; any thread may call it.
        """
        others = self._others()
        try:
            self._store.set(f"missing/{self._ranks.rank}", "")
            time.sleep(GRACE_SECONDS)
            silent = [rank for rank in others if not self._store.check([f"missing/{rank}"])]
            notes = self.notes()
        except (RuntimeError, RankError):  # the store is gone too
            return LostRankError(f"the other ranks of this {self._purpose.name} are gone")
        return self._error(silent or others, notes, hangs)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank]

    def _error(self, suspects: Sequence[int], notes: Notes, hangs: bool) -> RankError:
        last = min(notes.get(rank, START)[0] for rank in suspects)
        names = ", ".join(
            f"rank {rank} (in {notes.get(rank, START)[1]})"
            for rank in suspects
            if notes.get(rank, START)[0] == last
        )
        if not hangs:
            return LostRankError(f"{names} is gone; {self._purpose.after_loss}")
        return RankError(
            f"{names} hangs: nothing for {self.timeout.total_seconds():g} s; "
            f"{self._purpose.after_silence}"
        )
