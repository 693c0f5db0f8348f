import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from tests.inference.distances import cube, hd95_by_hand, nearest_mm, tilted
from unet3d.datasets.labels import EVERY_VALUE, ScoredLabels
from unet3d.errors import VolumeError
from unet3d.inference.label_scores import (
    LabelScore,
    dice_per_class,
    score_maps,
    surface_dice,
    surface_distances,
)
from unet3d.memory import host

AFFINE = np.diag([1.0, 1.0, 2.0, 1.0])


def test_dice_per_class_is_twice_the_overlap_over_the_sum():
    prediction = torch.tensor([0, 0, 1, 1, 1, 2]).reshape(1, 2, 3)
    target = torch.tensor([0, 1, 1, 1, 0, 3]).reshape(1, 2, 3)
    # background: 1 of 2 and 2; class 1: 2 of 3 and 3; 2 and 3: no overlap; 4: nowhere
    expected = [0.5, 2 / 3, 0.0, 0.0, None]
    assert dice_per_class(prediction, target, 5) == pytest.approx(expected)
    for dtype in (np.uint8, np.uint16, np.int64):
        arrays = prediction.numpy().astype(dtype), target.numpy().astype(dtype)
        arrays[0].setflags(write=False)  # like a memory-mapped label map
        assert dice_per_class(*arrays, 5) == pytest.approx(expected)


def test_a_shift_has_the_scores_of_the_hand():
    # A cube of 6 x 6 x 6 voxels, shifted by one voxel along Z, which is 2 mm.
    prediction, label = cube((2, 2, 2), (8, 8, 8)), cube((2, 2, 3), (8, 8, 9))
    (score,) = score_maps(prediction, label, AFFINE, EVERY_VALUE, tolerance_mm=0.5).values()
    assert score.dice == pytest.approx(5 / 6)
    assert score.hd95_mm == pytest.approx(2.0)
    # Of the 152 surface voxels of a cube, the 36 of one face lie 2 mm off, and the inner 16 of the
    # opposite face lie inside the other cube. Of these, 12 are 1 mm from its sides.
    assert score.nsd == pytest.approx(1 - (36 + 16) / 152)
    near = score_maps(prediction, label, AFFINE, EVERY_VALUE, tolerance_mm=1.0)[1]
    assert near.nsd == pytest.approx(1 - (36 + 4) / 152)
    wide = score_maps(prediction, label, AFFINE, EVERY_VALUE, tolerance_mm=2.0)[1]
    assert wide.nsd == 1.0
    assert (score.prediction_ml, score.label_ml) == pytest.approx((0.432, 0.432))


def test_a_label_that_one_side_lacks_has_no_distance():
    empty = np.zeros((20, 20, 20), np.uint8)
    for pair in ((cube((2, 2, 2), (8, 8, 8)), empty), (empty, cube((2, 2, 2), (8, 8, 8)))):
        (score,) = score_maps(*pair, AFFINE, EVERY_VALUE).values()
        assert (score.dice, score.hd95_mm, score.nsd) == (0.0, None, 0.0)
    assert score_maps(empty, empty, AFFINE, EVERY_VALUE) == {}


def test_ignored_voxels_count_nowhere():
    """The scores equal those of maps from which the ignored part was cut off."""
    rng = np.random.default_rng(0)
    prediction, label = (rng.integers(0, 3, (12, 12, 12)).astype(np.uint8) for _ in "pl")
    ignored = np.zeros_like(label, dtype=bool)
    ignored[:, :, 7:] = True
    marked = np.where(ignored, 9, label).astype(np.uint8)
    before = prediction.copy(), marked.copy()
    scored = ScoredLabels(ignore=9)
    ours = score_maps(prediction, marked, AFFINE, scored)
    cut = score_maps(prediction[:, :, :7], label[:, :, :7], AFFINE, EVERY_VALUE)
    assert ours == cut and set(ours) == {1, 2}
    assert np.array_equal(prediction, before[0]) and np.array_equal(marked, before[1])
    # Without the option it is a label like any other.
    assert set(score_maps(prediction, marked, AFFINE, EVERY_VALUE)) == {1, 2, 9}


def test_a_region_is_scored_as_the_union_of_its_values():
    rng = np.random.default_rng(1)
    prediction, label = (rng.integers(0, 5, (9, 9, 9)).astype(np.uint8) for _ in "pl")
    scored = ScoredLabels(names={(1, 2, 3): "whole", (2, 3): "core", 3: "enhancing"})
    ours = score_maps(prediction, label, AFFINE, scored)
    assert list(ours) == [(1, 2, 3), (2, 3), 3, 4]  # 4 is in no region
    for region in ((1, 2, 3), (2, 3)):
        union = [np.isin(array, region).astype(np.uint8) for array in (prediction, label)]
        assert ours[region] == score_maps(*union, AFFINE, EVERY_VALUE)[1]
    assert isinstance(ours[4], LabelScore)


# Surfaces


SPACING_MM = (0.5, 1.0, 3.0)


def masks(density, shape=(9, 10, 11)):
    rng = np.random.default_rng(0)
    return [rng.random(shape) < density for _ in range(2)]


@pytest.mark.parametrize("density", [0.01, 0.2, 0.6, 0.9])
def test_scores_are_those_of_all_distances_between_the_places_of_surface_voxels(density):
    affine = tilted(20.0, SPACING_MM)
    pair = masks(density)
    both = np.concatenate(nearest_mm(*pair, affine))
    distances = surface_distances(*pair, affine)
    assert max(np.percentile(one, 95) for one in distances) == pytest.approx(
        hd95_by_hand(*pair, affine), rel=1e-5
    )
    for tolerance_mm in (0.0, 0.6, 1.1):
        share = np.mean(both <= tolerance_mm)
        assert surface_dice(distances, tolerance_mm) == pytest.approx(share)
    assert surface_dice(distances, 100.0) == 1


@pytest.mark.parametrize("spacing_mm", [0.1, 0.3, 0.7, 1.0, 1.1])
@pytest.mark.parametrize("degrees", [0.0, 33.0])
def test_a_neighbour_at_the_tolerance_is_within_it(spacing_mm, degrees):
    one = np.zeros((6, 6, 6), bool)
    one[2:4, 2:4, 2:4] = True
    affine = np.eye(4)
    rotation = Rotation.from_euler("xyz", [degrees] * 3, degrees=True).as_matrix()
    # As a header stores it.
    affine[:3, :3] = (rotation * spacing_mm).astype(np.float32)
    distances = surface_distances(one, np.roll(one, 1, axis=2), affine)
    assert surface_dice(distances, spacing_mm) == 1.0
    assert surface_dice(distances, 0.99 * spacing_mm) == 0.5


@pytest.mark.parametrize(("free", "what"), [(2.5, "comparing label maps"), (15.5, "scoring a lab")])
def test_maps_that_are_too_large_are_refused_in_one_line(free, what, monkeypatch):
    map_ = np.ones((20, 20, 20), np.uint8)
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: int(free * map_.size))
    with pytest.raises(VolumeError, match=f"{what}.* of memory, .*coarser levels of .*--level"):
        score_maps(map_, map_, AFFINE, EVERY_VALUE)
