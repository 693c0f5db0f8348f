"""Work in a thread of its own."""

import subprocess
import sys
import threading

import pytest

from tests.command_line import process_environment
from unet3d.inputs.ahead import ahead


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


def test_a_process_that_ends_does_not_wait_for_it():
    code = (
        "import sys, time\n"
        "from unet3d.inputs.ahead import ahead\n"
        "future = ahead(lambda: time.sleep(60))\n"
        "sys.exit(3)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=process_environment(), capture_output=True, timeout=30
    )
    assert (ended.returncode, ended.stderr) == (3, b"")
