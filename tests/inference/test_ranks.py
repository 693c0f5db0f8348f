"""Ranks that segment images together: the same labels as one process, and how they end."""

import subprocess
import sys

import pytest

from tests import warm
from tests.inference import rank_images
from tests.ranks import environment


def test_ranks_segment_as_one_process_and_name_what_ends_them(tmp_path):
    """The ranks compare their labels themselves; see ``rank_images.py``."""
    gone = "LostRankError: rank 1 (in the start) is gone; give the same command again"
    done = warm.run_call(rank_images.main, tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr
    assert {path.stem: path.read_text() for path in tmp_path.iterdir()} == {
        "memory-0": gone,
        "memory-1": "DoesNotFitError: windows of 16x16x16 voxels do not fit on cpu (CUDA out of "
        "memory); use a smaller inference.window or more devices",
        "killed-0": gone,
    }


@pytest.mark.multigpu
def test_gpus_segment_as_one_process(tmp_path):
    command = [sys.executable, "-m", "tests.inference.rank_images", str(tmp_path), "gpus"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
