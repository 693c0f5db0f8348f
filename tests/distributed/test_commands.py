"""Several commands in order or in parallel: their output, and how they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.process_trees import assert_all_end, children_of
from unet3d.cli.predict import WAITING_COMMAND
from unet3d.distributed import PARENT, SHARED_BY
from unet3d.distributed.commands import (
    CommandProcess,
    import_variables,
    loading_ahead,
    run_commands,
)
from unet3d.distributed.ranks import num_cores
from unet3d.interruption import Interrupted

GOOD = ("config",)
BAD = ("config", "--set", "nonsense=1")


def run(*arguments, slots, goes_on=True, on_cpu=True):
    """Return the statuses and the output of commands."""
    commands = {f"c{index}": one for index, one in enumerate(arguments)}
    said = []
    statuses = run_commands(
        commands, slots, on_cpu=on_cpu, say=said.append, goes_on_after=lambda name: goes_on
    )
    return statuses, said


def test_what_commands_say_at_the_same_time_has_their_names():
    statuses, said = run(GOOD, BAD, GOOD, slots=[()] * 2)
    assert statuses == {"c0": 0, "c1": 1, "c2": 0}
    (line,) = said  # the results of commands in parallel are not shown
    assert line.startswith("c1: Error: ") and "nonsense" in line


@pytest.mark.nightly
def test_one_at_a_time_writes_to_the_terminal_and_a_failure_may_be_the_end(capfd):
    assert run(BAD, GOOD, slots=[()]) == ({"c0": 1, "c1": 0}, [])
    captured = capfd.readouterr()
    assert captured.out.startswith("#") and captured.err.startswith("Error: ")
    assert run(BAD, GOOD, slots=[()], goes_on=False)[0] == {"c0": 1}


@pytest.mark.nightly
def test_each_slot_adds_its_own_words():
    slots = (("--set", "one=1"), ("--set", "two=2"))
    _, said = run(GOOD, GOOD, slots=slots, on_cpu=False)
    assert ["one" in line for line in sorted(said)] == [True, False]


def test_commands_share_the_cores(monkeypatch):
    alone = num_cores()
    monkeypatch.setenv(SHARED_BY, "2")
    assert num_cores() == max(1, alone // 2)
    monkeypatch.setenv(SHARED_BY, str(10 * alone))
    assert num_cores() == 1


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A folder in which each command leaves a file before it hangs while importing."""
    (tmp_path / "begun").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'unet3d.config.configuration':\n"
        f"            open(f'{tmp_path}/begun/{{os.getpid()}}', 'w').close()\n"
        "            time.sleep(1000)\n"
        f"if {PARENT!r} in os.environ:\n"
        "    sys.meta_path.insert(0, Slow())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "begun"


def wait_for(begun, number):
    """Return the process ids of the commands as soon as ``number`` have begun."""
    deadline = time.monotonic() + 60
    while len(found := [int(path.name) for path in begun.iterdir()]) < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_signal_ends_all_and_nothing_new_begins(begun, num_slots):
    def interrupt():
        wait_for(begun, num_slots)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="SIGTERM"):
        run(GOOD, GOOD, GOOD, slots=[()] * num_slots)
    thread.join()
    ended = wait_for(begun, num_slots)
    assert len(ended) == num_slots
    assert_all_end(ended, 0)


def test_killing_the_first_process_leaves_no_other(begun):
    code = (
        "from unet3d.distributed.commands import *; "
        "run_commands({'a': ('config',)}, [()], on_cpu=True, "
        "say=print, goes_on_after=lambda _: True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **import_variables()}
    )
    (child,) = wait_for(begun, 1)
    assert f"{PARENT}={process.pid}".encode() in Path(f"/proc/{child}/environ").read_bytes()
    process.kill()
    process.wait()
    assert_all_end([child], 10)


def test_a_process_that_waits_takes_the_command_and_others_end(capfd):
    before = set(children_of(os.getpid()))
    with loading_ahead(WAITING_COMMAND, 2, {PARENT: str(os.getpid())}):
        told = CommandProcess([WAITING_COMMAND, "--help"], {}, None)
        assert len(set(children_of(os.getpid())) - before) == 2
        while told.status() is None:
            time.sleep(0.05)
        assert told.status() == 0
    told.end()
    assert not set(children_of(os.getpid())) - before
    assert "then run the command" in capfd.readouterr().out
