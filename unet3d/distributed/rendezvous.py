"""Joining the ranks that a launcher has started, the first time or again after one died."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from unet3d.distributed.group import JOIN_SECONDS, Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import RankError

POLL_SECONDS = 0.02


@contextmanager
def joined(ranks: Ranks) -> Iterator[Group]:
    """Join the ranks that torchrun has started, and leave them when all is done.

    Args:
        ranks: The place of this process; a single rank joins nothing.

    Raises:
        RankError: The others cannot be joined.
    """
    if ranks.world_size == 1:
        yield Group(ranks)
        return
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS))))
        lasting = PrefixStore("unet3d", store)
        start = name_of_start(lasting, ranks.rank, ranks.world_size)
    except (ValueError, dist.DistError) as error:
        reason = " ".join(str(error).split())
        raise RankError(f"rank {ranks.rank} cannot join the others: {reason}") from error
    # The store outlives the ranks, so each start has keys of its own: it must not read what an
    # earlier one has left.
    group = Group(ranks, PrefixStore(start, lasting), lasting)
    yield group
    group.close()  # not after an error: it would wait for ranks that may be gone


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
