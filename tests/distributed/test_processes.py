"""Child processes that end with their parent, and receive signals from their parent only."""

import subprocess
import sys

from tests.process_trees import assert_all_end
from tests.ranks import environment

CHILD = """
import time
from unet3d.distributed.processes import die_with_parent
die_with_parent()
print("started", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def python(code):
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def test_a_child_ends_with_its_parent():
    parent = python(PARENT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert_all_end([child], 5)


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    late = python(
        "from unet3d.distributed.processes import die_with_parent; die_with_parent(1_000_000_000)"
    )
    late.communicate(timeout=20)
    assert late.returncode == 1
