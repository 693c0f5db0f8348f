"""Patch size and network from settings and headers."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainings import run
from tests.volumes.samples import blob_label, write_msd, write_volume
from unet3d.config import Config, load_config
from unet3d.errors import DeviceError
from unet3d.planning.network_plan import (
    batch_shape,
    check_shards,
    fitting_size,
    plan_without_data,
)
from unet3d.planning.placements import possible_dims

CPU = torch.device("cpu")
CROSSED = ((16, 32, 16), (32, 16, 16), (24, 24, 16))
"""Shapes of volumes of which none is the largest along each axis."""


def crossed(folder: Path, *overrides: str) -> Config:
    """Return settings for whole volumes of these shapes."""
    root = write_msd(folder / "data")
    for number, shape in enumerate(CROSSED):
        label = blob_label(shape, number)
        image = np.random.default_rng(number).normal(100, 10, shape).astype(np.float32)
        write_volume(root / f"imagesTr/case_{number}.nii.gz", image)
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label)
    named = (f"data.dataset={root}", f"data.cache={folder / 'cache'}", "patches.size=whole")
    return load_config(None, [*named, "model.base_channels=4", "model.num_levels=2", *overrides])


@pytest.mark.parametrize(
    ("shape", "spacing_mm", "max_voxels", "expected"),
    [
        ((256, 256, 256), (1, 1, 1), 128**3, (128, 128, 128)),
        ((256, 256, 256), (0.3, 0.3, 0.3), 128**3, (128, 128, 128)),
        ((100, 90, 80), (1, 1, 1), 128**3, (100, 90, 80)),
        ((128, 128, 128), (1, 1, 1), 128**3, (128, 128, 128)),
        # Slices four times as thick: a quarter as many, for a cube in mm.
        ((512, 512, 512), (1, 1, 4), 64 * 64 * 16, (64, 64, 16)),
        ((512, 512, 512), (4, 1, 2), 16 * 64 * 32, (16, 64, 32)),
        # An axis that is whole leaves its share of the budget to the others.
        ((512, 512, 16), (1, 1, 1), 64 * 64 * 16, (64, 64, 16)),
        ((512, 8, 512), (1, 1, 1), 64 * 64 * 8, (64, 8, 64)),
        ((10, 10, 10), (1, 1, 1), 1, (1, 1, 1)),
        ((1, 1, 4000), (1, 1, 1), 1000, (1, 1, 1000)),
    ],
)
def test_a_patch_is_a_cube_in_mm_within_the_budget(
    shape: Any, spacing_mm: Any, max_voxels: int, expected: Any
) -> None:
    assert fitting_size(shape, spacing_mm, max_voxels) == expected


def test_no_larger_cube_would_have_fitted() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(int(size) for size in rng.integers(20, 400, 3))
        spacing_mm = tuple(float(mm) for mm in rng.uniform(0.4, 5, 3))
        budget = int(rng.integers(20**3, 150**3))
        size = fitting_size(shape, spacing_mm, budget)
        assert math.prod(size) <= budget
        assert all(voxels <= available for voxels, available in zip(size, shape, strict=True))
        if size == shape:
            continue
        # The edge at which one more voxel fits along some axis, and the precision of the search.
        cut = [axis for axis in range(3) if size[axis] < shape[axis]]
        edge_mm = min((size[axis] + 1) * spacing_mm[axis] for axis in cut) + min(spacing_mm) / 4
        larger = [
            min(voxels, math.floor(edge_mm / mm))
            for voxels, mm in zip(shape, spacing_mm, strict=True)
        ]
        assert math.prod(larger) > budget, (shape, spacing_mm, budget, size)


def test_the_largest_batch_is_that_of_the_worst_volumes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        sizes = [tuple(map(int, rng.integers(8, 40, 3))) for _ in range(rng.integers(1, 6))]
        for num_patches in range(1, 5):
            batches = itertools.combinations_with_replacement(sizes, num_patches)
            most = max(math.prod(np.max(batch, axis=0)) for batch in batches)
            assert math.prod(batch_shape(sizes, num_patches)) == most, sizes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "batch_dice", "expected"),
    [
        # A quarter of 24x24x24 is 3456 voxels.
        ("16,16,8", "auto", True),
        ("16,16,16", "auto", False),
        ("whole", "auto", False),
        ("16,16,8", "false", False),
        ("whole", "true", True),
    ],
)
def test_patches_much_smaller_than_the_volumes_have_batch_dice(
    tmp_path: Path, size: str, batch_dice: str, expected: bool
) -> None:
    root = write_msd(tmp_path / "data", shape=(24, 24, 24))
    overrides = [f"data.dataset={root}", f"patches.size={size}", "model.num_levels=2"]
    config = load_config(None, [*overrides, f"training.batch_dice={batch_dice}"])
    settled = plan_without_data(config).settled(config)
    assert settled.training.batch_dice is expected
    assert settled.model_copy(update={"training": config.training}) == config


def test_whole_volumes_are_planned_at_the_largest(tmp_path: Path) -> None:
    network = plan_without_data(crossed(tmp_path, "model.num_levels=auto"))
    assert network.sizes == set(CROSSED)
    assert network.topology.total_stride == (4, 4, 4)  # of the median volume, 24x24x16
    assert math.prod(network.size) == 24 * 24 * 16
    assert network.size_in(2) == network.size_in(8) == (32, 32, 16)


def test_the_smallest_volume_says_how_many_shards_there_can_be(tmp_path: Path) -> None:
    config = crossed(tmp_path, "training.batch_size=1")
    network = plan_without_data(config)
    with pytest.raises(DeviceError, match="16x32x16 voxels has 16 planes .* use at most 16"):
        check_shards(network, 17)
    for count in (16, 17):
        modes = {dims.mode for dims in possible_dims(config, network, (CPU,) * count)}
        assert ("spatial" in modes) == (count == 16)


@pytest.mark.trains
@pytest.mark.parametrize("batch_size", [1, 2])
def test_whole_volumes_of_unequal_shapes_take_what_was_predicted(
    batch_size: int, tmp_path: Path
) -> None:
    """A batch of two is as large along each axis as either of them."""
    few = ("training.epochs=1", f"training.batch_size={batch_size}", "data.num_folds=3")
    config = crossed(tmp_path, *few, "parallel.devices=cpu", "patches.augmentation.enabled=false")
    run(config, tmp_path / "run")
    (slot,) = json.loads((tmp_path / "run" / "memory.json").read_text())["slots"]
    assert slot["measured"]["peak_bytes"] == slot["predicted"]["peak_bytes"]
