"""A device that waits for ever for another rank: its own rank ends with one line; others go on.

Tests with real processes are in ``tests/faults/test_ranks.py``.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch

from tests.rank_threads import place, store_of_all
from unet3d.distributed import watch
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import PREDICTION, TRAINING, Ranks
from unet3d.distributed.watch import GpuProgress, Watch
from unet3d.errors import LostRankError, RankError

CPU = torch.device("cpu")
LIMIT = 0.04
"""Silence in seconds after which a rank is lost."""

LOOKS = 5
"""Looks at a device after which its rank is lost: the device is silent from the second on."""


class FakeProgress:
    """A device that gets as far as the test allows; the watch looks at it when the test says so."""

    made: list["FakeProgress"] = []

    def __init__(self, device):
        self.number = 0
        self.allowed = 10**6
        self._begun, self._permitted = 0, 0.0
        self._looks = threading.Condition()
        FakeProgress.made.append(self)

    def queue(self, number):
        self.number = number

    def reached(self):
        with self._looks:
            self._begun += 1
            self._looks.notify_all()
            self._looks.wait_for(lambda: self._permitted >= self._begun)
        return min(self.number, self.allowed)

    def let_look(self, times):
        """Let the thread look ``times`` more times."""
        with self._looks:
            self._permitted += times
            self._looks.notify_all()

    def waits_for_more(self):
        """Return whether the thread has made all allowed looks and waits for a further one."""
        with self._looks:
            return self._looks.wait_for(lambda: self._begun > self._permitted, timeout=10)


class Rank:
    """The watch of one rank, its only device, and the errors with which it ends."""

    def __init__(self, store, number=0, num_ranks=2, purpose=TRAINING):
        self.errors: list[RankError] = []
        self.ended = threading.Event()
        self.watch = Watch(store, place(number, num_ranks), purpose, self._end)
        self.watch.timeout = timedelta(seconds=LIMIT)

    def _end(self, error):
        self.errors.append(error)
        self.ended.set()

    def queue(self):
        with self.watch.queueing(CPU):
            pass

    @property
    def device(self):
        (progress,) = FakeProgress.made
        return progress

    def stop_at(self, number):
        self.queue()
        self.device.allowed = number

    def close(self):
        for device in FakeProgress.made:
            device.let_look(float("inf"))
        self.watch.close()

    def assert_goes_on(self, looks):
        self.device.let_look(looks)
        assert self.device.waits_for_more() and not self.errors

    def assert_is_lost_after(self, looks):
        """Check that the rank is lost after these looks, but not one look earlier."""
        self.assert_goes_on(looks - 1)
        self.device.let_look(1)
        assert self.ended.wait(10) and len(self.errors) == 1


@pytest.fixture
def fake_devices(monkeypatch):
    monkeypatch.setattr(FakeProgress, "made", [])
    monkeypatch.setitem(watch.PROGRESS, "cpu", FakeProgress)
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.01)


@pytest.fixture
def store():
    return store_of_all()


@pytest.fixture
def rank(fake_devices, store):
    made = Rank(store)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("purpose", "advice"),
    [(TRAINING, "--resume continues the run"), (PREDICTION, "give the same command again")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_device_that_gets_no_further_names_the_lost_rank(fake_devices, store, purpose, advice):
    rank = Rank(store, purpose=purpose)
    Watch(store, place(1, 2)).note(4, "epoch 1, step 5")
    rank.stop_at(0)
    rank.assert_is_lost_after(LOOKS)
    rank.close()
    (error,) = rank.errors
    assert not isinstance(error, LostRankError)
    assert str(error).startswith(
        f"rank 1 (in epoch 1, step 5) hangs: no sign of life for {LIMIT:g} s; "
    )
    assert advice in str(error)


def test_a_rank_without_a_sign_of_life_is_lost_though_kernels_may_still_be_compiled(rank, store):
    store.set("alive/1", "7")
    with rank.watch.queueing(CPU):
        rank.assert_is_lost_after(LOOKS)
    (error,) = rank.errors
    assert str(error).startswith("rank 1 (in the start) hangs")


def test_a_rank_that_lives_or_has_ended_may_keep_the_others_waiting(rank, store):
    other = Watch(store, place(1, 2))
    with rank.watch.queueing(CPU):
        for number in range(2 * LOOKS):
            other._give_sign(number)
            rank.assert_goes_on(1)
        store.delete_key("alive/1")
        rank.assert_goes_on(2 * LOOKS)


def test_work_that_is_waited_for_before_all_is_queued_has_no_longer_limit(rank):
    """Such as an agreement between the ranks' GPUs in the middle of a step."""
    with rank.watch.queueing(CPU):
        rank.stop_at(0)
        rank.assert_is_lost_after(LOOKS)


def test_the_rest_of_a_step_is_queueing_too(rank, monkeypatch):
    """Queueing may take longer by the time in which kernels compile."""
    monkeypatch.setattr(watch, "QUEUEING_SECONDS", LIMIT)
    with rank.watch.queueing(CPU):
        rank.queue()
        rank.assert_is_lost_after(LOOKS + 4)


def test_progress_is_enough_however_far_the_main_thread_is_ahead(rank):
    for _ in range(1000):
        rank.queue()
    rank.device.allowed = 0
    for _ in range(5):
        rank.assert_goes_on(LOOKS - 1)
        rank.device.allowed += 1
    rank.assert_is_lost_after(LOOKS)


def test_a_device_that_has_done_all_may_wait_for_its_next_work(rank, monkeypatch):
    monkeypatch.setattr(watch, "QUEUEING_SECONDS", 0.0)
    rank.queue()
    rank.assert_goes_on(3 * LOOKS)
    rank.queue()
    rank.device.allowed = 1  # the time of the queued work now begins to count
    rank.assert_goes_on(LOOKS - 1)
    rank.device.allowed = 2
    rank.assert_goes_on(3 * LOOKS)
    with rank.watch.queueing(CPU):  # the driver's queue is full
        rank.assert_is_lost_after(LOOKS - 1)


def test_an_error_while_work_is_queued_leaves_nothing_to_wait_for(rank, monkeypatch):
    monkeypatch.setattr(watch, "QUEUEING_SECONDS", 0.0)
    with pytest.raises(torch.OutOfMemoryError), rank.watch.queueing(CPU):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert rank.device.number == 0
    rank.assert_goes_on(3 * LOOKS)


def test_a_rank_that_was_suspended_does_not_take_the_others_for_lost(rank):
    """Time counts only while the thread looks: here, one look in many limits."""
    rank.stop_at(0)
    rank.assert_goes_on(2)
    time.sleep(5 * LIMIT)
    rank.assert_goes_on(2)


def test_nothing_happens_after_the_end_of_the_watch(rank):
    before = threading.active_count()
    rank.stop_at(0)
    assert threading.active_count() == before + 1
    rank.device.allowed = 1
    rank.close()
    assert not rank.errors and threading.active_count() == before


def test_a_watch_that_ends_while_a_rank_is_named_does_not_end_it(rank, monkeypatch):
    is_naming, lost = threading.Event(), rank.watch.lost

    def named(hangs):
        rank.watch._closed.set()  # as ``close`` does before it waits for the thread
        is_naming.set()
        return lost(hangs)

    monkeypatch.setattr(rank.watch, "lost", named)
    rank.stop_at(0)
    rank.device.let_look(LOOKS)
    assert is_naming.wait(10)
    rank.watch.close()
    assert not rank.errors


def test_ranks_that_miss_one_say_so_together(fake_devices, store, monkeypatch):
    """Otherwise they would name each other, because one looks or notices later."""
    monkeypatch.setattr(watch, "GRACE_SECONDS", 2.0)
    late = Rank(store, 0, num_ranks=3)
    late.stop_at(0)
    late.assert_goes_on(3)  # a quarter of the time has passed
    early, named = Watch(store, place(2, 3)), list[RankError]()
    thread = threading.Thread(target=lambda: named.append(early.lost(hangs=True)))
    thread.start()
    store.wait(["missing/2"], timedelta(seconds=10))
    late.device.let_look(1)
    thread.join()
    assert late.ended.wait(10)
    late.close()
    for error in (*late.errors, *named):
        assert str(error).startswith("rank 1 (in the start) hangs")
    assert len(late.errors) == len(named) == 1


def test_a_rank_that_could_go_on_misses_nobody(fake_devices, store):
    first, second = (Watch(store, place(rank, 2)) for rank in range(2))
    with pytest.raises(LostRankError), first.translate_dist_errors():
        raise RuntimeError("[gloo/transport/tcp] Connection closed by peer")
    assert second.is_missed() and not first.is_missed()
    first.note(1, "window 1")
    assert not second.is_missed()


def test_devices_that_gloo_waits_for_are_not_watched(store):
    rank, before = Rank(store), threading.active_count()
    rank.queue()
    assert threading.active_count() == before
    rank.watch.close()
    with Group(Ranks()).watching(CPU):
        pass


@pytest.mark.gpu
def test_a_gpu_writes_how_far_it_is_into_host_memory():
    gpu = torch.device("cuda", 0)
    progress = GpuProgress(gpu)
    assert progress.reached() == 0
    progress.queue(1)  # the first use loads its kernels
    torch.cuda.synchronize()
    assert progress.reached() == 1
    for number in (2, 3):
        torch.cuda._sleep(2_000_000_000)  # about a second
        progress.queue(number)
    seen, deadline = {progress.reached()}, time.monotonic() + 60
    while 3 not in seen:
        assert time.monotonic() < deadline
        seen.add(progress.reached())
    assert seen == {1, 2, 3}
