"""Worker processes: what they return, and that they end with the process that started them."""

import multiprocessing
import os
import signal
import time

import pytest

from tests import warm
from tests.distributed.unfinished_work import work_in_workers
from tests.process_trees import assert_all_end, family_of
from unet3d.distributed import workers
from unet3d.distributed.processes import die_with_parent
from unet3d.distributed.workers import end_workers, map_items
from unet3d.errors import DatasetError


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_are_in_the_order_of_the_items(num_workers, forked_workers):
    told = []
    assert map_items(abs, [-3, 2, -1], num_workers, told.append) == [3, 2, 1]
    assert told == [1, 2, 3]


def test_a_killed_worker_is_explained(forked_workers):
    with pytest.raises(DatasetError, match="killed.*data.num_workers"):
        map_items(os._exit, [9, 9], 2)


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGKILL, False),
        (signal.SIGTERM, True),  # as launchers send it
        (signal.SIGHUP, True),  # as a closed terminal sends it
    ],
)
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_end_with_their_parent(number, whole_group, start, tmp_path):
    parent = warm.call(work_in_workers, tmp_path, start)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 2:
        assert parent.poll() is None, parent.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = family_of(parent.pid)
    assert len(family) >= 2
    (os.killpg if whole_group else os.kill)(parent.pid, number)
    _, errors = parent.communicate(timeout=60)
    assert_all_end(family, 60)
    assert errors == ""
    if number == signal.SIGKILL:
        assert parent.returncode == -number
    else:
        assert parent.returncode == 128 + number
        assert list(tmp_path.iterdir()) == []  # the workers have cleaned up


def be_deaf(ready):
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)


@pytest.mark.nightly
def test_workers_that_do_not_listen_are_killed(monkeypatch):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=be_deaf, args=(ready,))
    child.start()
    assert ready.wait(30)
    monkeypatch.setattr(workers, "CLEANING_SECONDS", 0.1)
    end_workers([child])
    child.join(5)
    assert child.exitcode == -signal.SIGKILL
