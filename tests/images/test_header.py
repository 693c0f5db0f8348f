"""The spacing of a scan is as in its file, which nnU-Net's readers return, too."""

import math

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from tests.images.orientations import turn_to
from unet3d.images.image import open_image

FINE_MM = (0.3515625, 0.4296875, 0.7)
"""180 and 220 mm / 512, which lose a digit at six decimals; and a number that is no float32."""

STRAIGHT = np.eye(3)
TURNED = nib.eulerangles.euler2mat(0.3, -0.2, 0.5)


def write_nifti(path, codes, spacing_mm, shape=(3, 4, 5), directions=STRAIGHT, **fields):
    """Write a scan with this shape and spacing in RAS, stored with other axes."""
    affine = np.eye(4)
    affine[:3, :3] = directions * spacing_mm
    image = nib.Nifti1Image(np.zeros(shape, np.uint8), affine)
    image = image.as_reoriented(turn_to(codes, affine))
    image.header.set_qform(image.affine, code=1)
    for name, value in fields.items():
        image.header[name] = value
    nib.save(image, path)
    return nib.load(path)


@pytest.mark.parametrize("fields", [{}, {"sform_code": 0}, {"qform_code": 0}], ids=str)
@pytest.mark.parametrize("directions", [STRAIGHT, TURNED], ids=["straight", "oblique"])
@pytest.mark.parametrize("codes", ["RAS", "SRA", "PIR"])
def test_the_spacing_of_nifti_is_that_of_the_readers_of_nnunet(tmp_path, codes, directions, fields):
    path = tmp_path / "scan.nii"
    for spacing_mm in (FINE_MM, (0.9765625, 0.1234567, 3.3), (1 / 3, 1e-3, 2 / 3)):
        image = write_nifti(path, codes, spacing_mm, directions=directions, **fields)
        geometry = open_image(path).geometry
        np.testing.assert_allclose(geometry.spacing_mm, spacing_mm, rtol=3e-6, atol=0)
        stored = geometry.as_stored()
        assert stored.spacing_mm == tuple(map(float, image.header.get_zooms()))
        if not fields:
            scan = sitk.ReadImage(str(path), imageIO="NiftiImageIO")
            assert stored.spacing_mm == scan.GetSpacing()


def test_the_affine_counts_where_the_spacing_contradicts_it_and_units_are_heeded(tmp_path):
    wrong = [1, 0.6, 0, math.nan, 1, 1, 1, 1]
    write_nifti(tmp_path / "wrong.nii", "LPS", (0.5, 0.75, 2), pixdim=wrong)
    write_nifti(tmp_path / "um.nii", "LPS", (500, 750, 2000), xyzt_units=3)  # micrometres
    image = nib.MGHImage(np.zeros((3, 4, 5), np.uint8), np.diag([-0.5, 0.75, 2, 1]))
    nib.save(image, tmp_path / "scan.mgz")
    for name in ("wrong.nii", "um.nii", "scan.mgz"):
        geometry = open_image(tmp_path / name).geometry
        np.testing.assert_allclose(geometry.spacing_mm, (0.5, 0.75, 2), rtol=1e-12)
