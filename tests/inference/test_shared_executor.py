"""Windows that ranks compute together: the same logits, and what fails in one of them."""

import subprocess
import sys

import pytest

from tests import warm
from tests.inference import rank_windows
from tests.ranks import environment
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inference.shared_executor import SharedExecutor


def errors_in(folder):
    """Return what the first rank is told where one fails, by the name of what happens."""
    return {path.stem: path.read_text() for path in folder.glob("*.txt")}


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Everything that ranks do on a CPU, in forks of one process."""
    folder = tmp_path_factory.mktemp("windows")
    done = warm.run_call(rank_windows.main, folder, timeout=250)
    assert done.returncode == 0, done.stderr
    return errors_in(folder)


def test_a_window_that_does_not_fit_a_rank_is_refused_and_all_go_on(errors):
    """The ranks have compared what they compute afterwards, as before."""
    for rank in (0, 1):
        expected = (
            f"DoesNotFitError: a slab of the window does not fit on cpu of rank {rank} (CUDA out "
            "of memory); use a smaller inference.window or more devices"
        )
        assert errors[f"memory-{rank}"] == errors[f"again-{rank}"] == expected
    # Nor has each of three ranks a plane.
    assert "2x16x16 voxels has 2 planes along X, too few for 3" in errors["planes-0"]
    assert errors["planes-0"].endswith("use at most 2")


def test_a_rank_that_ends_or_hangs_in_a_window_or_after_it_is_named(errors):
    gone = "LostRankError: rank 1 (in window 1) is gone; give the same command again"
    assert errors["killed"] == gone
    for when in ("hanging", "late"):
        assert errors[when] == (
            "RankError: rank 1 (in window 1) hangs: nothing for 5 s; give the same command again"
        )


@pytest.mark.multigpu
def test_gpus_share_windows_and_go_on_when_one_is_full(tmp_path):
    command = [sys.executable, "-m", "tests.inference.rank_windows", str(tmp_path), "gpus"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = errors_in(tmp_path)
    for rank in (0, 1):
        assert f"does not fit on cuda:{rank} of rank {rank}" in found[f"memory-{rank}"]


def test_a_single_rank_shares_nothing():
    with pytest.raises(RuntimeError, match="no other to share windows with"):
        SharedExecutor(None, Group(Ranks()), 1)  # type: ignore[arg-type]
