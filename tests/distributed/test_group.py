"""Messages of ranks through a store; each rank is a thread here."""

import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.rank_threads import in_threads, place, store_of_all
from unet3d.distributed import group as group_module
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.watch import Watch
from unet3d.errors import LostRankError, RankError, Unet3dError, VolumeError

ALONE = Group(Ranks())


def test_a_single_rank_gets_what_it_made_itself():
    made = object()
    assert ALONE.from_first(lambda: made, to_plain=lambda _: 1 / 0) is made
    assert ALONE.exchange(made)[0] is made
    assert ALONE.file_from_first(Path(__file__), lambda _: made) is made
    assert ALONE.in_turn(lambda: made) is made
    assert ALONE.all_reduce_flags(15, True) == (15, True)
    assert ALONE.claiming()(0)
    assert not ALONE.has_begun("run")
    with pytest.raises(RuntimeError, match="a single rank has no other"):
        ALONE.new_group(torch.device("cpu"))


def test_copies_of_a_file_are_where_the_launcher_deletes_those_of_a_killed_rank(
    tmp_path, monkeypatch
):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "meeting").mkdir()
    monkeypatch.setenv("UNET3D_STORE_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "meeting" / "error.json"))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: Mock())
    folders = in_threads(
        2, lambda one: one.file_from_first(tmp_path / "file", lambda at: at.parent)
    )
    assert folders == [tmp_path, tmp_path / "meeting"]
    assert not list((tmp_path / "meeting").iterdir())


def test_each_number_is_claimed_by_one_rank():
    def work(group):
        first, other = group.claiming(), group.claiming()
        own = [number for number in range(20) if first(number)]
        return own, [number for number in range(3) if other(number)]

    claimed = in_threads(3, work)
    assert sorted(number for own, _ in claimed for number in own) == list(range(20))
    assert sorted(number for _, own in claimed for number in own) == [0, 1, 2]


def test_all_ranks_know_the_first_ones_result_and_values_and_sums_of_all():
    calls, values = [], ([0.25, 1.0], [0.5, 2.0], [1.0, 4.0])

    def work(group):
        rank = group.ranks.rank

        def make():
            calls.append(rank)
            return Path("a") / str(rank)

        made = group.from_first(make, to_plain=str, from_plain=Path)
        return (
            made,
            [group.exchange(10 * turn + rank) for turn in range(5)],
            group.sum(values[rank]),
        )

    exchanged = [[10 * turn, 10 * turn + 1, 10 * turn + 2] for turn in range(5)]
    assert in_threads(3, work) == [(Path("a/0"), exchanged, [1.75, 7.0])] * 3
    assert calls == [0]


@pytest.mark.parametrize("kind", [VolumeError, OSError, MemoryError])
def test_all_ranks_go_on_after_an_error_that_they_share(kind):
    def work(group):
        def fail():
            raise kind("no room")

        with pytest.raises(kind if group.is_first else Unet3dError, match="no room"):
            group.from_first(fail, shares_errors=True)
        return group.from_first(lambda: "the next scan", shares_errors=True)

    assert in_threads(2, work) == ["the next scan"] * 2


def test_work_in_turn_is_done_first_by_rank_0_then_once_on_each_machine():
    lock, done = threading.Lock(), []

    def work(group):
        def once():
            time.sleep(0.05)
            with lock:
                done.append(group.ranks.rank)

        group.in_turn(once)

    in_threads(4, work, per_machine=2)
    assert done[0] == 0
    assert done.index(2) < done.index(3)
    assert sorted(done) == [0, 1, 2, 3]


def test_the_rank_that_got_least_far_hangs():
    store = store_of_all()
    groups = [Group(place(rank, 3), store) for rank in range(3)]
    groups[0]._watch.timeout = timedelta(seconds=0.5)  # as ``open`` would set it
    groups[1].note(4, "epoch 1, step 5")
    groups[2].note(7, "epoch 1, step 8")
    with pytest.raises(
        RankError, match=r"^rank 1 \(in epoch 1, step 5\) hangs: no sign of life for"
    ):
        groups[0].exchange(None)


def test_the_first_rank_which_may_keep_the_store_leaves_last(monkeypatch):
    ready = {"is_initialized": True, "all_reduce": None, "destroy_process_group": None}
    for name, value in ready.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value, **__: value)
    came, events = group_module._came, []

    def slow(store, keys):
        done = came(store, keys)
        time.sleep(0.2 * (threading.current_thread().name == "slow"))
        return done

    monkeypatch.setattr(group_module, "_came", slow)

    def work(group):
        if not group.is_first:
            threading.current_thread().name = "slow"
            read = group._watch.store.get
            monkeypatch.setattr(
                group._watch.store, "get", lambda key: (events.append(key), read(key))[1]
            )
        group.close()
        if group.is_first:
            events.append("the first has left")

    in_threads(2, work)
    assert len(events) > 1
    assert events[-1] == "the first has left"


def test_an_error_of_a_process_group_names_the_rank_that_misses_nobody(monkeypatch):
    monkeypatch.setattr("unet3d.distributed.watch.GRACE_SECONDS", 0.0)
    store = store_of_all()
    watch = Watch(store, place(0, 3))
    store.set("missing/1", "")
    with pytest.raises(LostRankError, match=r"^rank 2 \(in the start\) is gone; --resume"):
        with watch.translate_dist_errors():
            raise RuntimeError("[gloo/transport/tcp] Connection closed by peer")
    with pytest.raises(RuntimeError, match="^of something else$"):
        with watch.translate_dist_errors():
            raise RuntimeError("of something else")
