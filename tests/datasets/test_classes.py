import tracemalloc

import numpy as np
import pytest

from unet3d.datasets.classes import class_indices
from unet3d.errors import VolumeError


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((0, 7, 300), np.uint16),
        ((0, 3, 4_000_000_000), np.uint64),
        (tuple(range(256)), np.uint8),
        (tuple(range(0, 2000, 5)), np.int32),
    ],
)
def test_the_class_of_a_voxel_is_the_place_of_its_value(values, dtype):
    expected = np.random.default_rng(0).integers(len(values), size=(5, 6, 7))
    classes = class_indices(np.array(values, dtype)[expected], values)
    np.testing.assert_array_equal(classes, expected)
    assert classes.dtype == (np.uint8 if len(values) <= 256 else np.uint16)
    # Values beyond the type of a label map are no matter.
    label = np.array([[[0, 3]]], np.uint8)
    assert class_indices(label, (0, 3, 614454277)).tolist() == [[[0, 1]]]


def test_memory_does_not_grow_with_the_values():
    label = np.zeros((8, 8, 8), np.uint32)
    label[1] = 4_000_000_000
    tracemalloc.start()
    try:
        class_indices(label, (0, 4_000_000_000))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_unknown_values_are_named():
    label = np.zeros((3, 4, 5), np.int16)
    label[1, 1] = -2
    label[2, 2, 2] = 9
    known = (0, *range(100, 120))
    with pytest.raises(VolumeError) as caught:
        class_indices(label, known)
    said = str(caught.value)
    assert "holds the value(s) -2, 9, which dataset.json does not name" in said
    assert "0, 100, 101, 102, 103, 104, 105, 106 and 13 more" in said
    with pytest.raises(VolumeError, match="the value.s. 5, which"):
        class_indices(np.array([[[5]]], np.uint8), (0, 261))
