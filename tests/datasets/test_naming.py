"""What names of labels select, and merged labels compared with maps that NumPy has merged."""

import numpy as np
import pytest

from tests.images.samples import blob_label, msd_entry, noise, write_json, write_msd, write_volume
from unet3d.datasets.dataset import load_dataset
from unet3d.datasets.naming import has_sides, with_labels
from unet3d.errors import ConfigError
from unet3d.images import nifti
from unet3d.preparation.check import examine
from unet3d.preparation.prepared_image import prepare_label
from unet3d.preparation.transform import Preprocessing


def test_left_and_right_are_found():
    for names in (
        ("background", "left ventricle", "myocardium"),
        ("KidneyLeft", "liver"),
        ("RIGHT-hippocampus",),
        ("lungleft", "lungright"),
        ("kidney_l", "kidney_r"),
        ("Femur R", "Hip", "Femur L"),
        ("lh-cortex", "rh-cortex"),
        ("Rt Parotid", "Lt Parotid"),
    ):
        assert has_sides(names), names


def test_what_has_no_side():
    for names in (
        ("background", "Anterior", "Posterior"),
        ("liver", "tumour"),
        ("L1", "L2", "L3"),  # vertebrae
        ("r", "g", "b"),
        ("kidney_l",),  # without its counterpart it may mean anything
        ("label 1", "label 2"),
        ("femur_l", "tibia_r"),
        ("cleft", "bright spot"),
        (),
    ):
        assert not has_sides(names), names


FAR = 614454277
LABELS = {"0": "outside", "1": "liver", "2": "core", "3": "rim", "7": "7", str(FAR): "far"}


@pytest.fixture
def dataset(tmp_path):
    return load_dataset(write_msd(tmp_path, labels=LABELS))


def prepared(dataset, array):
    """Return the classes of a label map as training sees them."""
    plan = Preprocessing(
        spacing_mm=None,
        channels=({"kind": "none"},),
        channel_names=dataset.channel_names,
        label_names=dataset.label_names,
        label_values=dataset.label_values,
        raw_values=dataset.raw_values,
        ignore_value=dataset.ignore_value,
    )
    return prepare_label(array, (1.0, 1.0, 1.0), plan)


@pytest.mark.parametrize(
    ("choice", "names", "values", "merged"),
    [
        (["liver"], ("liver",), (1,), [(1,)]),
        (["far", 2], ("core", "far"), (2, FAR), [(2,), (FAR,)]),
        ({"lesion": [3, "core"]}, ("lesion",), (2,), [(2, 3)]),
        ({"b": [FAR, "2"], "a": ["liver", "7"]}, ("a", "b"), (1, 2), [(1, 7), (2, FAR)]),
        ({"all": [1, 2, 3, 7, FAR]}, ("all",), (1,), [(1, 2, 3, 7, FAR)]),
    ],
    ids=str,
)
def test_chosen_labels_are_classes_and_the_others_background(
    dataset, choice, names, values, merged
):
    chosen = with_labels(dataset, choice)
    assert chosen.label_names == ("outside", *names)
    assert chosen.label_values == (0, *values)
    rng = np.random.default_rng(0)
    array = rng.choice(np.array([int(value) for value in LABELS]), (9, 8, 7)).astype(np.uint32)
    expected = np.zeros(array.shape, int)
    for index, of_one in enumerate(merged, 1):
        expected[np.isin(array, of_one)] = index
    found = prepared(chosen, array)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(Exception, match="does not name: 4 "):
        prepared(chosen, np.where(np.arange(8 * 9 * 7).reshape(9, 8, 7) == 5, 4, array))


def test_regions_become_labels_and_what_is_ignored_stays(tmp_path):
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "ignore": 4}
    dataset = load_dataset(write_msd(tmp_path, labels=labels, regions_class_order=[1, 2]))
    chosen = with_labels(dataset, ["core"])
    assert (chosen.label_names, chosen.regions) == (("background", "core"), ())
    array = np.arange(5, dtype=np.uint8).reshape(1, 1, 5)
    np.testing.assert_array_equal(prepared(chosen, array), [[[0, 0, 1, 1, 2]]])


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            ["lung"],
            r"lung, which is not a label of .*; name some of liver \(1\), core \(2\), rim \(3",
        ),
        ({"a": [4]}, "names 4, which is not a label of"),
        ({"a": [0]}, r"names 0, which is not a label of .*; name some of liver \(1\)"),
        ({"a": ["outside"]}, "names outside, which is not a label of"),
        ({"a": ["\x1b[2J"]}, r"names \\x1b\[2J, which is"),
        ({"a": [2, 3], "b": ["rim"]}, r"lists rim \(3\) twice, in a and in b; list it once"),
        ({"a": [2, "core"]}, r"lists core \(2\) twice, in a and in a; list it once"),
        (["liver", 1], "two labels called liver|lists liver"),
        ({"outside": [1]}, "calls a label 'outside'; give it another name"),
        ({"ignore": [1]}, "calls a label 'ignore'; give it another name"),
        ({"a": [1], " a ": [2]}, "two labels called a; give each a name"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen_is_one_line(dataset, choice, words):
    with pytest.raises(ConfigError, match=words) as caught:
        with_labels(dataset, choice)
    assert str(caught.value).startswith("data.labels ") and "\n" not in str(caught.value)


def test_channels_are_named_as_in_the_files_if_the_data_set_names_none(tmp_path, monkeypatch):
    opened, orders = nifti.open_file, {"case_0.nii.gz": ("DAPI", "GFP")}

    def open_file(path, reading):
        source = opened(path, reading)
        if source.geometry.num_channels == 2:
            source.channel_names = orders.get(path.name, ())
        return source

    monkeypatch.setattr(nifti, "open_file", open_file)
    for number in range(2):
        write_volume(tmp_path / f"imagesTr/case_{number}.nii.gz", noise((6, 6, 6, 2)))
        write_volume(tmp_path / f"labelsTr/case_{number}.nii.gz", blob_label((6, 6, 6)))
    labels = {"background": 0, "a": 1, "b": 2}
    write_json(
        tmp_path / "dataset.json", {"labels": labels, "training": [msd_entry(0), msd_entry(1)]}
    )
    dataset = load_dataset(tmp_path)
    assert dataset.channel_names == ("DAPI", "GFP")
    assert examine(dataset).findings == []
    orders["case_1.nii.gz"] = ("GFP", "DAPI")
    (finding,) = examine(dataset).findings
    assert "has the channels GFP, DAPI, in another order than the data set" in finding.message
    orders["case_0.nii.gz"] = ("GFP", "GFP")
    assert load_dataset(tmp_path).channel_names == ("channel 0", "channel 1")
