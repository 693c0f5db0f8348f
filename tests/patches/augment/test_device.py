import math

import numpy as np

from tests.patches.known_cases import PLAIN
from tests.products import each_value
from unet3d.config import AugmentationSettings
from unet3d.patches.augment.cut import Placement, shape_of
from unet3d.patches.augment.device import DeviceAugmentation, largest_reach
from unet3d.patches.augment.draw import AugmentationDraw


@each_value(
    size=[(32, 32, 32), (16, 40, 24), (1, 20, 30)],
    spacing=[(1, 1, 1), (0.7, 1.0, 1.5), (1, 1, 5), (5, 5, 1), (1, 5, 25)],
    changes=[
        {},
        {"rotation_degrees": 180},
        {"rotation_degrees": 0},
        {"in_plane_rotation_degrees": 0},
        {"scaling_probability": 0},
    ],
)
def test_no_cut_is_larger(size, spacing, changes):
    always = {"rotation_probability": 1, "scaling_probability": 1, "mirror_axes": ["x"], **changes}
    settings = AugmentationSettings.model_validate(always)
    drawing = AugmentationDraw(settings)
    matrices = [drawing.matrix(np.random.default_rng(s), size, spacing) for s in range(200)]
    placements = [Placement.centred(matrix, (5000, 5000, 5000), size) for matrix in matrices]
    slabs = [range(size[0])] + [range(first, size[0] // 2 + 1) for first in (0, size[0] // 3)]
    for slab in slabs:
        bound = largest_reach(settings, size, spacing, len(slab))
        part = (slice(slab.start, slab.stop), slice(0, size[1]), slice(0, size[2]))
        boxes = [shape_of(placement.box(part, (10_000,) * 3)) for placement in placements]
        largest = np.max(boxes, axis=0)
        assert all(seen <= most for seen, most in zip(largest, bound, strict=True))
        if changes.get("rotation_degrees") == 180:  # every direction occurs, so the bound is tight
            assert all(most <= 1.25 * seen + 4 for seen, most in zip(largest, bound, strict=True))


def staging(settings, slab=None, *, voxel_bytes=2, cases=((32, 32, 32),), num=1, channels=1):
    size = (32, 32, 32)
    plan = DeviceAugmentation(
        settings=settings,
        cases=tuple((shape, (1.0, 1.0, 1.0)) for shape in cases),
        num_channels=channels,
        voxel_bytes=voxel_bytes,
        label_bytes=1,
    )
    assert plan.staging_bytes(size, 1, range(size[0])) == plan.staging_bytes(size, 1)
    return plan.staging_bytes(size, num, slab)


def test_staging_is_the_largest_cut_or_what_filters_take():
    off, on = PLAIN, AugmentationSettings()
    assert largest_reach(off, (32, 30, 28), (1, 1, 1), 7) == (7, 30, 28)
    assert staging(on, voxel_bytes=12) == 13 * 32**3
    assert staging(on) == 2 * 4 * 32**3
    # Several channels at a time are copied out of the batch: one more array for each, up to 2^20.
    assert staging(on, channels=2) == 2 * 3 * 4 * 32**3
    assert staging(on, channels=2, num=7) == 14 * 3 * 4 * 32**3
    assert staging(on, channels=2, num=40) == max(32 * 3 * 4, 32 * 5) * 32**3
    assert staging(off, num=40) == 32 * 3 * 32**3
    assert staging(on, cases=((20, 64, 64), (64, 64, 40))) == 3 * math.prod((64, 64, 40))


def test_staging_of_a_slab_is_that_of_what_is_made_for_it():
    plane, slab = 32 * 32, range(4, 12)
    assert staging(PLAIN, slab) == 3 * 8 * plane
    # Blur reaches 4 planes and coarsening 3, so more planes are made, in separate memory.
    assert staging(AugmentationSettings(), slab) == (5 + 2 * 4) * (12 + 4 + 3) * plane
