"""The page of a segmentation: its statistics, the viewer's data, and refusals."""

import base64
import gzip
import json

import nibabel as nib
import numpy as np
import pytest
from nibabel.affines import apply_affine

from tests.images.samples import write_volume
from tests.reports.pages.html import Page, assert_closed
from unet3d.errors import VolumeError
from unet3d.images.image import open_image
from unet3d.images.labels import write_label
from unet3d.reports.pages import reduced
from unet3d.reports.pages.segmentation_page import segmentation_page

SHAPE, SPACING_MM = (24, 20, 16), (1.0, 1.5, 2.0)
EVIL = "</script><script>alert(1)</script>"


def scan_and_labels():
    """Return noise; and labels: a box of 4 x 5 x 6 voxels with the value 2, and a voxel with 9."""
    image = np.random.default_rng(0).normal(100, 20, SHAPE).astype(np.float32)
    labels = np.zeros(SHAPE, np.uint8)
    labels[10:14, 5:10, 4:10] = 2
    labels[20, 15, 12] = 9
    return image, labels


@pytest.fixture
def files(tmp_path):
    """A segmentation and its scan."""
    image, labels = scan_and_labels()
    scan = write_volume(tmp_path / "scan.nii.gz", image, SPACING_MM)
    return write_volume(tmp_path / "scan_seg.nii.gz", labels, SPACING_MM), scan


def test_a_large_volume_is_shown_with_fewer_voxels_and_the_page_says_so(files, monkeypatch):
    monkeypatch.setattr("unet3d.images.fitting.MOST_VOXELS", 2000)
    page = Page(segmentation_page(*files))
    assert_closed(page)
    said = "12x10x16 of 24x20x16 voxels"
    assert f"This volume is large: {said} are shown and measured." in page.text
    image, labels = scan_and_labels()
    inside = image[::2, ::2][labels[::2, ::2] == 2].astype(np.float64)
    assert page.cells("label 2", 1)[4:6] == [str(inside.size), f"{inside.mean():.4g}"]
    assert volume_of(page, "viewer-image").shape == (12, 10, 16)


def volume_of(page, name):
    return nib.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(page.data[name])))


def names_in_the_viewer(page):
    return [one["name"] for one in json.loads(page.data["viewer-data"])["labels"]]


def test_the_table_has_the_statistics_of_all_voxels(files):
    text = segmentation_page(*files)
    assert len(text) < 2_000_000 and text == segmentation_page(*files)
    page = Page(text)
    assert_closed(page)
    assert "The viewer is NiiVue 0." in page.text
    assert "BSD 2-Clause License" in page.text and "fflate" in page.text
    image, labels = scan_and_labels()
    inside = image[labels == 2].astype(np.float64)  # 120 voxels of 3 mm3
    expected = ["2", "0.360 mL", "120", f"{inside.mean():.4g}", f"{inside.std():.4g}"]
    assert page.cells("label 2", 1) == ["", "label 2", *expected]
    alone = f"{image[20, 15, 12]:.4g}"
    assert page.cells("label 9", 1)[2:] == ["9", "0.00300 mL", "1", alone, "0"]
    assert "24x20x16" in page.text and "1 x 1.5 x 2 mm" in page.text
    assert "voxels are shown as one" not in page.text


def test_the_viewer_gets_the_scan_its_labels_and_their_places(files):
    page = Page(segmentation_page(*files))
    image, labels = scan_and_labels()
    scan, numbers = volume_of(page, "viewer-image"), volume_of(page, "viewer-labels")
    affine = np.diag([*SPACING_MM, 1])
    assert np.allclose(scan.affine, affine) and np.allclose(numbers.affine, affine)
    assert np.array_equal(np.asarray(numbers.dataobj), (labels > 0) + (labels == 9) * 1)
    viewer = json.loads(page.data["viewer-data"])
    step = (viewer["greys"][1] - viewer["greys"][0]) / 255
    assert np.median(np.abs(scan.get_fdata() - image)) <= step / 2
    assert names_in_the_viewer(page) == ["label 2", "label 9"]
    # Okabe and Ito's sky blue and orange.
    assert [one["colour"] for one in viewer["labels"]] == ["#56B4E9", "#E69F00"]
    for value, one in zip((2, 9), viewer["labels"], strict=True):
        nearest = np.rint(apply_affine(np.linalg.inv(affine), one["place"])).astype(int)
        assert labels[tuple(nearest)] == value
        centre = apply_affine(affine, np.argwhere(labels == value)).mean(axis=0)
        assert np.linalg.norm(centre - one["place"]) < 2


def test_a_scan_in_any_orientation_lies_where_it_is(tmp_path):
    image, labels = scan_and_labels()
    affine = np.array([[0, -1.0, 0, 50], [0, 0, 2, -30], [3, 0, 0, 7], [0, 0, 0, 1]])
    for name, array in (("scan", image), ("seg", labels)):
        nib.save(nib.Nifti1Image(array, affine), tmp_path / f"{name}.nii.gz")
    page = Page(segmentation_page(tmp_path / "seg.nii.gz", tmp_path / "scan.nii.gz"))
    numbers = volume_of(page, "viewer-labels")
    for number, value in ((1, 2), (2, 9)):
        ours = apply_affine(numbers.affine, np.argwhere(np.asarray(numbers.dataobj) == number))
        true = apply_affine(affine, np.argwhere(labels == value))
        assert sorted(map(tuple, np.round(ours, 3))) == sorted(map(tuple, np.round(true, 3)))


@pytest.mark.nightly
def test_a_large_scan_is_reduced_and_the_page_says_so(files, monkeypatch):
    monkeypatch.setattr(reduced, "MAX_VOXELS", 2000)
    page = Page(segmentation_page(*files))
    shown = volume_of(page, "viewer-image").shape
    assert np.prod(shown) <= 2000 and volume_of(page, "viewer-labels").shape == shown
    factors = "x".join(str(round(n / small)) for n, small in zip(SHAPE, shown, strict=True))
    words = f"{factors} voxels are shown as one, {'x'.join(map(str, shown))} instead of 24x20x16"
    assert words in page.text
    # Volumes are still counted from all voxels.
    assert page.cells("label 2", 1)[3:5] == ["0.360 mL", "120"]
    # The page names a label that disappears.
    monkeypatch.setattr(reduced, "MAX_VOXELS", 60)
    page = Page(segmentation_page(*files))
    row = page.cells("label 9", 1)
    assert row[1] == "label 9 (too small for the viewer)" and row[4] == "1"
    assert json.loads(page.data["viewer-data"])["labels"][1]["place"] is None


def test_the_header_names_the_labels(files):
    """No other file is needed, and labels with equal names stay separate."""
    header = open_image(files[1]).geometry
    labels = scan_and_labels()[1]
    write_label(files[0], labels, header, names={2: "liver", 9: "tumour", 11: "spleen"})
    page = Page(segmentation_page(*files))
    assert names_in_the_viewer(page) == ["liver", "tumour", "spleen"]
    assert page.cells("spleen", 1)[2:] == ["11", "0 mL", "0", "–", "–"]
    # Names in another file take precedence; a value without a name is shown as a number.
    named = Page(segmentation_page(*files, {2: "organ"}))
    assert names_in_the_viewer(named) == ["organ", "label 9"]
    write_label(files[0], labels, header, names={2: "liver", 9: "liver"})
    assert names_in_the_viewer(Page(segmentation_page(*files))) == ["liver (2)", "liver (9)"]


def test_names_and_paths_are_text_and_nothing_else(tmp_path):
    image, labels = scan_and_labels()
    folder = tmp_path / "<img src=x>"
    scan = write_volume(folder / "a&b.nii.gz", image, SPACING_MM)
    segmentation, header = folder / "<b>seg.nii.gz", open_image(scan).geometry
    write_label(segmentation, labels, header, names={2: EVIL, 9: "]]><!--<script>"})
    page = Page(segmentation_page(segmentation, scan))
    assert_closed(page)
    assert len(page.sources["script"]) == 2 and len(page.data) == 3
    assert names_in_the_viewer(page) == [EVIL, "]]><!--<script>"]
    assert EVIL in page.text and "<b>seg.nii.gz" in page.text and str(scan) in page.text


def test_an_empty_segmentation_and_several_channels_say_so(tmp_path):
    image, labels = scan_and_labels()
    scan = write_volume(tmp_path / "scan.nii.gz", np.stack([image, -image], axis=3), SPACING_MM)
    empty = write_volume(tmp_path / "seg.nii.gz", labels * 0, SPACING_MM)
    page = Page(segmentation_page(empty, scan))
    assert_closed(page)
    assert "Nothing was segmented." in page.text and names_in_the_viewer(page) == []
    assert "The first of 2 channels is shown." in page.text
    assert volume_of(page, "viewer-image").get_fdata().mean() == pytest.approx(100, abs=2)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((24, 20, 15), np.uint8), ("do not lie on one grid", "24x20x15")),
        (np.arange(7680).reshape(SHAPE).astype(np.int16), ("7680 different values", "an image?")),
        (np.full(SHAPE, -3, np.int16), ("from -3 to -3",)),
        (np.full(SHAPE, 0.5, np.float32), ("not integer labels",)),
    ],
)
def test_what_is_no_segmentation_of_the_scan_is_refused(files, array, words):
    wrong = write_volume(files[0].with_name("wrong.nii.gz"), array, SPACING_MM)
    refuses(wrong, files[1], words)


def test_labels_that_javascript_cannot_count_are_refused(files):
    wrong, affine = files[0].with_name("wrong.nii.gz"), np.diag([*SPACING_MM, 1.0])
    nib.save(nib.Nifti1Image(np.full(SHAPE, 2**60), affine, dtype=np.int64), wrong)
    refuses(wrong, files[1], (f"from {2**60} to {2**60}", "from 0 to 2^53"))


def refuses(wrong, image, words):
    with pytest.raises(VolumeError) as caught:
        segmentation_page(wrong, image)
    assert "\n" not in str(caught.value) and str(wrong) in str(caught.value)
    for word in words:
        assert word in str(caught.value)
