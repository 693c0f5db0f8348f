"""Joining the ranks that a launcher has started, the first time or again after one died.

Ranks that ``unet3d`` has started on one machine meet in files, so that nothing listens. Those
of torchrun, on one machine or several, meet in the TCPStore that torchrun keeps.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from unet3d.distributed.group import JOIN_SECONDS, Group, Stores
from unet3d.distributed.launched import MEETING_FOLDER
from unet3d.distributed.purpose import TRAINING, Purpose
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.value_store import FolderStore
from unet3d.errors import RankError

POLL_SECONDS = 0.02


@contextmanager
def joined(ranks: Ranks, purpose: Purpose = TRAINING) -> Iterator[Group]:
    """Join the ranks that were started with this one, and leave them when all is done.

    Args:
        ranks: The place of this process; a single rank joins nothing.
        purpose: What the ranks do.

    Raises:
        RankError: The others cannot be joined.
    """
    if ranks.world_size == 1:
        yield Group(ranks)
        return
    folder = os.environ.get(MEETING_FOLDER)
    stores = _stores_of_torchrun(ranks) if folder is None else stores_in(Path(folder), ranks)
    group = Group(ranks, stores, purpose)
    yield group
    group.close()  # not after an error: it would wait for ranks that may be gone


def stores_in(folder: Path, ranks: Ranks) -> Stores:
    """Return the stores of ranks that all start at the same time, on this machine.

    Args:
        folder: Outlives restarts; nobody else can open it.
        ranks: The place of this process.

    Raises:
        RankError: The folder cannot be written.
    """
    start = folder / f"start-{ranks.restart_count}"
    values = FolderStore(start)
    groups = dist.FileStore(  # type: ignore[attr-defined]
        str(start / "groups"), ranks.world_size
    )
    groups.set_timeout(timedelta(seconds=JOIN_SECONDS))
    return Stores(values=values, lasting=FolderStore(folder), groups=groups)


def _stores_of_torchrun(ranks: Ranks) -> Stores:
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS))))
        lasting = PrefixStore("unet3d", store)
        start = name_of_start(lasting, ranks.rank, ranks.world_size)
    except (ValueError, dist.DistError) as error:
        reason = " ".join(str(error).split())
        raise RankError(f"rank {ranks.rank} cannot join the others: {reason}") from error
    # The store outlives the ranks, so each start has keys of its own: it must not read what an
    # earlier one has left.
    store = PrefixStore(start, lasting)
    return Stores(values=store, lasting=lasting, groups=store)


def name_of_start(store: Store, rank: int, num_ranks: int) -> str:
    """Return a name that all ranks of this start share, and no earlier start had.

    The number of restarts is no such name, because torchrun counts on each machine only those that
    began there. So the first rank makes a name and answers the others; questions that are left
    from an earlier start are answered too, and no rank reads the answer.

    Args:
        store: A store that outlives restarts.
        rank: Number of this process.
        num_ranks: Number of all ranks.

    Raises:
        RankError: Some ranks do not come.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    question = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", question)
        while not store.check([f"answer/{question}"]):
            if time.monotonic() > deadline:
                raise RankError(f"rank 0 does not join within {JOIN_SECONDS} s")
            time.sleep(POLL_SECONDS)
        name = store.get(f"answer/{question}").decode()
        store.set(f"{name}/joined/{rank}", "")
        return name
    others = set(range(1, num_ranks))
    while others:
        for other in others:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", question)
        time.sleep(POLL_SECONDS)
        others -= {other for other in others if store.check([f"{question}/joined/{other}"])}
        if time.monotonic() > deadline:
            raise RankError(f"rank {min(others)} does not join within {JOIN_SECONDS} s")
    return question
