"""The classes of voxels, and the classes that are scored in label maps."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.images.samples import write_json
from unet3d.datasets.labels import EVERY_VALUE, ScoredLabels, class_indices, mask_of
from unet3d.datasets.naming import description_of, read_scored_labels
from unet3d.errors import DatasetError, VolumeError


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
    # Values beyond the type of a label map do no harm.
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
    assert "holds values that dataset.json does not name: -2, 9" in said
    assert "0, 100, 101, 102, 103, 104, 105, 106 and 13 more" in said
    with pytest.raises(VolumeError, match="does not name: 5 "):
        class_indices(np.array([[[5]]], np.uint8), (0, 261))


@pytest.mark.parametrize(
    ("labels", "names", "ignore"),
    [
        ({"0": "background", "1": "left", "2": "right"}, {1: "left", 2: "right"}, None),
        (
            {"background": 0, "whole": [3, 1, 2], "core": [2, 3], "enhancing": [3], "ignore": 4},
            {(1, 2, 3): "whole", (2, 3): "core", 3: "enhancing"},
            4,
        ),
        ({"0": "background", "1": "left", "2": "ignore"}, {1: "left"}, 2),
        ({"left": "1"}, {1: "left"}, None),
    ],
)
def test_labels_are_read_in_every_layout(tmp_path, labels, names, ignore):
    tree = {"labels": labels, "regions_class_order": [1, 2, 3]}  # used only if there are regions
    path = write_json(tmp_path / "dataset.json", tree)
    expected = ScoredLabels(names=names, ignore=ignore)
    assert read_scored_labels(path) == expected
    assert read_scored_labels(tmp_path) == expected
    assert list(read_scored_labels(path).names) == list(names)


def test_masks_of_labels_and_regions():
    array = np.arange(5)
    assert mask_of(array, 3).tolist() == [False, False, False, True, False]
    assert mask_of(array, (1, 4)).tolist() == [False, True, False, False, True]
    scored = ScoredLabels(names={(4, 7): "both", 7: "one", 2: "absent"}, ignore=9)
    assert scored.among([0, 4, 3, 9]) == [(4, 7), 3]  # also values without a name
    assert EVERY_VALUE.among([5, 0, 3]) == [3, 5]


def test_the_description_is_that_of_the_data_set_that_label_maps_lie_in(tmp_path, monkeypatch):
    with pytest.raises(DatasetError, match=r"cannot read .*dataset\.json"):
        read_scored_labels(tmp_path)
    path = write_json(tmp_path / "dataset.json", {})
    with pytest.raises(DatasetError, match="names no labels; name a data set that does"):
        read_scored_labels(tmp_path)
    (tmp_path / "labelsTr").mkdir()
    (tmp_path / "other").mkdir()
    assert description_of(tmp_path / "labelsTr") == path
    assert description_of(tmp_path / "labelsTr/case.nii.gz") == path
    assert description_of(tmp_path / "other") is None
    assert description_of(tmp_path) is None
    monkeypatch.chdir(tmp_path / "labelsTr")
    assert description_of(Path(".")) == path
    path.unlink()
    assert description_of(tmp_path / "labelsTr") is None
