"""Restarted ranks must not read what earlier ranks left in a store that outlives them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from unet3d.distributed import rendezvous as joining
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import name_of_start
from unet3d.errors import RankError
from unet3d.training.plan import choose_run
from unet3d.training.request import Request


def start_all(store, num_ranks):
    """Start ranks at the same time, the first rank last, and return the names that they take."""
    with ThreadPoolExecutor(num_ranks) as ranks:
        names = [
            ranks.submit(name_of_start, store, rank, num_ranks)
            for rank in reversed(range(num_ranks))
        ]
        return {name.result(20) for name in names}


def test_each_start_has_a_name_of_its_own_that_all_ranks_know():
    store = dist.HashStore()
    store.set("asks/2", "of a rank that was killed before anybody answered")
    names = [start_all(store, 3) for _ in range(3)]
    assert [len(of_start) for of_start in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_join_is_named(rank, missing, monkeypatch):
    monkeypatch.setattr(joining, "JOIN_SECONDS", 0.1)
    with pytest.raises(RankError, match=f"rank {missing} does not join"):
        name_of_start(dist.HashStore(), rank, 2)


@pytest.mark.parametrize("restart_count", [0, 1])
def test_restarted_ranks_continue_their_own_run_only(tmp_path, restart_count):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    group = Group(
        Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1, restart_count=restart_count),
        dist.PrefixStore("start", store),
        store,
    )
    (tmp_path / "checkpoint-latest.pt").touch()  # a file of another run
    quick = {"parallel.mode": "none", "patches.size": (8, 8, 8), "training.batch_size": 2}
    request = Request(output=tmp_path, changes=quick)
    assert not choose_run(request, group).resume
    group.begin(str(tmp_path))
    assert choose_run(request, group).resume
