"""Several ranks train what one process trains, and say which of them is missing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.rank_training import EXACT
from tests.ranks import environment
from tests.trainings import assert_same_validation, losses, run, settings, weights
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same training by one process, by two ranks, and by one and then two.

    Two epochs, and a third that was added; ``hybrid`` does it on two replicas of two stages.
    """
    folder = tmp_path_factory.mktemp("runs")
    run(settings(cache, *EXACT, "training.epochs=2"), folder / "plain")
    shutil.copytree(folder / "plain", folder / "hybrid")
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.distributed.rank_training",
        str(folder),
        str(cache),
    ]
    done = subprocess.run(
        command, env=environment(), timeout=200, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "data", folder / "data-alone")
    for name in ("plain", "data"):
        run(settings(cache, *EXACT), folder / name, resume=True)
    return folder


@pytest.mark.parametrize("name", ["data", "hybrid"])
def test_ranks_have_the_loss_curve_of_one_process(runs: Path, name: str) -> None:
    expected = losses(runs / "plain")
    assert [epoch for epoch, _ in expected] == [1, 2, 3]
    for (_, loss), (_, wanted) in zip(losses(runs / name), expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-8)
    wanted_weights = weights(runs / "plain")
    for key, value in weights(runs / name).items():
        torch.testing.assert_close(value, wanted_weights[key], rtol=1e-7, atol=1e-9, msg=key)


def test_the_dice_counts_each_case_once(runs: Path) -> None:
    dice = [
        [line.get("dice") for line in RunFolder(runs / name).read_metrics()]
        for name in ("plain", "data", "hybrid")
    ]
    assert dice[0] == dice[1] == dice[2]
    assert dice[0][1] is not None


@pytest.mark.parametrize("name", ["data", "hybrid"])
def test_weights_are_the_same_in_all_ranks_to_the_bit(runs: Path, name: str) -> None:
    first, second = (torch.load(runs / f"{name}-{rank}.pt") for rank in range(2))
    saved = runs / ("data-alone" if name == "data" else name) / "checkpoint-latest.pt"
    stored = load_checkpoint(saved).model
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
        assert torch.equal(value, stored[key]), key


def test_the_memory_report_has_a_row_for_each_stage_of_each_replica(runs: Path) -> None:
    slots = json.loads((runs / "hybrid" / "memory.json").read_text())["slots"]
    assert [slot["slot"] for slot in slots] == [0, 1, 2, 3]
    assert [slot["rank"] for slot in slots] == [0, 0, 1, 1]
    assert slots[0]["blocks"] == slots[2]["blocks"] != slots[1]["blocks"]
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        for slot in slots:
            assert slot["measured"][kind] == slot["predicted"][kind] > 0
    summary = json.loads((runs / "data-alone" / "summary.json").read_text())
    assert summary["replicas"] == 2
    assert len(summary["devices"]) == 2


@pytest.mark.parametrize("name", ["data", "hybrid"])
def test_the_validation_is_predicted_as_by_one_process(runs: Path, name: str) -> None:
    assert_same_validation(runs / name, runs / "plain")


def test_only_the_first_rank_writes(runs: Path) -> None:
    names = {path.name for path in (runs / "data-alone").iterdir()}
    assert names == {path.name for path in (runs / "plain").iterdir()}
    assert len(list((runs / "data-alone" / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("when", ["step", "exchange"])
def test_a_dead_rank_is_named(runs: Path, when: str) -> None:
    text = (runs / f"killed-{when}.txt").read_text()
    assert text.startswith("LostRankError: rank 1 (in epoch 2, step 3) is gone")


@pytest.mark.parametrize("when", ["step", "exchange"])
def test_a_hanging_rank_is_named_with_its_step(runs: Path, when: str) -> None:
    text = (runs / f"hanging-{when}.txt").read_text()
    assert text.startswith("RankError: rank 1 (in epoch 2, step 3) hangs: nothing for 1 s")


def ended_by(folder: Path, code: str) -> tuple[int, str, dict[str, str]]:
    """Return exit status, errors and report of a rank whose threads end it."""
    head = "import threading, time\nfrom unet3d.distributed import ranks\n"
    head += "from unet3d.errors import RankError\nerror = RankError('rank 1 hangs')\n"
    own = environment() | {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        env=own,
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr, json.loads((folder / "error.json").read_text())


def test_of_several_threads_one_says_why_the_process_ends(tmp_path: Path) -> None:
    code = """
for _ in range(20):
    threading.Thread(target=ranks.end_process, args=(error,)).start()
time.sleep(50)
"""
    status, errors, report = ended_by(tmp_path, code)
    assert (status, errors, report["kind"]) == (1, "Error: rank 1 hangs\n", "hang")


def test_a_main_thread_that_says_why_but_cannot_end_is_ended(tmp_path: Path) -> None:
    code = """
ranks.LEAVE_SECONDS = 0.2
ranks.report_end(error, "hang")
threading.Thread(target=ranks.end_process, args=(RankError("again"),)).start()
time.sleep(50)
"""
    status, errors, report = ended_by(tmp_path, code)
    assert (status, errors, report["kind"]) == (1, "", "hang")
    assert "rank 1 hangs" in str(report)
