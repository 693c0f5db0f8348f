"""Patch size and network, planned from settings and headers."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.images.samples import blob_label, write_msd, write_volume
from tests.trainings import run
from unet3d.config import Config, load_config
from unet3d.errors import DeviceError
from unet3d.planning.network_plan import batch_shape, check_shards, plan_without_data
from unet3d.planning.placements import possible_dims

CPU = torch.device("cpu")
CROSSED = ((16, 32, 16), (32, 16, 16), (24, 24, 16))
"""Shapes of volumes, none of which is the largest along each axis."""


def crossed(folder: Path, *overrides: str) -> Config:
    """Return settings for whole volumes with these shapes."""
    root = write_msd(folder / "data")
    for number, shape in enumerate(CROSSED):
        label = blob_label(shape, number)
        image = np.random.default_rng(number).normal(100, 10, shape).astype(np.float32)
        write_volume(root / f"imagesTr/case_{number}.nii.gz", image)
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label)
    named = (f"data.dataset={root}", f"data.cache={folder / 'cache'}", "patches.size=whole")
    return load_config(None, [*named, "model.base_channels=4", "model.num_levels=2", *overrides])


def test_the_largest_batch_is_that_of_the_worst_volumes():
    rng = np.random.default_rng(0)
    for _ in range(100):
        sizes = [tuple(map(int, rng.integers(8, 40, 3))) for _ in range(rng.integers(1, 6))]
        for num_patches in range(1, 5):
            batches = itertools.combinations_with_replacement(sizes, num_patches)
            most = max(math.prod(np.max(batch, axis=0)) for batch in batches)
            assert math.prod(batch_shape(sizes, num_patches)) == most, sizes  # type: ignore[arg-type]


def test_patches_much_smaller_than_the_volumes_have_batch_dice(tmp_path):
    root = write_msd(tmp_path / "data", shape=(24, 24, 24))
    for size, batch_dice, expected in (
        # A quarter of 24x24x24 voxels is 3456 voxels.
        ("16,16,8", "auto", True),
        ("16,16,16", "auto", False),
        ("whole", "auto", False),
        ("16,16,8", "false", False),
        ("whole", "true", True),
    ):
        few = (f"data.dataset={root}", "model.num_levels=2", "training.batch_size=2")
        changes = (f"patches.size={size}", f"training.batch_dice={batch_dice}")
        config = load_config(None, [*few, *changes])
        settled = plan_without_data(config).settled(config)
        assert settled.training.batch_dice is expected, (size, batch_dice)
        assert settled.model_copy(update={"training": config.training}) == config


def test_whole_volumes_are_planned_at_the_largest(tmp_path):
    network = plan_without_data(crossed(tmp_path, "model.num_levels=auto"))
    assert network.sizes == set(CROSSED)
    assert network.topology.total_stride == (4, 4, 4)  # planned for the median volume, 24x24x16
    assert math.prod(network.size) == 24 * 24 * 16
    assert network.size_in(2) == network.size_in(8) == (32, 32, 16)


def test_the_smallest_volume_says_how_many_shards_there_can_be(tmp_path):
    config = crossed(tmp_path, "training.batch_size=1")
    network = plan_without_data(config)
    with pytest.raises(DeviceError, match="16x32x16 voxels has 16 planes .* use at most 16"):
        check_shards(network, 17)
    for count in (16, 17):
        modes = {dims.mode for dims in possible_dims(config, network, (CPU,) * count)}
        assert ("spatial" in modes) == (count == 16)


@pytest.mark.nightly
def test_whole_volumes_of_unequal_shapes_take_what_was_predicted(tmp_path):
    """A batch of two is as large along each axis as the larger of the two volumes."""
    few = ("training.epochs=1", "training.batch_size=2", "data.num_folds=3")
    few += ("training.steps_per_epoch=3", "model.base_channels=2", "inference.overlap=0")
    config = crossed(tmp_path, *few, "parallel.devices=cpu", "patches.augmentation=none")
    run(config, tmp_path / "run", is_bare=False)
    (slot,) = json.loads((tmp_path / "run" / "memory.json").read_text())["slots"]
    assert slot["measured"]["peak_bytes"] == slot["predicted"]["peak_bytes"]
