"""A device that waits for ever for another rank ends its own, with one line; others go on."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.networks import write_checkpoint
from tests.process_trees import assert_all_end, children_of, family_of
from tests.rank_threads import place, store_of_all
from tests.ranks import environment, free_port, rank_variables
from tests.trainings import words
from tests.volumes.samples import noise, write_volume
from unet3d.distributed import device_watch, rank_watch
from unet3d.distributed.device_watch import DeviceWatch, GpuProgress
from unet3d.distributed.group import Group
from unet3d.distributed.purpose import PREDICTION, TRAINING, Purpose
from unet3d.distributed.rank_watch import RankWatch
from unet3d.distributed.ranks import Ranks
from unet3d.errors import LostRankError, RankError

CPU = torch.device("cpu")
LIMIT = 0.4
"""Silence in seconds after which a rank is lost."""


class FakeProgress:
    """A device that comes no further than it is allowed to."""

    def __init__(self, device: torch.device) -> None:
        self.queued: list[int] = []
        self.allowed = 10**6

    def queue(self, number: int) -> None:
        self.queued.append(number)

    def reached(self) -> int:
        return min(max(self.queued, default=0), self.allowed)


class Rank:
    """The watch of one rank, its only device, and the errors that it ends with."""

    def __init__(
        self,
        store: dist.Store,
        number: int = 0,
        num_ranks: int = 2,
        limit: float = LIMIT,
        purpose: Purpose = TRAINING,
    ) -> None:
        self.ranks = RankWatch(store, place(number, num_ranks), timedelta(seconds=limit), purpose)
        self.errors: list[RankError] = []
        self.ended = threading.Event()
        self.watch = DeviceWatch(self.ranks, self._end)

    def _end(self, error: RankError) -> None:
        self.errors.append(error)
        self.ended.set()

    def queue(self) -> None:
        with self.watch.queueing(CPU):
            pass

    @property
    def device(self) -> FakeProgress:
        progress = self.watch._devices[CPU].progress
        assert isinstance(progress, FakeProgress)
        return progress

    def stop_at(self, number: int) -> None:
        self.queue()
        self.device.allowed = number


@pytest.fixture
def fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_watch.PROGRESS, "cpu", FakeProgress)
    monkeypatch.setattr(rank_watch, "GRACE_SECONDS", 0.1)


@pytest.fixture
def store() -> dist.Store:
    return store_of_all()


@pytest.fixture
def rank(fake_devices: None, store: dist.Store) -> Iterator[Rank]:
    made = Rank(store)
    yield made
    made.watch.close()


@pytest.mark.parametrize(
    ("purpose", "advice"),
    [(TRAINING, "--resume continues the run"), (PREDICTION, "give the same command again")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_device_that_gets_no_further_names_the_lost_rank(
    fake_devices: None, store: dist.Store, purpose: Purpose, advice: str
) -> None:
    rank = Rank(store, purpose=purpose)
    RankWatch(store, place(1, 2), timedelta(seconds=LIMIT)).note(4, "epoch 1, step 5")
    rank.stop_at(0)
    began = time.monotonic()
    assert rank.ended.wait(10)
    seconds = time.monotonic() - began
    rank.watch.close()
    (error,) = rank.errors
    assert not isinstance(error, LostRankError)
    assert str(error).startswith(f"rank 1 (in epoch 1, step 5) hangs: nothing for {LIMIT:g} s; ")
    assert advice in str(error)
    assert LIMIT <= seconds < LIMIT + 2


def test_work_that_is_waited_for_before_all_is_queued_has_no_longer_limit(rank: Rank) -> None:
    """As where ranks agree on something on their GPUs in the middle of a step."""
    with rank.watch.queueing(CPU):
        rank.stop_at(0)
        assert rank.ended.wait(10)
    assert len(rank.errors) == 1


def test_the_rest_of_a_step_is_queueing_too(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "QUEUEING_SECONDS", LIMIT)
    with rank.watch.queueing(CPU):
        rank.queue()
        assert rank.ended.wait(10)


def test_progress_is_enough_however_far_the_main_thread_is_ahead(rank: Rank) -> None:
    for _ in range(1000):
        rank.queue()
    rank.device.allowed = 0
    for _ in range(20):  # which take several times the limit
        rank.device.allowed += 1
        time.sleep(LIMIT / 4)
    assert not rank.errors
    assert len(rank.watch._devices) == 1
    assert rank.ended.wait(10), "now it has stopped"


def test_a_device_that_has_done_all_may_wait_for_its_next_work(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_watch, "QUEUEING_SECONDS", 0.0)
    rank.queue()
    time.sleep(3 * LIMIT)
    rank.queue()
    time.sleep(LIMIT / 2)
    assert not rank.errors
    rank.stop_at(2)
    time.sleep(LIMIT / 2)
    assert not rank.errors, "time without work does not count"
    assert rank.ended.wait(10)


def test_the_main_thread_may_take_longer_to_queue_but_not_for_ever(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_watch, "QUEUEING_SECONDS", 4 * LIMIT)
    with rank.watch.queueing(CPU):
        time.sleep(3 * LIMIT)
    rank.device.allowed = 0  # what was queued then begins to count
    time.sleep(LIMIT / 2)
    assert not rank.errors
    rank.device.allowed = 1
    time.sleep(LIMIT)
    with rank.watch.queueing(CPU):
        assert rank.ended.wait(4 * LIMIT + 10), "the driver takes no more"


def test_an_error_while_work_is_queued_leaves_nothing_to_wait_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_watch, "QUEUEING_SECONDS", 0.0)
    with pytest.raises(torch.OutOfMemoryError), rank.watch.queueing(CPU):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert rank.device.queued == []
    time.sleep(2 * LIMIT)
    assert not rank.errors


def test_what_waited_until_its_group_was_aborted_counts_as_done(rank: Rank) -> None:
    """As with windows: the kernels of NCCL end, and the number behind them is noted."""
    rank.stop_at(0)
    time.sleep(LIMIT / 2)
    rank.device.allowed = 1
    time.sleep(3 * LIMIT)
    rank.queue()
    rank.device.allowed = 2
    time.sleep(3 * LIMIT)
    assert not rank.errors


def test_nothing_happens_after_the_end_of_the_watch(rank: Rank) -> None:
    rank.stop_at(0)
    rank.watch.close()
    time.sleep(2 * LIMIT)
    assert not rank.errors and rank.watch._thread is not None
    assert not rank.watch._thread.is_alive()


def test_a_watch_that_ends_while_a_rank_is_named_does_not_end_it(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_naming, lost = threading.Event(), rank.ranks.lost

    def named(hangs: bool) -> RankError:
        is_naming.set()
        return lost(hangs)

    monkeypatch.setattr(rank.ranks, "lost", named)
    monkeypatch.setattr(rank_watch, "GRACE_SECONDS", 0.5)
    rank.stop_at(0)
    assert is_naming.wait(10)
    rank.watch.close()
    assert not rank.errors


def test_ranks_that_miss_one_say_so_together(
    fake_devices: None, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would name each other, because one looks or notices later."""
    monkeypatch.setattr(rank_watch, "GRACE_SECONDS", 2.0)
    late = Rank(store, 0, num_ranks=3, limit=8)
    late.stop_at(0)
    time.sleep(3.2)  # more than a quarter of the time
    assert not late.errors
    early = RankWatch(store, place(2, 3), timedelta(seconds=8))
    assert str(early.lost(hangs=True)).startswith("rank 1 (in the start) hangs")
    assert late.ended.wait(3)
    late.watch.close()
    assert str(late.errors[0]).startswith("rank 1 (in the start) hangs")


def test_a_rank_that_could_go_on_misses_nobody(fake_devices: None, store: dist.Store) -> None:
    first, second = (RankWatch(store, place(r, 2), timedelta(seconds=LIMIT)) for r in range(2))
    with pytest.raises(LostRankError), first.translate_dist_errors():
        raise RuntimeError("[gloo/transport/tcp] Connection closed by peer")
    assert second.is_missed() and not first.is_missed()
    first.note(1, "window 1")
    assert not second.is_missed()


def test_a_rank_that_was_suspended_does_not_take_the_others_for_lost(rank: Rank) -> None:
    """Time counts only while the thread looks: here, one look in many limits."""
    rank.stop_at(0)
    device = rank.watch._devices[CPU]
    rank.watch.close()
    assert device.silence(LIMIT / 4) < LIMIT
    time.sleep(2 * LIMIT)
    assert device.silence(LIMIT / 4) < LIMIT


def test_devices_that_gloo_waits_for_are_not_watched(store: dist.Store) -> None:
    rank = Rank(store)
    rank.queue()
    assert rank.watch._thread is None and not rank.watch._devices
    rank.watch.close()
    with Group(Ranks()).watching(CPU):
        pass


@pytest.mark.gpu
def test_a_gpu_writes_how_far_it_is_into_host_memory() -> None:
    gpu = torch.device("cuda", 0)
    progress = GpuProgress(gpu)
    assert progress.reached() == 0
    progress.queue(1)  # which loads its kernels
    torch.cuda.synchronize()
    assert progress.reached() == 1
    for number in (2, 3):
        torch.cuda._sleep(2_000_000_000)  # about a second
        progress.queue(number)
    seen = [progress.reached()]
    deadline = time.monotonic() + 60
    while seen[-1] < 3:
        assert time.monotonic() < deadline
        if (number := progress.reached()) != seen[-1]:
            seen.append(number)
    assert seen == [1, 2, 3]


# In processes: the main thread of rank 0 stops where nothing reaches it, and rank 1 altogether

SPREAD = {
    "spatial": ("parallel.mode=spatial",),
    "data": ("parallel.mode=data", "training.batch_size=3"),
}
SHORT = ("parallel.devices=cpu,cpu", "parallel.timeout_seconds=4", "training.epochs=1000")
LATER = ("training.validate_every=1000", "training.save_every_seconds=0")
SECONDS = 60
"""More than any of these takes."""


def variables(folder: Path, limit: str | None = None, *, is_stuck: bool = True) -> dict[str, str]:
    """Return variables with which rank 0 gets stuck as soon as there is a file ``stuck``.

    Args:
        folder: Of that file.
        limit: Seconds after which a rank is lost, of commands that have no option for it.
        is_stuck: Whether it gets stuck at all.
    """
    (folder / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ:\n    import tests.distributed.stuck_device\n"
    )
    own = environment()
    own["PYTHONPATH"] = os.pathsep.join([str(folder), own["PYTHONPATH"]])
    if is_stuck:
        own["UNET3D_TEST_STUCK"] = str(folder / "stuck")
    return own if limit is None else own | {"UNET3D_TEST_LIMIT": limit}


def command(arguments: Sequence[object], own: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unet3d", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own,
    )


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lose_second(folder: Path, process: subprocess.Popen[str], second: int) -> None:
    """Have rank 0 stop in its next call, then stop rank 1 while it waits for it."""
    (folder / "stuck").touch()
    wait_until((folder / "stuck.0").exists, process)
    os.kill(second, signal.SIGSTOP)


def assert_named(status: int, errors: str, advice: str) -> None:
    reasons = [line for line in errors.splitlines() if "rror" in line]
    assert len(reasons) == 1 and reasons[0].startswith("Error: rank 1 (in "), errors
    assert "hangs: nothing for" in reasons[0] and advice in reasons[0]
    assert "Traceback" not in errors
    assert status == 1


def assert_ends(process: subprocess.Popen[str], family: list[int], advice: str) -> None:
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        for one in (process.pid, *family):
            os.kill(one, signal.SIGKILL)
        process.communicate()
        raise
    assert_named(process.returncode, errors, advice)
    assert_all_end(family, 10)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", SPREAD)
def test_the_command_names_a_rank_that_a_device_of_another_waits_for(
    mode: str, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = words(folder, cache, *SPREAD[mode], *SHORT, *LATER)
    process = command(arguments, variables(tmp_path))
    wait_until((folder / "checkpoint-latest.pt").exists, process)
    family, ranks = family_of(process.pid), children_of(process.pid)
    lose_second(tmp_path, process, ranks[1])
    assert_ends(process, family, "--resume")


def predict_many(folder: Path, own: dict[str, str], devices: str) -> subprocess.Popen[str]:
    """Segment many scans in one piece each, and return when the first is done."""
    first = write_volume(folder / "scans/0.nii.gz", noise((40, 36, 33)))
    for number in range(1, 200):
        shutil.copy(first, folder / f"scans/{number}.nii.gz")
    checkpoint, out = write_checkpoint(folder / "network.pt"), folder / "out"
    network = ("predict", first.parent, "--checkpoint", checkpoint, "-o", out)
    spread = ("--parallel", "spatial", "--devices", devices, "--window", "whole")
    process = command((*network, *spread), own)
    wait_until(lambda: any(out.glob("*_seg.nii.gz")), process)
    return process


@pytest.mark.nightly
def test_predict_names_a_rank_that_a_device_of_another_waits_for(tmp_path: Path) -> None:
    process = predict_many(tmp_path, variables(tmp_path, "2"), "cpu,cpu")
    family, ranks = family_of(process.pid), children_of(process.pid)
    lose_second(tmp_path, process, ranks[1])
    assert_ends(process, family, "give the same command again")


@pytest.mark.nightly
@pytest.mark.parametrize("devices", ["cpu,cpu", pytest.param("0,1", marks=pytest.mark.multigpu)])
def test_a_frozen_rank_of_a_prediction_is_named(devices: str, tmp_path: Path) -> None:
    limit = "4" if devices == "cpu,cpu" else "20"  # GPUs compile kernels, one longer than another
    process = predict_many(tmp_path, variables(tmp_path, limit, is_stuck=False), devices)
    family, ranks = family_of(process.pid), children_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    assert_ends(process, family, "give the same command again")


@pytest.mark.nightly
@pytest.mark.multigpu
def test_a_frozen_replica_on_a_gpu_is_named(cache: Path, tmp_path: Path) -> None:
    """Shards are in ``tests/faults/test_shards.py``."""
    folder = tmp_path / "run"
    on_gpus = ("parallel.devices=0,1", "parallel.timeout_seconds=20")
    changes = (*SPREAD["data"], *SHORT, *on_gpus, *LATER)
    process = command(words(folder, cache, *changes), environment())
    wait_until((folder / "checkpoint-latest.pt").exists, process)
    family, ranks = family_of(process.pid), children_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    assert_ends(process, family, "--resume")


@pytest.mark.nightly
def test_a_rank_of_torchrun_says_it_once_itself(cache: Path, tmp_path: Path) -> None:
    folder, port, own = tmp_path / "run", free_port(), variables(tmp_path)
    arguments = words(folder, cache, *SPREAD["spatial"], *SHORT, *LATER)
    ranks = [command(arguments, own | rank_variables(rank, 2, port)) for rank in range(2)]
    try:
        wait_until((folder / "checkpoint-latest.pt").exists, ranks[0])
        lose_second(tmp_path, ranks[0], ranks[1].pid)
        _, errors = ranks[0].communicate(timeout=SECONDS)
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    assert_named(ranks[0].returncode, errors, "--resume")
