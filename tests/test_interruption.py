import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ranks import environment
from unet3d.interruption import SIGNALS, deferred_interruption, postponed_interruption


@pytest.fixture(autouse=True)
def handlers():
    """All signals act like Ctrl-C in a terminal."""
    before = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request_and_the_second_acts_but_a_rank_is_told_more_often(number):
    with deferred_interruption() as request:
        assert request.signal_number is None
        signal.raise_signal(number)
        assert request.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    with deferred_interruption(is_rank=True) as request:
        for _ in range(3):
            signal.raise_signal(number)
        assert request.signal_number == number
    with pytest.raises(KeyboardInterrupt):  # handlers are restored
        signal.raise_signal(number)


def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with deferred_interruption() as request:
        signal.raise_signal(signal.SIGHUP)
        assert request.signal_number is None


@pytest.mark.parametrize("context", [deferred_interruption, postponed_interruption])
def test_a_thread_of_another_program_changes_no_handler(context):
    def handlers_within():
        with context():
            return [signal.getsignal(number) for number in SIGNALS]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(handlers_within).result() == [signal.default_int_handler] * 3


@pytest.mark.parametrize("number", SIGNALS)
def test_another_program_handles_what_was_postponed_once(number):
    heard = []
    signal.signal(number, lambda heard_number, _: heard.append(heard_number))
    with postponed_interruption():
        with postponed_interruption():
            signal.raise_signal(number)
        assert heard == []
    assert heard == [number]


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    """Python does not know it, and could not restore it."""
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda one: None if one == 15 else known(one))
    with deferred_interruption() as request:
        with pytest.raises(KeyboardInterrupt):  # from the handler of these tests
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert request.signal_number == signal.SIGINT


def in_a_program(code, tmp_path):
    """Run code in a program that handles signals like ours."""
    (tmp_path / "interrupted_import.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except BaseException:\n"
        "    pass\n"
    )
    before = (
        "import os, signal, time\n"
        "from unet3d.interruption import *\n"
        "stop_on_signals(is_rank='RANK' in os.environ)\n"
    )
    own = environment()
    own["PYTHONPATH"] += f":{tmp_path}"
    return subprocess.run(
        [sys.executable, "-c", before + code], env=own, timeout=100, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("signal.raise_signal(signal.SIGHUP)", 129),
        ("with interruptible():\n    import interrupted_import", 130),
        ("with interruptible():\n    pass\nsignal.raise_signal(signal.SIGTERM)", 143),
    ],
    ids=("start", "import", "end"),
)
def test_a_signal_ends_a_program_at_once_that_does_nothing_yet(code, status, tmp_path):
    done = in_a_program(f"{code}\nprint('went on')", tmp_path)
    name = signal.Signals(status - 128).name
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"Stopped by {name}\n")


RAISES = """
try:
    with interruptible():
        {}
except Interrupted as interruption:
    print(interruption, interruption.exit_status, flush=True)
"""


@pytest.mark.parametrize(
    "code",
    [
        "signal.raise_signal(signal.SIGTERM)",
        "type('Gone', (), {'__del__': lambda _: signal.raise_signal(15)})(); time.sleep(9)",
    ],
    ids=("anywhere", "where exceptions are lost"),
)
def test_a_signal_interrupts_a_command(code, tmp_path):
    done = in_a_program(RAISES.format(code), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "SIGTERM 143\n", "")


COUNTS = """
import torch
from unet3d.memory.allocations import counted_allocations
try:
    with interruptible(), counted_allocations():
        torch.empty(3)
        signal.raise_signal(15)
        with counted_allocations():
            print(torch.empty(3).shape)
        print('counted')
    print('not interrupted')
except Interrupted as interruption:
    print(interruption, interruption.exit_status)
"""


@pytest.mark.nightly
def test_a_signal_interrupts_no_counting_of_allocations(tmp_path):
    """Some of PyTorch's operations would end the process by SIGABRT."""
    done = in_a_program(COUNTS, tmp_path)
    expected = "torch.Size([3])\ncounted\nSIGTERM 143\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_second_signal_ends_at_once_but_not_a_rank(tmp_path, monkeypatch):
    code = RAISES.format("signal.raise_signal(15)") + "    signal.raise_signal(2)\nprint('end')"
    done = in_a_program(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "SIGTERM 143\n",
        "Stopped by SIGINT\n",
    )
    monkeypatch.setenv("RANK", "0")
    done = in_a_program(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "SIGTERM 143\nend\n", "")


HOLDS = """
import sys, tempfile
tempfile.tempdir = {!r}
from unet3d.atomic import replacing, temporary_folder
with interruptible(), temporary_folder("test") as folder:
    (folder / "file").touch()
    with replacing(folder.parent / "file", may_exist=False) as unfinished:
        {}
"""


@pytest.mark.parametrize(
    "moment",
    [
        "signal.raise_signal({})",
        "import interrupted_import",
        "signal.raise_signal(15 if {0} != 15 else 2) if not os.fork() else os.wait(); "
        "signal.raise_signal({0})",
        "try: signal.raise_signal(2)\n        finally: signal.raise_signal({})",
        "from unet3d.interruption import *\n        with postponed_interruption():\n"
        "            signal.raise_signal(2); signal.raise_signal({})",
    ],
    ids=["once", "in an import", "after a child's", "twice", "postponed and twice"],
)
def test_what_is_temporary_goes_with_the_process(moment, tmp_path):
    place = tmp_path / "temporary"
    place.mkdir()
    done = in_a_program(HOLDS.format(str(place), moment.format(int(signal.SIGHUP))), tmp_path)
    assert done.returncode != 0
    assert not list(place.iterdir()), done.stderr
