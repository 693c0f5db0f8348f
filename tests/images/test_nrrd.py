"""NRRD files as people and programs write them, and as they are damaged."""

import gzip

import nibabel as nib
import numpy as np
import pytest

from tests.images import itk_headers
from tests.images.itk_headers import ARRAY, VOXELS, nrrd_bytes, written
from tests.images.samples import refusal
from unet3d.images.header import read_header, shear_warning
from unet3d.images.nifti import read_image, read_label

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def test_every_type_is_what_simpleitk_wrote(tmp_path):
    itk_headers.assert_reads_what_simpleitk_writes(tmp_path / "scan.nrrd")


def test_every_space_is_what_simpleitk_reads(tmp_path):
    sitk = pytest.importorskip("SimpleITK", reason="needs SimpleITK, of the extra dev")
    for space, signs in (
        ("left-posterior-superior", (1, 1, 1)),
        ("LPS", (1, 1, 1)),
        ("right-anterior-superior", (-1, -1, 1)),
        ("RAS", (-1, -1, 1)),
        ("left-anterior-superior", (1, -1, 1)),
    ):
        path = written(tmp_path / "scan.nrrd", nrrd_bytes(space=space))
        image = sitk.ReadImage(str(path), imageIO="NrrdImageIO")
        lps = np.eye(4)
        lps[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
        lps[:3, 3] = image.GetOrigin()
        np.testing.assert_allclose(lps[:3, 3], np.multiply((1, 2, 3), signs))
        expected = nib.as_closest_canonical(nib.Nifti1Image(ARRAY, LPS @ lps))
        volume = read_image(path)
        np.testing.assert_allclose(volume.header.affine, expected.affine, atol=1e-6)
        np.testing.assert_array_equal(volume.array[0], expected.get_fdata())


def test_other_spellings_are_the_same_volume(tmp_path):
    expected = read_image(written(tmp_path / "a.nrrd", nrrd_bytes()))
    parts = gzip.compress(VOXELS[:50]) + gzip.compress(VOXELS[50:])
    for content in (
        nrrd_bytes(endian="big", voxels=ARRAY.astype(">i2").tobytes(order="F")),
        nrrd_bytes(type="signed short int"),
        nrrd_bytes(encoding="gz", voxels=gzip.compress(VOXELS)),
        nrrd_bytes(encoding="gzip", voxels=parts),
        nrrd_bytes().replace(b"\n", b"\r\n", 12),
        nrrd_bytes(content="a: b\ntype:=float", voxels=VOXELS + b"and a tail"),
    ):
        volume = read_image(written(tmp_path / "SCAN.NRRD", content))
        np.testing.assert_array_equal(volume.array, expected.array)
        np.testing.assert_array_equal(volume.header.affine, expected.header.affine)


def test_units_of_length_count(tmp_path):
    path = written(tmp_path / "a.nrrd", nrrd_bytes(space_units='"um" "um" "um"'))
    assert read_header(path).spacing_mm == (0.0007, 0.0008, 0.003)
    np.testing.assert_allclose(read_header(path).affine[2, 3], 0.003)


def test_an_orientation_that_is_not_stated_is_warned_about(tmp_path, caplog):
    plain = {"space": None, "space_directions": None, "space_origin": None}
    path = written(tmp_path / "a.nrrd", nrrd_bytes(spacings="0.7 0.8 3", **plain))
    assert read_header(path).spacing_mm == (0.7, 0.8, 3)
    assert "a.nrrd does not state its orientation" in caplog.text


def test_sheared_axes_are_those_of_a_nifti_file(tmp_path):
    directions = "(0.7,0,0) (0,0.8,0.3) (0,0,3)"
    header = read_header(written(tmp_path / "a.nrrd", nrrd_bytes(space_directions=directions)))
    assert "miss a right angle by 20.6 degrees" in (shear_warning(header) or "")
    np.testing.assert_allclose(header.affine[:3, 1], (0, 0.8, -0.3), atol=1e-12)


def test_what_is_no_volume_is_refused(tmp_path):
    def packed(content, **changes):
        return nrrd_bytes(encoding="gzip", voxels=content, **changes)

    gz = gzip.compress(VOXELS)
    flipped = gz[:-6] + bytes([gz[-6] ^ 1]) + gz[-5:]
    no_place = "does not say where its voxels lie"
    for content, reason in (
        (b"", "is empty (0 bytes)"),
        (b"NRRD0004\ntype: short\n", "its header does not end"),
        (b"no header", "does not begin with an NRRD header"),
        (nrrd_bytes(data_file="/etc/passwd"), "has its voxels elsewhere (datafile '/etc/passwd')"),
        (nrrd_bytes(byte_skip="-1"), "has its voxels elsewhere (byteskip '-1')"),
        (nrrd_bytes(encoding="bzip2"), "is encoded as 'bzip2'; save it as raw or gzip"),
        (nrrd_bytes(space="scanner-xyz"), "in the space 'scanner-xyz'"),
        (nrrd_bytes(space_units='"mm" "mm" "um"'), "units of length"),
        (nrrd_bytes(dimension="4", sizes="3 4 5 2"), "has '4' axes; only three"),
        (nrrd_bytes(sizes="3 4 0"), "claims the shape '3 4 0'"),
        (nrrd_bytes(sizes="300 400 500"), "claims the shape 300x400x500"),
        (packed(gz, sizes="3000 4000 5000"), "claims the shape 3000x4000x5000"),
        (nrrd_bytes(type="block"), "holds voxels of the type 'block'"),
        (nrrd_bytes(endian=None), "has the endian ''"),
        (nrrd_bytes(space_directions="(nan,0,0) (0,1,0) (0,0,1)"), no_place),
        (nrrd_bytes(space_directions="(1,0,0) none (0,0,1)"), no_place),
        (nrrd_bytes(space_directions="(0,0,0) (0,1,0) (0,0,1)"), "an affine that no scan has"),
        (nrrd_bytes(space_origin="(99999999999,0,0)"), "an affine that no scan has"),
        (nrrd_bytes(space_directions=None, spacings=None), "its spacings is ''"),
        (nrrd_bytes(voxels=VOXELS[:-1]), "it is damaged or incomplete"),
        (nrrd_bytes(voxels=VOXELS + bytes(2**21)), "goes on for more than"),
        (packed(gz[:-1]), "end before their checksum"),
        (packed(gzip.compress(VOXELS + b"x")), "unpacks to more than"),
        (packed(VOXELS), "cannot read"),
        (packed(flipped), "Incorrect checksum"),
    ):
        assert reason in refusal(written(tmp_path / "a.nrrd", content))
    halves = nrrd_bytes(type="float", voxels=(ARRAY / 2).astype("f4").tobytes(order="F"))
    path = written(tmp_path / "a.nrrd", halves)
    assert "30 voxels that are no integer labels" in refusal(path, read_label)
