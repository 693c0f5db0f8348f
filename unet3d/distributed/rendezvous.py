"""Joining the ranks that a launcher has started, the first time or again after one died.

Ranks that ``unet3d`` has started on one machine meet in a store of the launcher, which outlives
them and listens on the loopback interface only. Ranks of torchrun, on one machine or several, meet
in the store of torchrun.
"""

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from unet3d.distributed import STORE_PORT
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import TRAINING, Purpose, Ranks
from unet3d.distributed.watch import JOIN_SECONDS
from unet3d.errors import RankError
from unet3d.torch_private import PrefixStore, Store

POLL_SECONDS = 0.02

LOOPBACK = "127.0.0.1"


@contextmanager
def joined(ranks: Ranks, purpose: Purpose = TRAINING) -> Iterator[Group]:
    """Join the ranks that were started with this one, and leave them when all is done."""
    if ranks.world_size == 1:
        yield Group(ranks)
        return
    group = Group(ranks, *_stores(ranks), purpose)
    yield group
    group.close()  # not after an error: it would wait for ranks that may be gone


@contextmanager
def store_for_ranks() -> Iterator[int]:
    """Keep a store for ranks of this machine, and give its port on the loopback interface."""
    # By default PyTorch's store listens on all interfaces, whatever host it is given.
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    try:
        yield port
    finally:
        del store  # which closes its socket


def _stores(ranks: Ranks) -> tuple[Store, Store]:
    """Return the store for this start of the ranks, and the store that outlives restarts."""
    limit, port = timedelta(seconds=JOIN_SECONDS), os.environ.get(STORE_PORT)
    try:
        if port is None:
            store, _, _ = next(iter(rendezvous("env://", timeout=limit)))
            lasting: Store = PrefixStore("unet3d", store)
            start = name_of_start(lasting, ranks.rank, ranks.world_size)
        else:
            lasting = dist.TCPStore(  # type: ignore[attr-defined]
                LOOPBACK, int(port), timeout=limit
            )
            start = f"start-{ranks.restart_count}"
    except (ValueError, dist.DistError) as error:
        reason = " ".join(str(error).split())
        raise RankError(f"rank {ranks.rank} cannot join the others: {reason}") from error
    # The store outlives the ranks, so each start has its own keys: ranks must not read what an
    # earlier start has left.
    return PrefixStore(start, lasting), lasting


def name_of_start(store: Store, rank: int, num_ranks: int) -> str:
    """Return a name that all ranks of this start share, and no earlier start had.

    The number of restarts cannot serve, because on each machine torchrun counts only the restarts
    that began there. So the first rank makes a name and answers the others' questions. Questions
    left from an earlier start are answered, too, but no rank reads these answers.
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
