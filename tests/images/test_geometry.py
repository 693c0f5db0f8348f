import itertools

import nibabel as nib
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from unet3d.images.geometry import is_sheared, same_grid, shear_degrees, voxel_mm3
from unet3d.images.image import open_image
from unet3d.images.labels import on_grid_of, read_label


def save(path, array, affine):
    nib.save(nib.Nifti1Image(array, affine), path)
    return path


@pytest.mark.parametrize("degrees", [0, 15, 30])
def test_the_volume_of_a_voxel_is_base_times_height(degrees):
    """Also for a CT whose table moves along Z while the gantry is tilted about X."""
    rotation = Rotation.from_euler("xyz", [10, 20, 30], degrees=True).as_matrix()
    affine = np.diag([0.8, 0.8, 2.0, 1.0])
    affine[:3, 1] = Rotation.from_euler("x", degrees, degrees=True).apply(affine[:3, 1])
    affine[:3, :3] = rotation @ affine[:3, :3]
    expected = 0.8 * 0.8 * 2.0 * np.cos(np.radians(degrees))
    assert voxel_mm3(affine) == pytest.approx(expected, rel=1e-12)
    assert shear_degrees(affine) == pytest.approx(degrees, abs=1e-6)
    assert is_sheared(affine) == (degrees > 0)


@pytest.mark.parametrize("angles", [(45, 0, 0), (0, 45, 45)])
def test_noise_does_not_part_the_grids_of_rotated_volumes(tmp_path, angles):
    """At 45 degrees rounding decides which axis is called X, and it differs between files."""
    rng = np.random.default_rng(0)
    array = rng.integers(0, 5, (7, 8, 9)).astype(np.uint8)
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", angles, degrees=True).as_matrix() * (0.9, 0.9, 1.3)
    affine[:3, 3] = -120, 80, 900
    image = open_image(save(tmp_path / "image.nii", array, affine))
    orders = set()
    for number in range(12):
        noisy = affine.copy()
        noisy[:3] += rng.normal(0, 1e-7, (3, 4))
        axes = rng.permutation(3)
        orientation = np.stack([axes, rng.choice([-1, 1], 3)], axis=1)
        turned = nib.Nifti1Image(array, noisy).as_reoriented(orientation)
        nib.save(turned, tmp_path / f"{number}.nii")
        label = read_label(tmp_path / f"{number}.nii")
        orders.add(label.array.shape)
        assert same_grid(image.geometry, label.geometry) is None
        aligned = on_grid_of(image.geometry, label)
        assert np.array_equal(aligned.array, image.whole()[0])
        assert aligned.geometry.path == label.geometry.path
    assert len(orders) > 1
    both = open_image([tmp_path / "image.nii", tmp_path / "0.nii"])
    assert np.array_equal(*both.whole())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
def test_half_a_voxel_is_told_at_every_scale(tmp_path, scale):
    rotation = Rotation.from_euler("xyz", [20, 30, 40], degrees=True).as_matrix()
    affine = np.eye(4)
    affine[:3, :3] = rotation * scale
    affine[:3, 3] = 50 * scale
    array = np.zeros((20, 21, 22), np.uint8)
    first = open_image(save(tmp_path / "a.nii", array, affine)).geometry
    for axis in range(3):
        for part, same in ((0.0, True), (1e-3, True), (0.5, False), (1.0, False)):
            moved = affine.copy()
            moved[:3, 3] += part * affine[:3, axis]
            second = open_image(save(tmp_path / "b.nii", array, moved)).geometry
            assert (same_grid(first, second) is None) == same, (axis, part)


def test_single_precision_far_from_the_origin_does_not_part_grids(tmp_path):
    """In single precision a stage position of 15 mm is off by 1e-6 mm; the voxels have 4e-6 mm."""
    affine = np.diag([4e-6, 4e-6, 4e-6, 1])
    affine[:3, 3] = 15.0
    noisy = affine.copy()
    noisy[0, 3] = np.nextafter(np.float32(15.0), np.float32(16))
    array = np.zeros((5, 6, 7), np.uint8)
    one = open_image(save(tmp_path / "a.nii", array, affine)).geometry
    other = open_image(save(tmp_path / "b.nii", array, noisy)).geometry
    assert same_grid(one, other) is None
    assert np.abs(one.affine - other.affine).max() > 4e-6 / 10


def test_grids_of_other_axes_are_told(tmp_path):
    array = np.zeros((5, 6, 7), np.uint8)
    one = open_image(save(tmp_path / "a.nii", array, np.eye(4))).geometry
    other = open_image(save(tmp_path / "b.nii", array.T, np.eye(4))).geometry
    assert same_grid(one, other) == "shapes 5x6x7 and 7x6x5 differ"
    for signs in itertools.product((1, -1), repeat=3):
        flipped = open_image(save(tmp_path / "c.nii", array, np.diag([*signs, 1]))).geometry
        assert (same_grid(one, flipped) is None) == (signs == (1, 1, 1))
