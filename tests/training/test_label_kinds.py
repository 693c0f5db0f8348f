"""Trainings on label maps that are more than one class for each voxel."""

from pathlib import Path

import numpy as np
import pytest

from tests.trainings import run, settings
from tests.volumes.samples import blob_label, write_msd, write_volume
from unet3d.runs.checkpoint import load_checkpoint

pytestmark = pytest.mark.trains

SHAPE = (24, 24, 24)


def test_a_few_labelled_slices_are_enough(tmp_path: Path, cache: Path) -> None:
    """Of four slices in five nobody says anything, and a wrong answer there costs nothing."""
    labels = {"0": "background", "1": "left", "2": "right", "3": "ignore"}
    root = write_msd(tmp_path / "data", 5, SHAPE, labels=labels)
    for number in range(5):
        label = blob_label(SHAPE, number)
        label[:, :, np.arange(SHAPE[2]) % 5 != 2] = 3
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label)
    config = settings(
        cache,
        f"data.dataset={root}",
        "training.batch_dice=true",
        "patches.foreground_fraction=0.5",
        "patches.augmentation.enabled=false",
        "training.epochs=12",
        "training.validate_every=12",
        "training.micro_batches=2",
        "training.optimizer=adamw",
        "training.learning_rate=0.02",
    )
    result = run(config, tmp_path / "run")
    assert result.best_dice > 0.55  # of the labelled slices of the other cases
    checkpoint = load_checkpoint(tmp_path / "run" / "checkpoint-latest.pt")
    assert checkpoint.topology.num_classes == 3
    assert checkpoint.preprocessing.ignore_value == 3
