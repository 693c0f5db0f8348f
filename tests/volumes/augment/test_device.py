import math

import numpy as np
import pytest

from unet3d.config import AugmentationSettings, Shape, Spacing
from unet3d.volumes.augment.cut import Placement, Region
from unet3d.volumes.augment.device import DeviceAugmentation, largest_reach
from unet3d.volumes.augment.draw import AugmentationDraw


@pytest.mark.parametrize("size", [(32, 32, 32), (16, 40, 24), (1, 20, 30)])
@pytest.mark.parametrize("spacing", [(1, 1, 1), (0.7, 1.0, 1.5), (1, 1, 5), (5, 5, 1), (1, 5, 25)])
@pytest.mark.parametrize("changes", [{}, {"rotation_degrees": 180}, {"scaling_probability": 0}])
def test_no_cut_is_larger(size: Shape, spacing: Spacing, changes: dict[str, float]) -> None:
    always = {"rotation_probability": 1, "scaling_probability": 1, "mirror_axes": ["x"], **changes}
    settings = AugmentationSettings.model_validate(always)
    drawing = AugmentationDraw(settings)
    bound = largest_reach(settings, size, spacing)
    largest = [0, 0, 0]
    for seed in range(300):
        matrix = drawing.matrix(np.random.default_rng(seed), size, spacing)
        placement = Placement.centred(matrix, (5000, 5000, 5000), size)
        box = placement.box(Region(start=(0, 0, 0), stop=size), (10_000,) * 3)
        largest = [max(seen, now) for seen, now in zip(largest, box.shape, strict=True)]
    assert all(seen <= most for seen, most in zip(largest, bound, strict=True))
    if changes.get("rotation_degrees") == 180:  # where every direction occurs, it is no larger
        assert all(most <= 1.25 * seen + 4 for seen, most in zip(largest, bound, strict=True))


def test_nothing_beyond_the_patch_where_nothing_moves() -> None:
    size: Shape = (32, 30, 28)
    for settings in (
        AugmentationSettings(enabled=False),
        AugmentationSettings(rotation_probability=0, scaling_probability=0),
    ):
        assert largest_reach(settings, size, (1, 1, 1)) == size


def test_staging_is_the_largest_cut_or_what_filters_take() -> None:
    size: Shape = (32, 32, 32)
    still = AugmentationSettings(rotation_probability=0, scaling_probability=0)
    cases = (((20, 64, 64), (1.0, 1.0, 1.0)), ((64, 64, 40), (1.0, 1.0, 1.0)))
    plan = DeviceAugmentation(settings=still, cases=cases, voxel_bytes=13)
    assert plan.staging_bytes(size) == 13 * 32**3
    plan = DeviceAugmentation(settings=still, cases=cases, voxel_bytes=3)
    assert plan.staging_bytes(size) == 2 * 4 * 32**3
    moving = DeviceAugmentation(settings=AugmentationSettings(), cases=cases, voxel_bytes=3)
    assert moving.staging_bytes(size) == 3 * math.prod((64, 64, 40))
