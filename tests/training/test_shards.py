"""Trainings over slabs of volumes are those of one process, alone or one after the other."""

import json
from pathlib import Path

import pytest

from tests import warm
from tests.training import shard_training
from tests.training.shard_training import CHAIN
from tests.trainings import assert_same_validation, losses, start
from unet3d.runs.run_folder import RunFolder

pytestmark = pytest.mark.nightly

NUM_STEPS = 40
TOLERANCE = 1e-8


@pytest.fixture(scope="module")
def runs(cache, tmp_path_factory):
    """Folder of the runs that ``shard_training`` makes, under the names of their ways."""
    folder = tmp_path_factory.mktemp("runs")
    done = warm.run_call(shard_training.main, folder, cache, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


def steps_of(runs: Path, name: str, rank: int) -> dict[int, tuple[float, int]]:
    """Return the loss and the number of samples of each step that a rank has taken."""
    lines = (runs / f"{name}-{rank}.jsonl").read_text().splitlines()
    taken = {number: (loss, num_samples) for number, loss, num_samples in map(json.loads, lines)}
    assert len(taken) == len(lines), "a step was taken twice"
    return taken


def curve(runs: Path, name: str) -> dict[int, float]:
    """Return the loss of the whole batch in each step: the mean over what the ranks have seen."""
    ranks = [
        steps_of(runs, name, rank) for rank in range(len(list(runs.glob(f"{name}-[0-9].jsonl"))))
    ]
    seen = {step: [rank[step] for rank in ranks if step in rank] for step in ranks[0]}
    return {
        step: sum(loss * number for loss, number in own) / sum(number for _, number in own)
        for step, own in seen.items()
    }


def test_a_run_goes_on_in_any_mode_with_the_same_curve(runs):
    expected = curve(runs, "none")
    assert list(expected) == list(range(NUM_STEPS))
    assert expected[NUM_STEPS - 1] < 0.7 * expected[0]
    actual = curve(runs, "chain")
    assert list(actual) == list(range(NUM_STEPS))
    assert actual == pytest.approx(expected, rel=TOLERANCE)
    # One process has taken the steps after the first stop of two ranks.
    assert set(actual) - set(steps_of(runs, "chain", 1)) == set(range(11, 18))
    in_data = steps_of(runs, "chain", 0)[20]
    assert in_data[1] == 1 and in_data != steps_of(runs, "chain", 1)[20]
    for stop in [last for _, last in CHAIN if last is not None]:
        state = json.loads((runs / f"stopped-{stop}.json").read_text())
        assert state["step"] > 0
        assert state["num_samples"] == 2 * state["step"], stop


@pytest.mark.parametrize("name", ["brief-thirds", "brief-groups"])
def test_uneven_slabs_and_groups_have_the_curve_of_one_process(runs, name):
    assert curve(runs, name) == pytest.approx(curve(runs, "brief-none"), rel=TOLERANCE)
    # Each shard has the loss of the volume, to the bit.
    assert steps_of(runs, name, 1) == steps_of(runs, name, 0)
    summary = json.loads((runs / name / "summary.json").read_text())
    num_ranks = [1, 3] if name == "brief-thirds" else [2, 2]
    assert [summary[key] for key in ("parallel", "replicas", "shards")] == ["spatial", *num_ranks]


def test_memory_has_a_row_for_each_shard_as_predicted(runs):
    rows = json.loads((runs / "brief-thirds" / "memory.json").read_text())["slots"]
    assert [(row["slot"], row["rank"], row["device"]) for row in rows] == [
        (number, number, "cpu") for number in range(3)
    ]
    assert all(row["measured"] == row["predicted"] for row in rows)
    whole = json.loads((runs / "brief-none" / "memory.json").read_text())["slots"][0]
    largest = max(row["measured"]["activations_bytes"] for row in rows)
    assert largest < 0.6 * whole["measured"]["activations_bytes"]


@pytest.mark.parametrize(
    ("name", "alone"),
    [("chain", "none"), ("brief-thirds", "brief-none"), ("brief-groups", "brief-none")],
)
def test_epochs_and_validation_are_those_of_one_process(runs, name, alone):
    assert_same_validation(runs / name, runs / alone)
    lines, wanted = (RunFolder(runs / one).read_metrics() for one in (name, alone))
    assert [line["epoch"] for line in lines] == [line["epoch"] for line in wanted]
    assert any("dice" in line for line in wanted)
    for line, other in zip(lines, wanted, strict=True):
        for key in ("loss", "dice_loss", "cross_entropy", "learning_rate"):
            assert line[key] == pytest.approx(other[key], rel=TOLERANCE), key
        assert line.get("dice") == other.get("dice")


@pytest.mark.multigpu
def test_two_gpus_share_patches_that_they_augment(cache, tmp_path):
    """Contrast and gamma take the statistics of a patch, which the GPUs gather from its slabs."""
    changes = (
        "patches.size=32,16,16",
        "patches.augmentation.contrast_probability=1",
        "patches.augmentation.gamma_probability=1",
        "patches.augmentation.blur_probability=1",
        "training.precision=float32",
        "training.epochs=2",
    )
    for name, mode, devices in (("one", "none", "0"), ("two", "spatial", "0,1")):
        placement = (f"parallel.mode={mode}", f"parallel.devices={devices}")
        process = start(tmp_path / name, cache, *changes, *placement)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    (_, first), (_, second) = losses(tmp_path / "two")
    (_, expected), (_, later) = losses(tmp_path / "one")
    assert first == pytest.approx(expected, rel=2e-3)
    assert second == pytest.approx(later, rel=2e-2)
    rows = json.loads((tmp_path / "two" / "memory.json").read_text())["slots"]
    assert [(row["rank"], row["device"]) for row in rows] == [(0, "cuda:0"), (1, "cuda:1")]
