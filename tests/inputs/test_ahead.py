"""Work that runs ahead in its own thread."""

import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from tests.command_line import process_environment
from unet3d.inputs import ahead as module
from unet3d.inputs.ahead import ahead, each_ahead, in_threads


def test_work_is_done_meanwhile():
    may_end, begun = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert may_end.wait(10)
        return threading.current_thread().name

    future = ahead(work)
    assert begun.wait(10) and not future.done()
    may_end.set()
    assert future.result(10) == "ahead" != threading.current_thread().name


@pytest.mark.parametrize("kind", [ValueError, MemoryError, KeyboardInterrupt, SystemExit])
def test_whatever_is_raised_arrives_where_the_result_is_asked_for(kind):
    def work():
        raise kind("why")

    future = ahead(work)
    with pytest.raises(kind, match="why"):
        future.result(10)


def test_items_are_worked_on_in_their_order_by_some_threads():
    going_on, begun, condition = threading.Event(), [], threading.Condition()

    def work(item):
        with condition:
            begun.append(item)
            condition.notify_all()
        assert going_on.wait(10)
        if item == 3:
            raise ValueError("three")
        return item**2

    futures = each_ahead(work, range(6), num_threads=2)
    with condition:
        assert condition.wait_for(lambda: len(begun) == 2, 10)
    assert [future.cancel() for future in futures] == [False] * 2 + [True] * 4
    futures[2:] = each_ahead(work, range(2, 6))
    going_on.set()
    with pytest.raises(ValueError, match="three"):
        futures[3].result(10)
    del futures[3]
    assert [future.result(10) for future in futures] == [0, 1, 4, 16, 25]
    assert (sorted(begun[:2]), begun[2:]) == ([0, 1], [2, 3, 4, 5])
    assert each_ahead(work, []) == []


def test_results_are_in_order_and_the_first_error_waits_for_nobody():
    watched, may_end, reading = [], threading.Event(), threading.Event()
    assert in_threads(lambda item: item**2, [3, 1, 2], 2, watched.append) == [9, 1, 4]
    assert watched == [1, 2, 3]
    begun = []

    def work(item):
        begun.append(item)
        if item == 0:
            assert reading.wait(10)
            raise ValueError("damaged")
        reading.set()
        assert may_end.wait(60)

    with pytest.raises(ValueError, match="damaged"):
        in_threads(work, range(100), 2)
    assert not may_end.is_set() and len(begun) <= 3
    may_end.set()


def test_a_thread_that_could_not_start_does_not_matter_at_the_end(monkeypatch):
    monkeypatch.setattr(module, "_working", {})
    monkeypatch.setattr(module.Thread, "start", Mock(side_effect=RuntimeError("no more threads")))
    with pytest.raises(RuntimeError, match="no more"):
        ahead(int)
    assert len(module._working) == 1
    module._end_work()


@pytest.mark.nightly
@pytest.mark.parametrize("work", ["time.sleep", "lambda _: [numbers.sort() for _ in range(20)]"])
def test_a_process_that_ends_waits_for_it_only_shortly(work):
    """PyTorch would abort a process that ends during its work."""
    code = (
        "import sys, time, torch\n"
        "from unet3d.inputs.ahead import each_ahead\n"
        "numbers = torch.rand(10**5)\n"
        f"one, *others = each_ahead({work}, [60] * 40, num_threads=2)\n"
        "while not one.running():\n"
        "    pass\n"
        "sys.exit(3)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=process_environment(), capture_output=True, timeout=30
    )
    assert (ended.returncode, ended.stderr) == (3, b"")
