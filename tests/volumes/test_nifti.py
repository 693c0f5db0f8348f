import gzip
import itertools
import logging
import os
import pickle
import re
import struct
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.volumes.samples import refusal
from unet3d.errors import VolumeError
from unet3d.volumes.header import read_header
from unet3d.volumes.nifti import (
    VolumeHeader,
    open_channels,
    read_channels,
    read_image,
    read_label,
    same_grid,
    write_label,
)
from unet3d.volumes.voxels import FileVoxels

ORIENTATIONS = [
    "".join(codes)
    for axes in itertools.permutations(("RL", "AP", "SI"))
    for codes in itertools.product(*axes)
]

# What becomes of each file of the manifest, read as an image and read as a label map: the number
# of channels and the labels, or words of the refusal.
NOT_FINITE, NOT_INTEGER = "NaN or infinite", "no integer labels"
AWKWARD: dict[str, tuple[int | str, list[int] | str | None]] = {
    "natural/sct_t2_t2.nii.gz": (1, None),
    "natural/sct_t2_t2_seg-manual.nii.gz": (1, [0, 1]),
    "natural/sct_t2_t2_seg-manual_labeled.nii.gz": (1, [0, 2, 3, 4, 5]),
    "natural/sct_t2_t2_fake_lesion.nii.gz": (1, None),
    "natural/sct_t2_t2_fake_lesion_lesion_seg.nii.gz": (1, [0, 1]),
    "natural/sct_t1_t1w.nii.gz": (1, None),
    "natural/sct_t1_t1w_seg-manual.nii.gz": (1, [0, 1]),
    "natural/sct_t2s_t2s_uncropped.nii.gz": (1, None),
    "natural/sct_t2s_t2s_uncropped_gmseg_manual.nii.gz": (1, [0, 1]),
    "natural/sct_t2s_t2s.nii.gz": (1, NOT_INTEGER),
    "natural/sct_t2s_t2s_seg-deepseg.nii.gz": (1, [0, 1]),
    "natural/sct_mt_mt1.nii.gz": (1, None),
    "natural/sct_mt_mt1_seg.nii.gz": (1, [0, 1]),
    "natural/sct_mt_t1w.nii.gz": (1, NOT_INTEGER),
    "natural/sct_mt_mtr.nii.gz": (f"633 voxels of 8000 that are {NOT_FINITE}", NOT_FINITE),
    "natural/sct_mt_mt1_gmseg_goldstandard.nii.gz": (1, [0, 1]),
    "natural/sct_dmri_dmri.nii.gz": (7, "7 channels"),
    "natural/sct_fmri_fmri_tsnr.nii.gz": (f"408 voxels of 27744 that are {NOT_FINITE}", NOT_FINITE),
    "natural/sct_fmri_fmri_r.nii.gz": (30, "30 channels"),
    "natural/sct_qmri_venc.nii.gz": (3, "3 channels"),
    "natural/sct_mt_warp_t22mt1.nii.gz": ("5 axes (40x40x5x1x3)", "5 axes"),
    "natural/nib_anatomical.nii": (1, None),
    "natural/nib_functional.nii": (20, "20 channels"),
    "natural/nib_resampled_anat_moved.nii": (
        f"153 voxels of 1071 that are {NOT_FINITE}",
        NOT_FINITE,
    ),
    "natural/nib_reoriented_anat_moved.nii": (1, NOT_INTEGER),
    "natural/nib_example4d.nii.gz": (2, "2 channels"),
    "natural/nib_example_nifti2.nii.gz": (2, "2 channels"),
    "natural/nib_standard.nii.gz": (1, None),
    "natural/nib_test.mgz": (2, "2 channels"),
    "natural/udacity_hippocampus_118_image_without_label.nii.gz": (1, None),
    "natural/udacity_hippocampus_010_label_without_image.nii.gz": (1, [0, 1, 2]),
    "natural/udacity_hippocampus_281_label_without_image.nii.gz": (1, [0, 1]),
    "derived/ref_image.nii.gz": (1, None),
    "derived/ref_label.nii.gz": (1, [0, 1, 2]),
    "derived/plain_image.nii": (1, None),
    "derived/pair_image.hdr": (1, None),
    "derived/pair_label.hdr": (1, [0, 1, 2]),
    "derived/analyze_image.hdr": ("Analyze 7.5", "convert it to NIfTI"),
    "derived/nifti2_image.nii.gz": (1, None),
    "derived/mgh_image.mgz": (1, None),
    "derived/bigendian_image.nii.gz": (1, None),
    "derived/sclslope_image.nii.gz": (1, NOT_INTEGER),
    "derived/float64_image.nii.gz": (1, None),
    "derived/float64_label.nii.gz": (1, [0, 1, 2]),
    "derived/noisyfloat_label.nii.gz": (1, [0, 1, 2]),
    "derived/nan_inf_image.nii.gz": (f"5356 voxels of 62475 that are {NOT_FINITE}", NOT_FINITE),
    "derived/LPS_image.nii.gz": (1, None),
    "derived/LPS_label.nii.gz": (1, [0, 1, 2]),
    "derived/LAS_image.nii.gz": (1, None),
    "derived/LAS_label.nii.gz": (1, [0, 1, 2]),
    "derived/ASR_image.nii.gz": (1, None),
    "derived/ASR_label.nii.gz": (1, [0, 1, 2]),
    "derived/SPL_image.nii.gz": (1, None),
    "derived/SPL_label.nii.gz": (1, [0, 1, 2]),
    "derived/oblique20_image.nii.gz": (1, None),
    "derived/oblique20_label.nii.gz": (1, [0, 1, 2]),
    "derived/shifted_affine_label.nii.gz": (1, [0, 1, 2]),
    "derived/wrongshape_label.nii.gz": (1, [0, 1, 2]),
    "derived/empty_label.nii.gz": (1, [0]),
    "derived/label_0_255.nii.gz": (1, None),
    "derived/neg_label.nii.gz": (1, None),
    "derived/singleton4d_image.nii.gz": (1, None),
    "derived/twochannel_image.nii.gz": (2, "2 channels"),
    "derived/tiny_image.nii.gz": (1, None),
    "derived/oneslice_image.nii.gz": (1, None),
    "derived/oneslice_label.nii.gz": (1, [0, 1, 2]),
    "derived/constant_image.nii.gz": (1, [7]),
    "derived/qformonly_image.nii.gz": (1, None),
    "derived/noform_image.nii.gz": (1, None),
    "derived/truncated_image.nii.gz": ("end before", "end before"),
    "derived/notgz_image.nii.gz": ("is not gzip-compressed", "is not gzip-compressed"),
    "derived/empty_file.nii.gz": ("is empty (0 bytes)", "is empty"),
}


def random_volume(seed: int = 0, shape: tuple[int, ...] = (5, 6, 7)) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 30, shape).astype(np.float32)


def oblique_affine(degrees: float = 20.0) -> np.ndarray:
    turn, tilt = np.deg2rad(degrees), np.deg2rad(degrees / 2)
    around_z = np.array(
        [[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]]
    )
    around_x = np.array(
        [[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]]
    )
    affine = np.eye(4)
    affine[:3, :3] = around_x @ around_z @ np.diag([0.9765625, 0.8, 3.3])
    affine[:3, 3] = [-31.4, 15.9, 26.5]
    return affine


STRAIGHT = np.array([[0.9765625, 0, 0, -10], [0, 0.8, 0, 20], [0, 0, 3.3, -30], [0, 0, 0, 1.0]])
AFFINES = {"straight": STRAIGHT, "oblique": oblique_affine()}


def save_oriented(path: Path, array: np.ndarray, affine: np.ndarray, codes: str, form: str) -> None:
    """Write an RAS array with its axes stored as ``codes`` say, located by qform or sform only."""
    original = nib.Nifti1Image(array, affine)
    reorder = nib.orientations.ornt_transform(
        nib.io_orientation(affine), nib.orientations.axcodes2ornt(tuple(codes))
    )
    image = original.as_reoriented(reorder)
    image.set_qform(image.affine, code=1 if form == "qform" else 0)
    image.set_sform(image.affine, code=2 if form == "sform" else 0)
    nib.save(image, path)


def header_bytes(path: Path, **fields: object) -> None:
    """Change fields of the header of an uncompressed NIfTI file, checking nothing."""
    header = nib.load(path).header.copy()
    for name, value in {"vox_offset": 352, **fields}.items():
        header[name] = value
    raw = header.binaryblock
    with path.open("r+b") as stream:
        stream.write(raw)


SHEARED = STRAIGHT.copy()
SHEARED[:3, 2] += (0, -1.2, 0)  # the tilted gantry of a CT


@pytest.mark.parametrize("affine", [STRAIGHT, oblique_affine(), SHEARED], ids="sos")
def test_a_scan_with_its_axes_as_they_are_stored_is_what_nibabel_loads(
    affine: np.ndarray, tmp_path: Path
) -> None:
    array = np.stack([random_volume(), random_volume(1)], 3)
    for codes in ORIENTATIONS:
        path = tmp_path / f"{codes}.nii"
        save_oriented(path, array, affine, codes, "sform")
        loaded = nib.load(path)
        scan = open_channels([path])
        stored = scan.as_stored()
        found = stored.voxels.whole()
        np.testing.assert_array_equal(np.moveaxis(found, 0, 3), loaded.get_fdata())
        assert stored.header.shape == stored.voxels.shape == loaded.shape[:3]
        assert stored.header.stored_shape == loaded.shape[:3]
        assert stored.header.num_channels == 2
        np.testing.assert_allclose(stored.header.affine, loaded.affine, rtol=0, atol=1e-5)
        zooms = loaded.header.get_zooms()[:3]
        np.testing.assert_allclose(stored.header.spacing_mm, zooms, rtol=1e-6)
        np.testing.assert_array_equal(stored.header.exact_mm, zooms)
        assert same_grid(stored.header, scan.header) is None
        assert np.shares_memory(
            stored.voxels.channel(0)._file.voxels, scan.voxels.channel(0)._file.voxels
        )


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.nii"
    nib.save(nib.Nifti1Image(random_volume(), STRAIGHT), path)
    return path


def test_the_table_names_every_awkward_file(test_data):
    manifest = (test_data / "awkward" / "MANIFEST.tsv").read_text().splitlines()

    assert [line.split("\t")[0] for line in manifest] == list(AWKWARD)
    assert len(AWKWARD) == 72


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_file(test_data, name):
    path = test_data / "awkward" / name
    as_image, as_label = AWKWARD[name]
    if isinstance(as_image, str):
        assert as_image in refusal(path)
    else:
        volume = read_image(path)
        # nibabel's own reorientation, with its affine and spacing, is the reference.
        reference = nib.as_closest_canonical(nib.load(path))
        expected = reference.get_fdata().astype(np.float32)
        expected = np.moveaxis(expected.reshape(*expected.shape[:3], -1), 3, 0)
        assert np.array_equal(volume.array, expected)  # a fifth of the time of numpy.testing
        assert volume.array.dtype == np.float32 and volume.array.flags.c_contiguous
        assert volume.header.shape == volume.array.shape[1:]
        assert volume.header.num_channels == as_image
        np.testing.assert_allclose(volume.header.affine, reference.affine, atol=1e-6)
        spacing = nib.affines.voxel_sizes(reference.affine)
        np.testing.assert_allclose(volume.header.spacing_mm, spacing, rtol=1e-5)
        assert read_header(path).spacing_mm == volume.header.spacing_mm
    if isinstance(as_label, str):
        assert as_label in refusal(path, read_label)
    elif as_label is not None:
        label = read_label(path)
        assert np.unique(label.array).tolist() == as_label
        assert label.array.dtype == np.uint8 and label.array.flags.c_contiguous


def test_awkward_reorientations_are_one_scan(test_data):
    folder = test_data / "awkward" / "derived"
    image, label = read_image(folder / "ref_image.nii.gz"), read_label(folder / "ref_label.nii.gz")
    for codes in ("LPS", "LAS", "ASR", "SPL"):
        other = read_image(folder / f"{codes}_image.nii.gz")
        np.testing.assert_array_equal(other.array, image.array)
        assert same_grid(other.header, image.header) is None
        np.testing.assert_array_equal(
            read_label(folder / f"{codes}_label.nii.gz").array, label.array
        )
    assert "8.66 mm apart" in (
        same_grid(image.header, read_header(folder / "shifted_affine_label.nii.gz")) or ""
    )
    assert same_grid(image.header, read_header(folder / "wrongshape_label.nii.gz")) == (
        "shapes 35x51x35 and 35x51x34 differ"
    )


@pytest.mark.parametrize("form", ["qform", "sform"])
@pytest.mark.parametrize("affine", AFFINES)
def test_all_orientations_of_a_scan_read_alike(tmp_path, affine, form):
    array = random_volume()
    headers: list[VolumeHeader] = []
    assert len(set(ORIENTATIONS)) == 48
    for codes in ORIENTATIONS:
        path = tmp_path / f"{codes}.nii"
        save_oriented(path, array, AFFINES[affine], codes, form)
        assert "".join(nib.aff2axcodes(nib.load(path).affine)) == codes
        volume = read_image(path)
        np.testing.assert_array_equal(volume.array[0], array)
        assert volume.array.flags.c_contiguous
        headers.append(volume.header)
    assert {header.spacing_mm for header in headers} == {headers[0].spacing_mm}
    np.testing.assert_allclose(headers[0].spacing_mm, [0.9765625, 0.8, 3.3], atol=1e-6)
    for header in headers:
        np.testing.assert_allclose(header.affine, AFFINES[affine], atol=1e-5)
        assert same_grid(header, headers[0]) is None


@pytest.mark.parametrize("affine", AFFINES)
@pytest.mark.parametrize("codes", ORIENTATIONS)
def test_labels_are_written_as_the_image_is_stored(tmp_path, affine, codes):
    path, output = tmp_path / "image.nii", tmp_path / "label.nii.gz"
    array = random_volume()
    save_oriented(path, array, AFFINES[affine], codes, "sform")
    image = nib.load(path)
    image.set_qform(oblique_affine(5), code=3)  # a qform of its own must survive
    image.header.set_xyzt_units("mm", "sec")
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj).copy(), None, image.header), path)
    image = nib.load(path)

    write_label(output, (array > 100).astype(np.int64), read_image(path).header)

    label = nib.load(output)
    np.testing.assert_array_equal(np.asanyarray(label.dataobj), image.get_fdata() > 100)
    assert label.shape == image.shape
    assert label.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(label.affine, image.affine)
    for form in ("get_qform", "get_sform"):
        expected, expected_code = getattr(image.header, form)(coded=True)
        found, code = getattr(label.header, form)(coded=True)
        np.testing.assert_array_equal(found, expected)
        assert code == expected_code != 0
    assert label.header.get_zooms() == image.header.get_zooms()
    assert label.header.get_xyzt_units() == ("mm", "sec")
    assert label.header.get_slope_inter() == (None, None)
    np.testing.assert_array_equal(read_label(output).array, array > 100)


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 2), (4, 1)])
def test_codes_are_written_as_they_were(tmp_path, codes):
    path, output = tmp_path / "image.nii", tmp_path / "label.nii"
    image = nib.Nifti1Image(random_volume(), STRAIGHT)
    image.set_qform(STRAIGHT, code=codes[0])
    image.set_sform(STRAIGHT, code=codes[1])
    nib.save(image, path)

    header = read_header(path)
    write_label(output, np.zeros(header.shape, np.uint8), header)

    written = nib.load(output)
    assert (int(written.header["qform_code"]), int(written.header["sform_code"])) == codes
    np.testing.assert_array_equal(written.affine, nib.load(path).affine)
    assert same_grid(read_header(output), header) is None


@pytest.mark.parametrize("kind", ["nifti2", "mgz", "pair", "big-endian", "4-D", "one slice"])
def test_labels_are_written_for_every_kind_of_image(tmp_path, kind):
    array = random_volume(shape=(5, 6, 1) if kind == "one slice" else (5, 6, 7))
    stored = array[..., None] if kind == "4-D" else array
    affine = STRAIGHT @ np.diag([-1, 1, 1, 1])
    name = {"mgz": "image.mgz", "pair": "image.img"}.get(kind, "image.nii")
    if kind == "nifti2":
        image = nib.Nifti2Image(stored, affine)
    elif kind == "mgz":
        image = nib.MGHImage(stored, affine)
    elif kind == "pair":
        image = nib.Nifti1Pair(stored, affine)
    elif kind == "big-endian":
        image = nib.Nifti1Image(stored, affine, nib.Nifti1Header(endianness=">"))
    else:
        image = nib.Nifti1Image(stored, affine)
    nib.save(image, tmp_path / name)

    volume = read_image(tmp_path / name)
    write_label(tmp_path / "label.nii.gz", (volume.array[0] > 100).astype(np.uint8), volume.header)

    label = nib.load(tmp_path / "label.nii.gz")
    np.testing.assert_array_equal(np.asanyarray(label.dataobj), array > 100)
    np.testing.assert_allclose(label.affine, nib.load(tmp_path / name).affine, atol=1e-5)
    assert isinstance(label, nib.Nifti2Image) == (kind == "nifti2")


@pytest.mark.parametrize(
    ("highest", "dtype"), [(1, np.uint8), (255, np.uint8), (256, np.uint16), (70_000, np.uint32)]
)
def test_labels_take_the_smallest_type(tmp_path, plain, highest, dtype):
    header = read_header(plain)
    labels = np.zeros(header.shape, np.int64)
    labels[1, 2, 3] = highest
    write_label(tmp_path / "label.nii", labels, header)

    assert nib.load(tmp_path / "label.nii").get_data_dtype() == dtype
    label = read_label(tmp_path / "label.nii")
    assert label.array.dtype == dtype
    np.testing.assert_array_equal(label.array, labels)


@pytest.mark.parametrize(
    ("values", "dtype"), [((-1, 1), np.int8), ((-1, 200), np.int16), ((-300, 40_000), np.int32)]
)
def test_negative_labels_take_the_smallest_signed_type(tmp_path, values, dtype):
    stored = np.zeros((3, 4, 5), np.int32)
    stored.flat[:2] = values
    nib.save(nib.Nifti1Image(stored, np.eye(4)), tmp_path / "label.nii")

    label = read_label(tmp_path / "label.nii")

    assert label.array.dtype == dtype
    np.testing.assert_array_equal(label.array, stored)


@pytest.mark.parametrize("value", [0.5, 1.002, 3.4e38])
def test_labels_far_from_integers_are_refused_by_value(tmp_path, value):
    stored = np.zeros((3, 4, 5), np.float64)
    stored[1, 1, 1] = value
    nib.save(nib.Nifti1Image(stored, np.eye(4)), tmp_path / "label.nii")

    assert f"1 voxels that are no integer labels, such as {value:g}" in refusal(
        tmp_path / "label.nii", read_label
    )


def test_labels_that_would_all_be_rounded_away_are_refused(tmp_path):
    """As of an image in units of m^2/s; noise beside labels is no fault."""
    stored = np.full((3, 4, 5), 7e-4)
    nib.save(nib.Nifti1Image(stored, np.eye(4)), tmp_path / "label.nii")
    assert "no integer labels but values up to 0.0007" in refusal(
        tmp_path / "label.nii", read_label
    )
    stored[1, 1, 1] = 3
    nib.save(nib.Nifti1Image(stored, np.eye(4)), tmp_path / "label.nii")
    assert read_label(tmp_path / "label.nii").array.sum() == 3


def test_writing_refuses_what_are_no_labels_of_the_image(tmp_path, plain):
    header = read_header(plain)
    with pytest.raises(ValueError, match="shape"):
        write_label(tmp_path / "a.nii", np.zeros((7, 6, 5), np.uint8), header)
    with pytest.raises(ValueError, match="float32"):
        write_label(tmp_path / "a.nii", np.zeros(header.shape, np.float32), header)
    with pytest.raises(ValueError, match="-1"):
        write_label(tmp_path / "a.nii", np.full(header.shape, -1), header)
    with pytest.raises(VolumeError, match=r"choose a name that ends in .nii.gz or .nii"):
        write_label(tmp_path / "a.mgz", np.zeros(header.shape, np.uint8), header)
    with pytest.raises(VolumeError, match="cannot write .*No such file or directory"):
        write_label(tmp_path / "no" / "a.nii", np.zeros(header.shape, np.uint8), header)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.nii"]


@pytest.mark.parametrize("failing", ["save", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, plain, monkeypatch, failing):
    header = read_header(plain)
    output = tmp_path / "label.nii"
    write_label(output, np.ones(header.shape, np.uint8), header)
    before = output.read_bytes()

    def half_written(_, file_map):
        Path(file_map["image"].filename).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if failing == "save":
        monkeypatch.setattr(nib.Nifti1Image, "to_file_map", half_written)
    else:

        def refused(*_):
            raise OSError(1, "refused")

        monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(VolumeError, match=r"cannot write .*label.nii: (No space|refused)"):
        write_label(output, np.zeros(header.shape, np.uint8), header)

    assert output.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"plain.nii", "label.nii"}


def test_units_other_than_mm_are_converted_and_written_back(tmp_path):
    array = random_volume()
    for units, factor in (("micron", 1e-3), ("meter", 1e3), ("unknown", 1.0)):
        image = nib.Nifti1Image(array, STRAIGHT)
        image.header.set_xyzt_units(units)
        nib.save(image, tmp_path / "image.nii")

        header = read_header(tmp_path / "image.nii")
        np.testing.assert_allclose(
            header.spacing_mm, np.array([0.9765625, 0.8, 3.3]) * factor, atol=1e-6
        )
        np.testing.assert_allclose(header.affine[:3], STRAIGHT[:3] * factor, rtol=1e-6)
        write_label(tmp_path / "label.nii", np.ones(header.shape, np.uint8), header)
        label = nib.load(tmp_path / "label.nii")
        assert label.header.get_xyzt_units()[0] == units
        np.testing.assert_array_equal(label.affine, nib.load(tmp_path / "image.nii").affine)


def test_channels_keep_their_order(tmp_path):
    array = random_volume(shape=(4, 5, 6, 3))
    nib.save(nib.Nifti1Image(array, np.diag([-1, -1, 1, 1])), tmp_path / "image.nii.gz")

    volume = read_image(tmp_path / "image.nii.gz")

    assert volume.header.num_channels == 3
    for channel in range(3):
        np.testing.assert_array_equal(volume.array[channel], array[::-1, ::-1, :, channel])


@pytest.mark.parametrize("shape", [(4, 5, 6, 1, 1), (4, 5, 6, 1), (4, 5, 6), (4, 5)])
def test_axes_of_length_one_do_not_count(tmp_path, shape):
    array = random_volume(shape=shape)
    nib.save(nib.Nifti1Image(array, np.eye(4)), tmp_path / "image.nii")

    volume = read_image(tmp_path / "image.nii")

    assert volume.header.num_channels == 1
    np.testing.assert_array_equal(volume.array.ravel(), array.ravel())
    assert volume.array.shape == (1, 4, 5, shape[2] if len(shape) > 2 else 1)


def test_scaling_is_applied(tmp_path):
    image = nib.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4))
    nib.save(image, tmp_path / "image.nii")
    header_bytes(tmp_path / "image.nii", scl_slope=0.5, scl_inter=-7)

    array = read_image(tmp_path / "image.nii").array

    np.testing.assert_array_equal(array.ravel(), np.arange(60) * 0.5 - 7)


def test_a_number_beyond_float32_counts_as_infinite(tmp_path):
    array = np.zeros((3, 4, 5))
    array[0, 0, :2] = 1e39, -1e300
    nib.save(nib.Nifti1Image(array, np.eye(4)), tmp_path / "image.nii")

    assert "2 voxels of 60 that are NaN or infinite" in refusal(tmp_path / "image.nii")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(np.complex64, "complex"), ([("R", "u1"), ("G", "u1"), ("B", "u1")], "colour")],
)
def test_voxels_that_are_no_real_numbers_are_refused(tmp_path, dtype, kind):
    nib.save(nib.Nifti1Image(np.zeros((3, 4, 5), dtype), np.eye(4)), tmp_path / "image.nii")

    assert f"holds {kind} voxels" in refusal(tmp_path / "image.nii", read_header)


def test_an_unknown_orientation_is_accepted_with_a_warning(plain, caplog):
    header_bytes(plain, qform_code=0, sform_code=0)
    with caplog.at_level(logging.WARNING):
        header = read_header(plain)

    assert "does not state its orientation" in caplog.text and str(plain) in caplog.text
    expected = nib.as_closest_canonical(nib.load(plain)).affine
    np.testing.assert_allclose(header.affine, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sform_code": 2, "srow_x": [1, 1, 0, 5], "srow_y": [1, 1, 0, 0]}, "cannot be inverted"),
        ({"sform_code": 2, "srow_x": [0, 0, 0, 5]}, "spacing 0x0.8x3.3 mm"),
        ({"sform_code": 2, "srow_x": [np.nan, 0, 0, 5]}, "spacing nanx0.8x3.3 mm"),
        ({"sform_code": 2, "srow_x": [0.7, 0, 0, np.inf]}, "begins at infx"),
        ({"sform_code": 2, "srow_y": [0, 0, 0, 5]}, "spacing 0.976562x0x3.3 mm"),
        ({"sform_code": 0, "qform_code": 1, "pixdim": [1, 1, 0, 1, 1, 1, 1, 1]}, "1x0x1 mm"),
        ({"sform_code": 0, "qform_code": 1, "pixdim": [1, 1, np.nan, 1, 1, 1, 1, 1]}, "1xnanx1"),
        ({"sform_code": 0, "qform_code": 0, "pixdim": [1, 0, 0, 0, 1, 1, 1, 1]}, "0x0x0 mm"),
    ],
)
def test_a_header_that_locates_no_voxel_is_refused(plain, fields, words):
    header_bytes(plain, **fields)

    assert words in refusal(plain, read_header)


def test_absurd_shapes_are_refused_before_anything_is_allocated(plain, tmp_path):
    compressed = tmp_path / "compressed.nii.gz"
    header_bytes(plain, dim=[3, 30_000, 30_000, 30_000, 1, 1, 1, 1])
    compressed.write_bytes(gzip.compress(plain.read_bytes()))

    for path in (plain, compressed):
        for read in (read_header, read_image, read_label):
            message = refusal(path, read)
            assert "claims the shape 30000x30000x30000" in message
            assert "damaged or incomplete" in message


@pytest.mark.parametrize("dim", [[3, 0, 6, 7, 1, 1, 1, 1], [3, -5, 6, 7, 1, 1, 1, 1]])
def test_shapes_without_voxels_are_refused(plain, dim):
    header_bytes(plain, dim=dim)

    assert re.search("it has no voxels|cannot read", refusal(plain, read_header))


def test_nothing_but_the_error_tells_of_a_damaged_header(plain, capfd):
    content = bytearray(plain.read_bytes())
    content[70:72] = struct.pack("<h", 4096)  # no data type has this code
    plain.write_bytes(content)

    assert "data code 4096 not recognized" in refusal(plain, read_header)
    assert capfd.readouterr() == ("", "")


def test_a_truncated_plain_file_is_refused_by_its_header_alone(plain):
    plain.write_bytes(plain.read_bytes()[:-1])

    assert "damaged or incomplete" in refusal(plain, read_header)


@pytest.mark.parametrize("suffix", [".nii.gz", ".mgz"])
@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "checksum"])
def test_damaged_gzip_is_refused(tmp_path, suffix, damage):
    array = random_volume(shape=(20, 20, 20))
    path = tmp_path / f"image{suffix}"
    kind = nib.MGHImage if suffix == ".mgz" else nib.Nifti1Image
    nib.save(kind(array, np.eye(4)), path)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "flipped bit":
        content[len(content) // 2] ^= 4
    else:
        content[-8:-4] = struct.pack("<I", 12345)
    path.write_bytes(content)

    for read in (read_image, read_label):
        assert "cannot read" in refusal(path, read)
    if suffix == ".nii.gz":  # the damage lies behind what a header needs
        assert read_header(path).shape == (20, 20, 20)


def test_files_that_are_not_there_or_not_volumes_are_refused(tmp_path, plain):
    folder = tmp_path / "folder.nii"
    folder.mkdir()
    noise = tmp_path / "noise.nii"
    noise.write_bytes(np.random.default_rng(0).bytes(4000))
    text = tmp_path / "scan.txt"
    text.write_text("no scan")
    hidden = tmp_path / "hidden.nii"
    hidden.write_bytes(gzip.compress(plain.read_bytes()))
    lonely = tmp_path / "lonely.hdr"
    lonely.write_bytes(plain.read_bytes()[:348])

    assert "No such file" in refusal(tmp_path / "missing.nii.gz")
    assert "No such file" in refusal(tmp_path / "missing.hdr")
    assert "is a folder without DICOM slices" in refusal(folder)
    assert "it does not begin with a NIfTI header" in refusal(noise)
    assert "not named like a volume" in refusal(text)
    assert "is gzip-compressed, though" in refusal(hidden)
    assert "lacks its partner lonely.img" in refusal(lonely)


def test_a_file_without_permission_is_refused(plain, monkeypatch):
    if os.geteuid() == 0:  # root may read everything, so let the open call itself refuse

        def denied(*_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", denied)
    else:
        plain.chmod(0)

    assert "Permission denied" in refusal(plain)


def test_too_little_memory_is_explained(plain, monkeypatch):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr(FileVoxels, "read", exhausted)

    assert refusal(plain).find("too little memory") > 0


def test_headers_travel_between_processes(plain, tmp_path):
    header = read_header(plain)
    copy = pickle.loads(pickle.dumps(header))

    assert same_grid(copy, header) is None
    write_label(tmp_path / "label.nii", np.zeros(header.shape, np.uint8), copy)
    assert same_grid(read_header(tmp_path / "label.nii"), header) is None


def test_same_grid_measures_corners_in_mm(tmp_path):
    headers = []
    for index, (shift, turn) in enumerate([(0.0, 0.0), (0.05, 0.0), (2.0, 0.0), (0.0, 10.0)]):
        affine = oblique_affine(turn)
        affine[0, 3] += shift
        nib.save(nib.Nifti1Image(random_volume(), affine), tmp_path / f"{index}.nii")
        headers.append(read_header(tmp_path / f"{index}.nii"))

    assert same_grid(headers[0], headers[1]) is None
    assert "0.05 mm apart" in (same_grid(headers[0], headers[1], tolerance_mm=0.01) or "")
    assert "2 mm apart" in (same_grid(headers[0], headers[2]) or "")
    assert same_grid(headers[0], headers[2], tolerance_mm=2.5) is None
    assert "mm apart" in (same_grid(headers[0], headers[3]) or "")


def test_channels_in_one_file_or_in_several_are_one_array(tmp_path):
    array = np.stack([random_volume(), random_volume() + 1, random_volume() + 2], axis=-1)
    nib.save(nib.Nifti1Image(array, STRAIGHT), tmp_path / "all.nii")
    nib.save(nib.Nifti1Image(array[..., 0], STRAIGHT), tmp_path / "first.nii")
    # The others are stored from right to left, but lie where the first one lies.
    flip = np.diag([-1.0, 1.0, 1.0, 1.0])
    flip[0, 3] = len(array) - 1
    nib.save(nib.Nifti1Image(array[::-1, ..., 1:], STRAIGHT @ flip), tmp_path / "others.nii")

    together = read_channels([tmp_path / "all.nii"])
    apart = read_channels([tmp_path / "first.nii", tmp_path / "others.nii"])
    assert together.header.num_channels == apart.header.num_channels == 3
    assert apart.array.dtype == np.float32 and apart.array.flags.c_contiguous
    np.testing.assert_array_equal(apart.array, together.array)
    assert same_grid(apart.header, together.header) is None
    assert apart.header.path == tmp_path / "first.nii"


def test_channels_on_two_grids_are_refused_before_their_voxels_are_read(tmp_path, monkeypatch):
    nib.save(nib.Nifti1Image(random_volume(), STRAIGHT), tmp_path / "a.nii")
    nib.save(nib.Nifti1Image(random_volume()[1:], STRAIGHT), tmp_path / "b.nii")

    def read(*_):
        raise AssertionError("voxels were read")

    monkeypatch.setattr("unet3d.volumes.nifti.raw_voxels", read)
    with pytest.raises(VolumeError, match=r"b\.nii is not on the grid of .*a\.nii: shapes"):
        read_channels([tmp_path / "a.nii", tmp_path / "b.nii"])
