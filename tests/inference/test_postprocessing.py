import numpy as np
import pytest
from scipy import ndimage

from unet3d.errors import VolumeError
from unet3d.inference import postprocessing
from unet3d.inference.postprocessing import (
    keep_largest,
    rules_in_words,
    small_components,
)

ANY_NEIGHBOUR = np.ones((3, 3, 3))


def expected(labels, rule):
    """Return the voxels that are left, computed the simple way."""
    mask = np.isin(labels, rule)
    components, number = ndimage.label(mask, ANY_NEIGHBOUR)
    sizes = [np.count_nonzero(components == index + 1) for index in range(number)]
    kept = [index + 1 for index, size in enumerate(sizes) if size == max(sizes)]
    return np.where(mask & ~np.isin(components, kept), 0, labels)


@pytest.mark.parametrize("rule", [(1,), (2,), (1, 3), (1, 2, 3), (9,)])
def test_only_the_largest_component_of_the_values_stays(rule):
    rng = np.random.default_rng(0)
    noise = np.where(rng.random((20, 17, 13)) < 0.12, rng.integers(1, 4, (20, 17, 13)), 0)
    wanted = expected(noise, rule)
    assert rule == (9,) or not np.array_equal(wanted, noise)
    for dtype in (np.uint8, np.uint16, np.uint32):
        labels = noise.astype(dtype)
        keep_largest(labels, [rule])
        assert labels.dtype == dtype and np.array_equal(labels, wanted)


@pytest.mark.parametrize("most", [1, 500, 2000])
@pytest.mark.parametrize("order", ["C", "F"])
def test_components_that_reach_across_parts_are_one(monkeypatch, most, order):
    monkeypatch.setattr(postprocessing, "MOST_VOXELS", most)
    rng = np.random.default_rng(3)
    for share in (0.02, 0.1, 0.2):
        noise = np.where(rng.random((21, 17, 23)) < share, 2, 0).astype(np.uint8)
        noise[:2] = noise[:, :, -1] = 0
        labels = np.array(noise, order=order)
        keep_largest(labels, [(2,)])
        assert np.array_equal(labels, expected(noise, (2,)))
    spiral = np.zeros((9, 9, 9), np.uint8)  # two arms that meet in the last plane only
    spiral[2, 2] = spiral[6, 6] = 1
    spiral[2:7, 2:7, 8] = 1
    spiral[0, 8] = 1  # longer than an arm within one part
    labels = np.array(spiral, order=order)
    keep_largest(labels, [(1,)])
    assert np.array_equal(labels, expected(spiral, (1,))) and not labels[0, 8].any()


def test_rules_are_applied_one_after_the_other():
    # The first rule removes the larger part of label 1, so the smaller part stays.
    labels = np.zeros((9, 9, 30), np.uint8)
    labels[:, :, :10] = 2
    labels[0, 0, 10:12] = 1
    labels[4:7, 4:7, 20:24] = 1
    first = labels.copy()
    keep_largest(first, [(1, 2), (1,)])
    assert np.count_nonzero(first == 1) == 2
    second = labels.copy()
    keep_largest(second, [(1,), (1, 2)])
    assert np.count_nonzero(second == 1) == 0


def test_corners_are_neighbours_and_equal_components_all_stay():
    labels = np.zeros((8, 8, 8), np.uint8)
    labels[0, 0, 0] = labels[1, 1, 1] = 1
    labels[5, 5, 5] = labels[5, 5, 6] = 1
    assert not list(small_components(labels, (1,)))
    labels[7, 7, 7] = 1
    wanted = expected(labels, (1,))
    keep_largest(labels, [(1,)])
    assert np.array_equal(labels, wanted)
    assert np.count_nonzero(labels) == 4


def test_too_little_memory_is_said_before_it_is_taken(monkeypatch):
    labels = np.ones((4, 4, 4), np.uint8)
    monkeypatch.setattr(postprocessing, "BYTES_PER_VOXEL", 2**60)
    with pytest.raises(VolumeError, match="4x4x4 voxels .*--no-postprocessing"):
        keep_largest(labels, [(1,)])


def test_rules_in_words():
    names = {1: "left", 2: "right", 5: "lesion"}
    assert rules_in_words([(1, 2, 5), (5,)], names) == (
        "only the largest component is kept of all labels together, of lesion"
    )
    assert rules_in_words([(1, 2)], names) == "only the largest component is kept of left and right"
