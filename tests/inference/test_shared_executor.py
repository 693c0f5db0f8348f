"""Windows that ranks compute together: the same logits, and what fails in one of them."""

import subprocess
import sys

import pytest

from tests.ranks import environment
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inference.shared_executor import SharedExecutor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Everything that ranks do in one process: what the first of them is told, by its name."""
    folder = tmp_path_factory.mktemp("windows")
    command = [sys.executable, "-m", "tests.inference.rank_windows", str(folder)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: path.read_text() for path in folder.glob("*.txt")}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_runs_out_of_memory_is_named_and_all_go_on(
    errors: dict[str, str], rank: int
) -> None:
    """The process has compared what they compute afterwards."""
    assert errors[f"memory-{rank}"] == (
        f"DoesNotFitError: a slab of the window does not fit on cpu of rank {rank} (CUDA out of "
        "memory); use a smaller inference.window or more devices"
    )


def test_a_window_of_too_few_planes_is_refused_and_all_go_on(errors: dict[str, str]) -> None:
    assert "2x16x16 voxels has 2 planes along X, too few for 3" in errors["planes"]
    assert errors["planes"].endswith("use at most 2")


@pytest.mark.parametrize("how", ["killed", "faulty"])
def test_a_rank_that_ends_in_a_window_is_named(errors: dict[str, str], how: str) -> None:
    assert errors[how] == (
        "LostRankError: rank 1 (in window 1) is gone; give the same command again"
    )


def test_a_rank_that_hangs_in_a_window_is_named(errors: dict[str, str]) -> None:
    assert errors["hanging"] == (
        "RankError: rank 1 (in window 1) hangs: nothing for 1 s; give the same command again"
    )


def test_a_signal_to_one_rank_stops_the_first(errors: dict[str, str]) -> None:
    assert errors["stopped"] == "Interrupted: SIGTERM"


def test_a_single_rank_shares_nothing() -> None:
    with pytest.raises(RuntimeError, match="no other to share windows with"):
        SharedExecutor(lambda: 1 / 0, Group(Ranks()), 1)  # type: ignore[arg-type, return-value]
