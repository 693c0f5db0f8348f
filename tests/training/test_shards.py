"""Training on uneven slabs or groups of shards equals training in one process.

Two even slabs, resumed at any epoch, are tested in ``tests/distributed/test_ranks.py``.
"""

import json

import pytest

from tests import warm
from tests.trainings import (
    assert_same_validation,
    losses,
    run,
    settings,
    start,
    without_drawing,
    words,
)
from unet3d.parallel.spatial import division
from unet3d.runs.run_folder import RunFolder

pytestmark = pytest.mark.nightly

# Batches of three patches, then one: the second of two replicas gets fewer than the first, then
# none.
EXACT = (
    "training.precision=float64",
    "training.epochs=2",
    "training.batch_size=3",
    "training.steps_per_epoch=2",
    "patches.size=24,16,16",
    "model.num_levels=3",
)
WAYS = {
    (1, 3): ("parallel.devices=cpu,cpu,cpu", "training.micro_batches=2"),
    (2, 2): ("parallel.devices=cpu,cpu,cpu,cpu", "parallel.replicas=2"),
}


def train_divided(arguments):
    division.MIN_DIVIDED_ELEMENTS = 0  # so that lower levels are divided too
    without_drawing(arguments)


@pytest.mark.parametrize(("num_replicas", "num_shards"), WAYS)
def test_uneven_slabs_and_groups_train_as_one_process(num_replicas, num_shards, cache, tmp_path):
    alone = tmp_path / "alone"
    run(settings(cache, *EXACT), alone)
    way = ("parallel.mode=spatial", *WAYS[num_replicas, num_shards])
    done = warm.run_call(train_divided, words(tmp_path / "run", cache, *EXACT, *way))
    assert done.returncode == 0, done.stderr
    assert_same_validation(tmp_path / "run", alone)
    lines, wanted = (RunFolder(one).read_metrics() for one in (tmp_path / "run", alone))
    assert [line["epoch"] for line in lines] == [line["epoch"] for line in wanted] == [1, 2]
    for line, other in zip(lines, wanted, strict=True):
        for key in ("loss", "dice_loss", "cross_entropy", "learning_rate"):
            assert line[key] == pytest.approx(other[key], rel=1e-8), key
        assert line.get("dice") == other.get("dice")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["replicas"], summary["shards"]) == (num_replicas, num_shards)
    rows = json.loads((tmp_path / "run/memory.json").read_text())["slots"]
    assert [row["rank"] for row in rows] == list(range(num_replicas * num_shards))
    for row in rows if num_replicas == 1 else ():
        assert row["measured"].items() >= row["predicted"].items() and row["predicted"]
    (whole,) = json.loads((alone / "memory.json").read_text())["slots"]
    largest = max(row["measured"]["activations_bytes"] for row in rows)
    assert largest < 0.6 * whole["measured"]["activations_bytes"]


@pytest.mark.multigpu
def test_two_gpus_share_patches_that_they_augment(cache, tmp_path):
    """Contrast and gamma use statistics of a patch, which the GPUs gather from its slabs."""
    changes = (
        "patches.size=32,16,16",
        "patches.augmentation_details.contrast_probability=1",
        "patches.augmentation_details.gamma_probability=1",
        "patches.augmentation_details.blur_probability=1",
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
