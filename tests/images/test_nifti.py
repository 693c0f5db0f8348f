import gzip
import itertools
import pickle
import re
import struct
from pathlib import Path
from unittest import mock

import nibabel as nib
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from tests.images.orientations import ORIENTATIONS, turn_to
from tests.images.samples import loaded, read_image, refusal
from tests.products import by_night
from tests.resident import resident_kib
from unet3d.errors import VolumeError
from unet3d.images import nifti
from unet3d.images.geometry import same_grid
from unet3d.images.image import open_image
from unet3d.images.labels import read_label, write_label
from unet3d.images.scratch import Scratch, forget_pages

UNREADABLE = {
    "natural/sct_mt_warp_t22mt1.nii.gz": "5 axes (40x40x5x1x3)",
    "derived/analyze_image.hdr": "such as Analyze 7.5, convert it to NIfTI",
    "derived/truncated_image.nii.gz": "marker was reached; it is damaged or incomplete: copy it",
    "derived/empty_file.nii.gz": "is empty (0 bytes)",
}
"""Awkward files that cannot be used, and part of the message for each."""


def random_volume(seed=0, shape=(5, 6, 7)):
    return np.random.default_rng(seed).normal(100, 30, shape).astype(np.float32)


def oblique_affine(degrees=20.0):
    turned = Rotation.from_euler("zx", [degrees, degrees / 2], degrees=True).as_matrix()
    affine = np.eye(4)
    affine[:3, :3] = turned @ np.diag([0.9765625, 0.8, 3.3])
    affine[:3, 3] = [-31.4, 15.9, 26.5]
    return affine


STRAIGHT = np.array([[0.9765625, 0, 0, -10], [0, 0.8, 0, 20], [0, 0, 3.3, -30], [0, 0, 0, 1.0]])
SHEARED = STRAIGHT + [[0, 0, 0, 0], [0, 0, -1.2, 0], [0] * 4, [0] * 4]  # a tilted gantry
AFFINES = {"straight": STRAIGHT, "oblique": oblique_affine(), "sheared": SHEARED}


def save_oriented(path, array, affine, codes, form):
    """Write an RAS array stored with axes ``codes``, located only by a qform or an sform."""
    image = nib.Nifti1Image(array, affine).as_reoriented(turn_to(codes, affine))
    image.set_qform(image.affine, code=1 if form == "qform" else 0)
    image.set_sform(image.affine, code=2 if form == "sform" else 0)
    nib.save(image, path)


def header_bytes(path, **fields):
    """Change fields of the header of an uncompressed NIfTI file, without any check."""
    header = nib.load(path).header.copy()
    for name, value in {"vox_offset": 352, **fields}.items():
        header[name] = value
    path.write_bytes(header.binaryblock + path.read_bytes()[len(header.binaryblock) :])


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.nii"
    nib.save(nib.Nifti1Image(random_volume(), STRAIGHT), path)
    return path


def test_awkward_files_are_what_nibabel_loads(test_data):
    manifest = (test_data / "awkward" / "MANIFEST.tsv").read_text().splitlines()
    assert len(manifest) == 72
    for name in (line.split("\t")[0] for line in manifest):
        path = test_data / "awkward" / name
        if name in UNREADABLE:
            for read in (read_image, read_label):
                assert UNREADABLE[name] in refusal(path, read)
        else:
            assert_is_what_nibabel_loads(path)


def assert_is_what_nibabel_loads(path):
    """Check that image and label map are as nibabel reorients them, or that they are refused."""
    reference = nib.as_closest_canonical(loaded(path))
    found = reference.get_fdata()
    expected = np.moveaxis(found.reshape(*found.shape[:3], -1), 3, 0).astype(np.float32)
    num_bad, num_channels = np.count_nonzero(~np.isfinite(expected)), len(expected)
    if num_bad:
        assert "not integer labels, such as" in refusal(path, read_label)
        assert np.array_equal(open_image(path).whole(), expected, equal_nan=True)
        return
    volume = open_image(path)
    assert np.array_equal(volume.whole(), expected)  # takes a fifth of the time of numpy.testing
    assert volume.whole().dtype == np.float32 and volume.whole().flags.c_contiguous
    assert volume.geometry.shape == volume.whole().shape[1:]
    assert volume.geometry.num_channels == num_channels
    np.testing.assert_allclose(volume.geometry.affine, reference.affine, atol=1e-6)
    spacing = nib.affines.voxel_sizes(reference.affine)
    np.testing.assert_allclose(volume.geometry.spacing_mm, spacing, rtol=1e-5)
    assert open_image(path).geometry.spacing_mm == volume.geometry.spacing_mm
    if num_channels > 1:
        assert f"{num_channels} channels" in refusal(path, read_label)
    elif np.abs(found - np.rint(found)).max() > 1e-3:
        assert "not integer labels" in refusal(path, read_label)
    else:
        label = read_label(path).array
        np.testing.assert_array_equal(label, np.rint(expected[0]))
        assert label.flags.c_contiguous


@pytest.mark.parametrize("affine", ["oblique", *by_night("straight", "sheared")])
def test_all_orientations_of_a_scan_read_alike(tmp_path, affine):
    array = np.stack([random_volume(), random_volume(1)], 3)
    forms = ("sform",) if affine == "sheared" else ("qform", "sform")
    headers = []
    assert len(set(ORIENTATIONS)) == 48
    for codes, form in itertools.product(ORIENTATIONS, forms):
        path = tmp_path / f"{codes}.nii"
        save_oriented(path, array, AFFINES[affine], codes, form)
        loaded = nib.load(path)
        if affine != "sheared":
            assert "".join(nib.aff2axcodes(loaded.affine)) == codes
        volume = open_image(path)
        np.testing.assert_array_equal(np.moveaxis(volume.whole(), 0, 3), array)
        assert volume.whole().flags.c_contiguous
        headers.append(volume.geometry)
        stored = open_image(path).as_stored()
        np.testing.assert_array_equal(np.moveaxis(stored.whole(), 0, 3), loaded.get_fdata())
        assert stored.geometry.shape == stored.shape[1:] == loaded.shape[:3]
        assert stored.geometry.stored_shape == loaded.shape[:3]
        assert stored.geometry.num_channels == 2
        np.testing.assert_allclose(stored.geometry.affine, loaded.affine, rtol=0, atol=1e-5)
        zooms = loaded.header.get_zooms()[:3]
        np.testing.assert_array_equal(stored.geometry.spacing_mm, zooms)
        assert same_grid(stored.geometry, volume.geometry) is None
    lengths = nib.affines.voxel_sizes(AFFINES[affine])
    np.testing.assert_allclose(headers[0].spacing_mm, lengths, atol=1e-6)
    for header in headers:
        np.testing.assert_allclose(header.affine, AFFINES[affine], atol=1e-5)
        assert same_grid(header, headers[0]) is None


@pytest.mark.parametrize("affine", ["oblique", *by_night("straight")])
def test_labels_are_written_as_the_image_is_stored(tmp_path, affine):
    path, output = tmp_path / "image.nii", tmp_path / "label.nii"
    array = random_volume()
    for codes in ORIENTATIONS:
        save_oriented(path, array, AFFINES[affine], codes, "sform")
        image = nib.load(path)
        image.set_qform(oblique_affine(5), code=3)  # a qform of its own must survive
        image.header.set_xyzt_units("mm", "sec")
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj).copy(), None, image.header), path)
        image = nib.load(path)
        write_label(output, (array > 100).astype(np.int64), open_image(path).geometry)
        label = nib.load(output)
        np.testing.assert_array_equal(np.asanyarray(label.dataobj), image.get_fdata() > 100)
        assert (label.shape, label.get_data_dtype()) == (image.shape, np.uint8)
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


def test_labels_are_written_for_every_kind_of_image(tmp_path):
    array, affine = random_volume(), STRAIGHT @ np.diag([-1, 1, 1, 1])
    images = {
        "two.nii": nib.Nifti2Image(array, affine),
        "image.mgz": nib.MGHImage(array, affine),
        "pair.img": nib.Nifti1Pair(array, affine),
        "big.nii": nib.Nifti1Image(array, affine, nib.Nifti1Header(endianness=">")),
        "4-D.nii": nib.Nifti1Image(array[..., None, None], affine),
        "slice.nii": nib.Nifti1Image(array[..., :1], affine),
        "picture.nii": nib.Nifti1Image(array[..., 0], affine),
    }
    for codes in ((0, 0), (1, 0), (0, 2), (4, 1)):
        image = images[f"codes {codes}.nii"] = nib.Nifti1Image(array, affine)
        image.set_qform(affine, code=codes[0])
        image.set_sform(affine, code=codes[1])
    for name, image in images.items():
        nib.save(image, tmp_path / name)
        volume = open_image(tmp_path / name)
        header = pickle.loads(pickle.dumps(volume.geometry))  # as between processes
        assert header.num_channels == 1
        write_label(tmp_path / "label.nii.gz", (volume.whole()[0] > 100).astype(np.uint8), header)
        assert same_grid(open_image(tmp_path / "label.nii.gz").geometry, header) is None
        label, stored = nib.load(tmp_path / "label.nii.gz"), nib.load(tmp_path / name)
        assert label.shape == (*stored.shape, 1)[:3]
        found = np.asanyarray(label.dataobj).reshape(image.shape)
        np.testing.assert_array_equal(found, stored.get_fdata() > 100)
        np.testing.assert_allclose(label.affine, stored.affine, atol=1e-5)
        assert isinstance(label, nib.Nifti2Image) == (name == "two.nii")
        for code in ("qform_code", "sform_code") if "codes" in name else ():
            assert label.header[code] == stored.header[code]


def test_labels_take_the_smallest_type(tmp_path):
    natural = [(0, 1, "u1"), (0, 255, "u1"), (0, 256, "u2"), (0, 70_000, "u4")]
    signed = [(-1, 127, "i1"), (-1, 128, "i2"), (-129, 1, "i2"), (-300, 40_000, "i4")]
    for low, high, dtype in natural + signed:
        stored = np.zeros((3, 4, 5), np.int32)
        stored.flat[:2] = low, high
        nib.save(nib.Nifti1Image(stored, np.eye(4)), tmp_path / "label.nii")
        label = read_label(tmp_path / "label.nii")
        assert label.array.dtype == dtype
        np.testing.assert_array_equal(label.array, stored)
        if low >= 0:
            write_label(tmp_path / "written.nii", stored.astype(np.int64), label.geometry)
            assert nib.load(tmp_path / "written.nii").get_data_dtype() == dtype
            np.testing.assert_array_equal(read_label(tmp_path / "written.nii").array, stored)


def test_labels_far_from_integers_are_refused_by_value(tmp_path):
    path = tmp_path / "label.nii"
    for value in (0.5, 1.002, 3.4e38):
        stored = np.zeros((3, 4, 5), np.float64)
        stored[1, 1, 1] = value
        nib.save(nib.Nifti1Image(stored, np.eye(4)), path)
        expected = f"1 voxels that are not integer labels, such as {value:g}"
        assert expected in refusal(path, read_label)
    # A whole image of small numbers would be rounded to 0; among labels, noise is no fault.
    stored = np.full((3, 4, 5), 7e-4)
    nib.save(nib.Nifti1Image(stored, np.eye(4)), path)
    assert "60 voxels that are not integer labels, such as 0.0007;" in refusal(path, read_label)
    stored[1, 1, 1] = 3
    nib.save(nib.Nifti1Image(stored, np.eye(4)), path)
    assert read_label(path).array.sum() == 3


def test_writing_refuses_what_are_no_labels_of_the_image(tmp_path, plain):
    header = open_image(plain).geometry
    labels = np.zeros(header.shape, np.uint8)
    for name, wrong, words in (
        ("a.nii", labels.T, "shape"),
        ("a.nii", labels.astype(np.float32), "float32"),
        ("a.nii", labels.astype(int) - 1, "-1"),
        ("a.mgz", labels, "choose a name that ends in .nii.gz or .nii or .tif or .tiff"),
        ("no/a.nii", labels, "cannot write .*No such file or directory"),
    ):
        with pytest.raises((ValueError, VolumeError), match=words):
            write_label(tmp_path / name, wrong, header)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.nii"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, plain, monkeypatch):
    header, output = open_image(plain).geometry, tmp_path / "label.nii"
    write_label(output, np.ones(header.shape, np.uint8), header)
    before = output.read_bytes()

    def half_written(_, file_map):
        Path(file_map["image"].filename).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nib.Nifti1Image, "to_file_map", half_written)
    with pytest.raises(VolumeError, match=r"cannot write .*label.nii: No space left on device"):
        write_label(output, np.zeros(header.shape, np.uint8), header)
    assert output.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"plain.nii", "label.nii"}


def test_units_other_than_mm_are_converted_and_written_back(tmp_path):
    array = random_volume()
    for units, factor in (("micron", 1e-3), ("meter", 1e3), ("unknown", 1.0)):
        image = nib.Nifti1Image(array, STRAIGHT)
        image.header.set_xyzt_units(units)
        nib.save(image, tmp_path / "image.nii")
        header = open_image(tmp_path / "image.nii").geometry
        np.testing.assert_allclose(header.spacing_mm, np.diag(STRAIGHT)[:3] * factor, atol=1e-6)
        np.testing.assert_allclose(header.affine[:3], STRAIGHT[:3] * factor, rtol=1e-6)
        write_label(tmp_path / "label.nii", np.ones(header.shape, np.uint8), header)
        label = nib.load(tmp_path / "label.nii")
        assert label.header.get_xyzt_units()[0] == units
        np.testing.assert_array_equal(label.affine, nib.load(tmp_path / "image.nii").affine)


def test_an_unknown_orientation_is_accepted_with_a_warning(plain, caplog):
    header_bytes(plain, qform_code=0, sform_code=0)
    header = open_image(plain).geometry
    assert "does not state its orientation" in caplog.text and str(plain) in caplog.text
    expected = nib.as_closest_canonical(nib.load(plain)).affine
    np.testing.assert_allclose(header.affine, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sform_code": 2, "srow_x": [1, 1, 0, 5], "srow_y": [1, 1, 0, 0]}, "begins at 5x0x-30 mm"),
        ({"sform_code": 2, "srow_x": [np.nan, 0, 0, 5]}, "spacing is nanx0.8x3.3 mm"),
        ({"sform_code": 2, "srow_x": [0.7, 0, 0, np.inf]}, "begins at infx"),
        ({"sform_code": 2, "srow_y": [0, 0, 0, 5]}, "spacing is 0.976562x0x3.3 mm"),
        ({"sform_code": 0, "qform_code": 1, "pixdim": [1, 1, 0, 1, 1, 1, 1, 1]}, "1x0x1 mm"),
        ({"sform_code": 0, "qform_code": 0, "pixdim": [1, 0, 0, 0, 1, 1, 1, 1]}, "0x0x0 mm"),
    ],
)
def test_a_header_that_locates_no_voxel_is_refused(plain, fields, words):
    header_bytes(plain, **fields)
    assert words in refusal(plain, open_image)


def test_absurd_shapes_are_refused_before_anything_is_allocated(plain, tmp_path):
    compressed = tmp_path / "compressed.nii.gz"
    header_bytes(plain, dim=[3, 30_000, 30_000, 30_000, 1, 1, 1, 1])
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, compressed):
        for read in (open_image, read_image, read_label):
            message = refusal(path, read)
            assert "claims the shape 30000x30000x30000" in message
            assert "damaged or incomplete" in message
    for size in (0, -5):
        header_bytes(plain, dim=[3, size, 6, 7, 1, 1, 1, 1])
        assert re.search("it has no voxels|cannot read", refusal(plain, open_image))


def test_a_damaged_file_is_refused_by_its_header_alone(plain, capfd):
    content = bytearray(plain.read_bytes())
    plain.write_bytes(content[:-1])
    assert "damaged or incomplete" in refusal(plain, open_image)
    content[70:72] = struct.pack("<h", 4096)  # no data type has this code
    plain.write_bytes(content)
    assert "data code 4096 not recognized" in refusal(plain, open_image)
    assert capfd.readouterr() == ("", "")  # no warning besides the error


def test_files_that_are_not_there_or_not_volumes_are_refused(tmp_path, plain):
    (tmp_path / "noise.nii").write_bytes(np.random.default_rng(0).bytes(4000))
    for name, words in {
        "missing.nii.gz": "No such file",
        "missing.hdr": "No such file",
        "noise.nii": "it does not begin with a NIfTI header; if it is of another format",
    }.items():
        assert words in refusal(tmp_path / name)


def test_a_name_may_lie_about_packing(tmp_path, plain):
    (tmp_path / "packed.nii").write_bytes(gzip.compress(plain.read_bytes()))
    plain.rename(tmp_path / "plain.nii.gz")
    for name in ("packed.nii", "plain.nii.gz"):
        np.testing.assert_array_equal(open_image(tmp_path / name).whole()[0], random_volume())


def test_a_path_that_cannot_be_looked_at_is_refused_in_one_line(tmp_path):
    """Such as in another user's folder, where pathlib's is_dir itself raises an error."""
    for ending in (".nii", ".hdr", ".mha", ""):
        path = tmp_path / ("x" * 300 + ending)
        with pytest.raises(VolumeError, match=f"{'x' * 300}{ending} is|too long|no file or"):
            open_image(path)


def test_a_file_that_cannot_be_opened_or_held_is_explained(plain, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(np, "memmap", mock.Mock(side_effect=MemoryError))
        assert "too little memory" in refusal(plain)
    denied = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("unet3d.images.source.open_regular", denied)  # root may read every file
    assert "Permission denied" in refusal(plain)


def test_channels_in_one_file_or_in_several_are_one_array(tmp_path, monkeypatch):
    array = np.stack([random_volume(), random_volume() + 1, random_volume() + 2], axis=-1)
    whole, first, others, shorter = (tmp_path / f"{name}.nii" for name in ("a", "b", "c", "d"))
    nib.save(nib.Nifti1Image(array, STRAIGHT), whole)
    nib.save(nib.Nifti1Image(array[..., 0], STRAIGHT), first)
    # The others are stored from right to left, but have the same place in space.
    flip = np.diag([-1.0, 1.0, 1.0, 1.0])
    flip[0, 3] = len(array) - 1
    nib.save(nib.Nifti1Image(array[::-1, ..., 1:], STRAIGHT @ flip), others)
    together, apart = open_image(whole), open_image([first, others])
    assert together.geometry.num_channels == apart.geometry.num_channels == 3
    assert apart.whole().dtype == np.float32 and apart.whole().flags.c_contiguous
    np.testing.assert_array_equal(apart.whole(), together.whole())
    assert same_grid(apart.geometry, together.geometry) is None
    assert apart.geometry.path == first
    monkeypatch.setattr(np, "memmap", None)  # voxels are not read
    nib.save(nib.Nifti1Image(random_volume()[1:], STRAIGHT), shorter)
    words = r"d\.nii is not on the grid of .*b\.nii: shapes 5x6x7 and 4x6x7 differ"
    with pytest.raises(VolumeError, match=words):
        open_image([first, shorter])


def test_mapped_voxels_are_written_in_parts_and_leave_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(nifti, "PART_BYTES", 2**18)
    (tmp_path / "scratch").mkdir()
    voxels = Scratch(tmp_path / "scratch").empty((256, 100, 93), "u1", "labels", "F")
    voxels[...] = np.random.default_rng(0).integers(0, 3, voxels.shape)
    forget_pages(voxels)
    for ordered in (voxels, np.ascontiguousarray(voxels)):
        nifti.write_nifti(tmp_path / "a.nii.gz", nib.Nifti1Image(ordered, np.eye(4)))
        assert resident_kib(tmp_path / "scratch") < 1000
        np.testing.assert_array_equal(nib.load(tmp_path / "a.nii.gz").dataobj, voxels)
        forget_pages(voxels)
