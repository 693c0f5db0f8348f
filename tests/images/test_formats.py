"""A volume is the same in every format, read by us and by SimpleITK, in every orientation."""

import itertools

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from tests.images.dicom_series import write_series
from tests.images.samples import refusal
from unet3d.images.image import open_image
from unet3d.images.labels import read_label, write_label

ARRAY = np.random.default_rng(0).integers(-1000, 3000, (4, 5, 6)).astype(np.int16)
SPACING_MM = (0.7, 0.8, 2.5)


def affine_along(axes, signs, angles=(0, 0, 0)):
    """Return the affine of an array with these patient axes, turned about X, Y and Z."""
    affine = np.eye(4)
    directions = np.eye(3)[:, axes] * signs * SPACING_MM
    affine[:3, :3] = nib.eulerangles.euler2mat(*angles) @ directions
    affine[:3, 3] = (12.5, -31.25, 103.5)
    return affine


SIGNS = itertools.product((1, -1), repeat=3)
AFFINES = [
    # Each order of the axes, with all signs in turn.
    *(affine_along(*of) for of in zip(itertools.permutations(range(3)), SIGNS, strict=False)),
    affine_along((0, 1, 2), (-1, -1, 1), (0.3, -0.2, 0.5)),
    affine_along((0, 2, 1), (-1, 1, -1), (0.05, 0.02, -0.6)),
    affine_along((2, 0, 1), (1, -1, 1), (-1.1, 0.7, 0.2)),
]


def write_itk(path, array, affine):
    """Write an array (X, Y, Z) by SimpleITK; the affine is in RAS, as in NIfTI."""
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.T))
    lps = np.diag([-1, -1, 1, 1]) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    sitk.WriteImage(image, str(path))
    return path


def canonical(array, affine):
    return nib.as_closest_canonical(nib.Nifti1Image(array, affine))


def compare(volume, affine):
    """Compare a volume with the one that nibabel makes of the same array."""
    expected = canonical(ARRAY, affine)
    np.testing.assert_array_equal(volume.whole()[0], expected.get_fdata())
    np.testing.assert_allclose(volume.geometry.affine, expected.affine, atol=1e-5)
    np.testing.assert_allclose(volume.geometry.spacing_mm, expected.header.get_zooms(), rtol=1e-6)


@pytest.mark.parametrize("affine", AFFINES)
def test_it_lies_where_nibabel_and_simpleitk_say(tmp_path, affine):
    labels = (ARRAY > 1000).astype(np.uint8)
    for name in ("scan.nrrd", "scan.mha", "scan.mhd"):
        path = write_itk(tmp_path / name, ARRAY, affine)
        volume = open_image(path)
        compare(volume, affine)
        # For SimpleITK, too, a segmentation lies on its scan voxel by voxel.
        ras = np.asanyarray(canonical(labels, affine).dataobj)
        write_label(tmp_path / "seg.nii.gz", ras, volume.geometry)
        scan = sitk.ReadImage(str(path))
        # Its stored axes are SimpleITK's in reverse order.
        stored = open_image(path).as_stored()
        np.testing.assert_array_equal(stored.whole()[0].T, sitk.GetArrayFromImage(scan))
        assert stored.geometry.spacing_mm == scan.GetSpacing()
        written = sitk.ReadImage(str(tmp_path / "seg.nii.gz"))
        np.testing.assert_array_equal(
            sitk.GetArrayFromImage(written), sitk.GetArrayFromImage(scan) > 1000
        )
        np.testing.assert_allclose(written.GetOrigin(), scan.GetOrigin(), atol=1e-4)
        np.testing.assert_allclose(written.GetSpacing(), scan.GetSpacing(), atol=1e-5)
        np.testing.assert_allclose(written.GetDirection(), scan.GetDirection(), atol=1e-5)
        np.testing.assert_array_equal(read_label(tmp_path / "seg.nii.gz").array, ras)


@pytest.mark.parametrize("affine", AFFINES)
def test_slices_lie_where_their_positions_say(tmp_path, affine):
    folder = write_series(tmp_path / "series", ARRAY, affine)
    volume = open_image(folder)
    compare(volume, affine)
    # As in GDCM, slices follow each other along the vector product of row and column.
    along = 1 if np.linalg.det(affine) > 0 else -1
    stored = open_image(folder).as_stored()
    np.testing.assert_array_equal(stored.whole()[0], ARRAY[..., ::along])
    np.testing.assert_allclose(stored.geometry.affine[:3, 2], along * affine[:3, 2], atol=1e-6)
    labels = np.asanyarray(canonical((ARRAY > 1000).astype(np.uint8), affine).dataobj)
    write_label(tmp_path / "seg.nii.gz", labels, volume.geometry)
    written = nib.load(tmp_path / "seg.nii.gz")
    assert int(written.header["qform_code"]) == int(written.header["sform_code"]) == 1
    np.testing.assert_array_equal(written.get_fdata(), ARRAY[..., ::along] > 1000)
    np.testing.assert_allclose(written.affine, stored.geometry.affine, atol=1e-5)


def test_what_is_no_volume_is_refused(tmp_path):
    (tmp_path / "scan.txt").write_text("no scan")
    said = refusal(tmp_path / "scan.txt", open_image)
    assert "scan.txt has no known file ending" in said and ".nrrd, .mha" in said
    assert "is a folder without slices" in refusal(tmp_path, open_image)
    (tmp_path / "IM1").write_bytes(bytes(128) + b"DICM")
    assert "IM1 is one DICOM file; name the folder" in refusal(tmp_path / "IM1", open_image)
