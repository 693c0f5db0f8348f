"""Ranks as threads of the tests' process, to test their messages through a store."""

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks

LIMIT_SECONDS = 30


def place(rank, num_ranks, per_machine=None):
    """Return the environment of a rank, on one machine or several."""
    per_machine = per_machine or num_ranks
    return Ranks(
        rank=rank,
        world_size=num_ranks,
        local_rank=rank % per_machine,
        local_world_size=per_machine,
    )


def store_of_all():
    """Return a store for all ranks of a test."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=LIMIT_SECONDS))
    return store


class _StoreUntilError:
    """A store that fails in every rank once one rank has failed, so that no rank waits for ever."""

    def __init__(self):
        self.store = store_of_all()
        self.failed = False

    def wait(self, keys, timeout):
        if self.failed:
            raise dist.DistError("another rank of the test has failed")
        self.store.wait(keys, timeout)

    def __getattr__(self, name):
        return getattr(self.store, name)


def in_threads(num_ranks, work, per_machine=None):
    """Run ``work`` in each rank, and return the results; raise the first error, if any."""
    store: Any = _StoreUntilError()
    groups = [Group(place(rank, num_ranks, per_machine), store, store) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as threads:
        ranks = [threads.submit(work, group) for group in groups]
        done, late = wait(ranks, LIMIT_SECONDS, FIRST_EXCEPTION)
        store.failed = bool(late) or any(rank.exception() for rank in done)
        for rank in done:
            rank.result()
        return [rank.result() for rank in ranks]
