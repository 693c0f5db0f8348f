"""Trainings with ignored voxels, regions and merged labels."""

import json

import numpy as np
import pytest

from tests.command_line import run as command
from tests.images.samples import blob_label, write_msd, write_volume
from tests.trainings import assert_same_weights, run, settings
from unet3d.images.labels import read_label
from unet3d.runs.checkpoint import load_checkpoint

SHAPE = (24, 24, 24)
FAST = (
    "training.batch_dice=true",
    "training.micro_batches=2",
    "training.optimizer=adamw",
    "training.learning_rate=0.02",
    "patches.augmentation=none",
    "patches.foreground_fraction=0.5",
)
"""Settings with which a few epochs are enough."""


@pytest.mark.nightly
def test_a_few_labelled_slices_are_enough(tmp_path, cache):
    """Four of five slices have no labels, and wrong answers there have no loss."""
    labels = {"0": "background", "1": "left", "2": "right", "3": "ignore"}
    root = write_msd(tmp_path / "data", 5, SHAPE, labels=labels)
    for number in range(5):
        label = blob_label(SHAPE, number)
        label[:, :, np.arange(SHAPE[2]) % 5 != 2] = 3
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label)
    config = settings(
        cache, f"data.dataset={root}", "training.epochs=12", "training.validate_every=12", *FAST
    )
    run(config, tmp_path / "run")
    # Scored on the labelled slices of the other cases.
    assert json.loads((tmp_path / "run/summary.json").read_text())["final"]["mean_dice"] > 0.55
    checkpoint = load_checkpoint(tmp_path / "run" / "checkpoint-latest.pt")
    assert checkpoint.topology.num_classes == 3
    assert checkpoint.preprocessing.ignore_value == 3


@pytest.mark.nightly
def test_regions_are_trained_scored_and_written(tmp_path, cache):
    """As in BraTS: a core within the whole; two outputs, not two classes."""
    labels = {"background": 0, "whole": [1, 2], "core": 2}
    root = write_msd(tmp_path / "data", 5, SHAPE, labels=labels, regions_class_order=[1, 2])
    truth = {}
    for number in range(5):
        rng = np.random.default_rng(number)
        label = np.zeros(SHAPE, np.uint8)
        x, y, z = (int(first) for first in rng.integers(0, 10, 3))
        label[x : x + 12, y : y + 12, z : z + 12] = 1
        label[x + 1 : x + 11, y + 1 : y + 11, z + 1 : z + 11] = 2
        truth[f"case_{number}"] = label
        image = rng.normal(100, 10, SHAPE) + 50 * label
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label)
        write_volume(root / f"imagesTr/case_{number}.nii.gz", image.astype(np.float32))
    config = settings(
        cache, f"data.dataset={root}", "training.epochs=24", "training.validate_every=24", *FAST
    )
    run(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for dice in (summary["dice"], summary["final"]["dice"]):
        assert list(dice) == ["whole", "core"]
        assert min(dice.values()) > 0.6

    checkpoint = load_checkpoint(tmp_path / "run" / "checkpoint-latest.pt")
    assert checkpoint.topology.num_classes == 2
    assert checkpoint.preprocessing.label_values == (0, 1, 2)
    scores = []
    for case in checkpoint.split.validation:
        found = read_label(tmp_path / f"run/validation/{case}_seg.nii.gz").array
        assert set(np.unique(found)) <= {0, 1, 2}
        pairs = ((found > 0, truth[case] > 0), (found == 2, truth[case] == 2))
        scores.append([2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in pairs])
    # The written segmentations have the scores of the end of training, as regions.
    assert np.mean(scores, 0) == pytest.approx(list(summary["final"]["dice"].values()), rel=1e-5)
    record = json.loads((tmp_path / "run" / "validation" / "cases.json").read_text())
    assert [label["name"] for label in record["mean"].values()] == ["whole", "core"]


def test_merged_labels_are_trained_as_if_the_files_had_them(tmp_path, cache, capsys):
    """They are also scored by the original files. For comparison, NumPy merges other files."""
    far = 614454277
    raw_labels = {"background": 0, "organ": 1, "core": 2, "vein": 5, "far": far}
    modality = "CT"  # CT statistics are measured on labelled voxels
    raw = write_msd(tmp_path / "raw", 5, SHAPE, labels=raw_labels, modality=modality)
    merged_labels = {"background": 0, "organ": 1, "lesion": 2}
    merged = write_msd(tmp_path / "merged", 5, SHAPE, labels=merged_labels, modality=modality)
    truth = {}
    for number in range(5):
        rng = np.random.default_rng(number)
        label = rng.choice(np.array([0, 0, 0, 1, 2, 5, far], np.uint32), SHAPE)
        label[4:12, 4:12, 4:12], label[12:20, 4:12, 4:12] = 2, far
        truth[f"case_{number}"] = lesion = np.isin(label, (2, far))
        write_volume(raw / f"labelsTr/case_{number}.nii.gz", label)
        others = np.where(label == 1, 1, 0)
        write_volume(
            merged / f"labelsTr/case_{number}.nii.gz", np.where(lesion, 2, others).astype(np.uint8)
        )
    choice = "data.labels={lesion: [core, 614454277], organ: [1]}"
    for root, changes in ((raw, [choice]), (merged, [])):
        config = settings(
            cache, f"data.dataset={root}", "training.epochs=2", "training.optimizer=adamw", *changes
        )
        run(config, tmp_path / f"run_{root.name}")
    ours, expected = tmp_path / "run_raw", tmp_path / "run_merged"
    assert_same_weights(ours, expected)
    files = sorted((ours / "validation").glob("*.nii.gz"))
    for path in files:
        other = read_label(expected / "validation" / path.name)
        np.testing.assert_array_equal(read_label(path).array, other.array)
    summaries = [json.loads((one / "summary.json").read_text()) for one in (ours, expected)]
    assert summaries[0]["dice"] == summaries[1]["dice"]
    assert summaries[0]["final"]["dice"] == pytest.approx(summaries[1]["final"]["dice"])
    assert list(summaries[0]["dice"]) == ["organ", "lesion"]

    evaluate = (
        "evaluate",
        ours / "validation",
        raw / "labelsTr",
        "--json",
        tmp_path / "scores.json",
    )
    assert command("train", "--resume", "--output", ours, "--set", "data.labels=organ") == 1
    assert "cannot be continued: label_names changed from" in capsys.readouterr().err
    assert command(*evaluate, "--checkpoint", ours) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())["mean"]
    dice = []
    for path in files:
        found, true = read_label(path).array == 2, truth[path.name.removesuffix("_seg.nii.gz")]
        dice.append(2 * (found & true).sum() / (found.sum() + true.sum()))
    assert {score["name"] for score in scores.values()} == {"organ", "lesion"}
    assert scores[f"2,{far}"]["dice"] == pytest.approx(np.mean(dice), rel=1e-5)
