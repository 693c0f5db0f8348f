"""The spacing of a scan: to the last bit as nnU-Net's readers return it, and rounded as ours."""

import math

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from tests.images.orientations import turn_to
from tests.networks import random_checkpoint
from unet3d.images.header import read_header
from unet3d.preparation.resample import Interpolation, visible_shape
from unet3d.preparation.transform import Preprocessing

FINE_MM = (0.3515625, 0.4296875, 0.7)
"""180 and 220 mm / 512, of which the last digit is lost at six of them, and what no float32 is."""

STRAIGHT = np.eye(3)
TURNED = nib.eulerangles.euler2mat(0.3, -0.2, 0.5)


def write_nifti(path, codes, spacing_mm, shape=(3, 4, 5), directions=STRAIGHT, **fields):
    """Write a scan of that shape and spacing in RAS, which is stored otherwise."""
    affine = np.eye(4)
    affine[:3, :3] = directions * spacing_mm
    image = nib.Nifti1Image(np.zeros(shape, np.uint8), affine)
    image = image.as_reoriented(turn_to(codes, affine))
    image.header.set_qform(image.affine, code=1)
    for name, value in fields.items():
        image.header[name] = value
    nib.save(image, path)
    return nib.load(path)


def zooms_of(image):
    """Return what nnU-Net's readers by nibabel do, in the order of nibabel."""
    return tuple(map(float, image.header.get_zooms()))


def plan(target_mm, **changes):
    """Return how a network of ours prepares images, or with ``clips=True`` one of nnU-Net's."""
    values = vars(random_checkpoint(spacing_mm=target_mm).preprocessing)
    return Preprocessing(**{**values, "interpolation": Interpolation(**changes)})


@pytest.mark.parametrize("fields", [{}, {"sform_code": 0}, {"qform_code": 0}], ids=str)
@pytest.mark.parametrize("directions", [STRAIGHT, TURNED], ids=["straight", "oblique"])
@pytest.mark.parametrize("codes", ["RAS", "SRA", "PIR"])
def test_the_exact_spacing_of_nifti_is_that_of_the_readers_of_nnunet(
    tmp_path, codes, directions, fields
):
    path = tmp_path / "scan.nii"
    for spacing_mm in (FINE_MM, (0.9765625, 0.1234567, 3.3), (1 / 3, 1e-3, 2 / 3)):
        image = write_nifti(path, codes, spacing_mm, directions=directions, **fields)
        header = read_header(path)
        reoriented = image.as_reoriented(nib.io_orientation(image.affine))
        assert header.exact_mm == zooms_of(reoriented)
        assert header.as_stored().exact_mm == header.stored_spacing_mm == zooms_of(image)
        np.testing.assert_allclose(header.spacing_mm, spacing_mm, rtol=3e-6, atol=0)
        if not fields:
            scan = sitk.ReadImage(str(path))
            assert header.as_stored().exact_mm == scan.GetSpacing()


def seen_shape(header, preprocessing):
    return visible_shape(header.shape, preprocessing.spacing_of(header), preprocessing.spacing_mm)


@pytest.mark.parametrize("codes", ["RAS", "SRA", "AIL"])
def test_half_a_voxel_is_rounded_as_by_nnunet(tmp_path, codes):
    mm = FINE_MM[0]
    path = tmp_path / "scan.nii"
    spacing_mm, target_mm = (mm, 1.0, 1.0), (2 * mm, 1.0, 1.0)
    write_nifti(path, codes, spacing_mm, (509, 4, 5))
    header = read_header(path)
    expected = (254, 4, 5)  # nnU-Net rounds halves to the even number, as NumPy does
    assert seen_shape(header, plan(target_mm, clips=True)) == expected
    # As stored, the axes of the target are those of the file.
    along = header.stored_orientation[:, 0].astype(int)
    target = tuple(target_mm[axis] for axis in along)
    stored = seen_shape(header.as_stored(), plan(target, clips=True))
    assert stored == tuple(expected[axis] for axis in along)
    # A network of ours has the rounded spacing, which is a little more.
    assert header.spacing_mm[0] == float(f"{mm + 1e-9:.6f}") > mm
    assert seen_shape(header, plan(target_mm)) == (255, 4, 5)


def test_the_affine_counts_where_the_spacing_contradicts_it_and_units_are_heeded(tmp_path):
    wrong = [1, 0.6, 0, math.nan, 1, 1, 1, 1]
    write_nifti(tmp_path / "wrong.nii", "LPS", (0.5, 0.75, 2), pixdim=wrong)
    write_nifti(tmp_path / "um.nii", "LPS", (500, 750, 2000), xyzt_units=3)  # micrometres
    image = nib.MGHImage(np.zeros((3, 4, 5), np.uint8), np.diag([-0.5, 0.75, 2, 1]))
    nib.save(image, tmp_path / "scan.mgz")
    for name in ("wrong.nii", "um.nii", "scan.mgz"):
        header = read_header(tmp_path / name)
        assert header.as_stored().exact_mm == header.exact_mm == (0.5, 0.75, 2), name
        assert header.spacing_mm == (0.5, 0.75, 2), name
