import itertools

import numpy as np

from tests.patches.known_cases import probable
from unet3d.config import AugmentationSettings
from unet3d.patches.augment.cut import Placement, start_of
from unet3d.patches.augment.draw import AugmentationDraw
from unet3d.patches.augment.filters import farthest_reach, reach_of
from unet3d.preparation.prepared_image import whole_box

ZERO = (0, 0, 0)
LIVELY = AugmentationDraw(
    AugmentationSettings(rotation_probability=1, scaling_probability=1, mirror_axes=("x", "z"))
)


def between(start, stop):
    return tuple(map(slice, start, stop))


def test_a_patch_that_does_not_turn_is_a_box():
    placement = Placement.centred(None, (5, -2, 7), (4, 6, 5))
    assert placement.offset == (5.0, -2.0, 7.0)
    box = placement.box(whole_box((4, 6, 5)), (20, 20, 9))
    assert box == between((5, 0, 7), (9, 4, 9))
    assert placement.moved(start_of(box)).offset == (0.0, -2.0, 0.0)
    outside = Placement.centred(None, (-10, 0, 30), (4, 4, 4))
    box = outside.box(whole_box((4, 4, 4)), (6, 6, 6))
    assert box == between((0, 0, 5), (1, 4, 6))  # at least one voxel
    mirrored = np.diag([-1.0, 1.0, -1.0])
    placement = Placement.centred(mirrored, (5, 6, 7), (4, 6, 5))
    box = placement.box(whole_box((4, 6, 5)), (20, 20, 20))
    assert box == between((5, 6, 7), (9, 12, 12))
    assert placement.moved(start_of(box)).offset == (3.0, 0.0, 4.0)


def test_the_box_holds_every_sampled_point_and_little_more():
    size = (16, 24, 8)
    corners = ((ZERO, size), ((4, 0, 0), (8, 24, 8)), ((15, 23, 7), size))
    for seed, (start, stop) in itertools.product(range(20), corners):
        part = between(start, stop)
        matrix = LIVELY.matrix(np.random.default_rng(seed), size, (1, 1.2, 2))
        placement = Placement.centred(matrix, (100, 110, 120), size)
        box = placement.box(part, (400, 400, 400))
        ends = [(first, last - 1) for first, last in zip(start, stop, strict=True)]
        points = np.array(placement.matrix) @ np.array(list(itertools.product(*ends))).T
        points += np.array(placement.offset)[:, None]
        first, last = np.array([(one.start, one.stop - 1) for one in box]).T
        assert (points.min(axis=1) >= first - 1e-5).all()
        assert (points.max(axis=1) <= last + 1e-5).all()
        assert (points.min(axis=1) < first + 1).all()
        assert (points.max(axis=1) > last - 1).all()


def test_no_filter_that_is_drawn_reaches_farther_than_memory_is_planned_for():
    drawing = AugmentationDraw(probable(1))
    for voxels in (5, 21, 33):
        rngs = (np.random.default_rng(seed) for seed in range(50))
        drawn = [channel for rng in rngs for channel in drawing.channels(rng, 2, (1, 1, 1))]
        most = max(reach_of(channel, (voxels, 8, 8))[0] for channel in drawn)
        assert most <= farthest_reach(voxels) <= most + 2
