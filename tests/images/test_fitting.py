"""Large segmentations and scans in a size that fits a page."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.images.samples import write_volume
from unet3d.errors import VolumeError
from unet3d.images import fitting
from unet3d.images.fitting import open_fitting
from unet3d.images.image import open_image
from unet3d.images.labels import write_label

SHAPE = (41, 30, 24)


def made():
    """Return noise, and labels that differ in every voxel of a block."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 200, SHAPE).astype(np.uint8), rng.integers(0, 4, SHAPE).astype(np.uint8)


def write_pyramid(path, array, reduce, num_levels=3):
    """Write a scan as OME-Zarr, each level with the voxels that ``reduce`` makes of a finer one."""
    zarr = pytest.importorskip("zarr")
    levels, spacing = [], 0.5
    zarr.create_group(path)
    for level in range(num_levels):
        scale = {"type": "scale", "scale": [spacing] * 3}
        levels.append({"path": str(level), "coordinateTransformations": [scale]})
        zarr.create_array(path, name=str(level), data=array.T.copy(), chunks=(8, 8, 8))
        array, spacing = reduce(array), 2 * spacing
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    ome = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": levels}]}
    content = json.loads((path / "zarr.json").read_text())
    content["attributes"]["ome"] = ome
    (path / "zarr.json").write_text(json.dumps(content))
    return path


def every_second(array):
    return array[::2, ::2, ::2]


def means(array):
    """Return the means of whole blocks, so an odd voxel at the end is left out, as some do."""
    x, y, z = (size // 2 for size in array.shape)
    array = array[: 2 * x, : 2 * y, : 2 * z].astype(float)
    return array.reshape(x, 2, y, 2, z, 2).mean(axis=(1, 3, 5)).astype(np.uint8)


def test_small_volumes_are_shown_as_they_are(tmp_path):
    image, labels = made()
    scan = write_volume(tmp_path / "scan.nii.gz", image, (1, 2, 3))
    found = write_volume(tmp_path / "found.nii.gz", labels, (1, 2, 3))
    label, shown, shape = open_fitting(found, scan)
    np.testing.assert_array_equal(label.array, labels)
    np.testing.assert_array_equal(shown.read()[0], image)
    assert shape == SHAPE
    other = write_volume(tmp_path / "other.nii.gz", labels, (1, 2, 2.5))
    with pytest.raises(VolumeError, match="do not lie on one grid: .*name the scan that was segm"):
        open_fitting(other, scan)


@pytest.mark.parametrize("reduce", [every_second, means])
def test_levels_of_both_that_lie_on_one_grid_are_read(tmp_path, monkeypatch, reduce):
    image, labels = made()
    scan = write_pyramid(tmp_path / "scan.ome.zarr", image, reduce)
    write_label(tmp_path / "found.ome.zarr", labels, open_image(scan).geometry)
    monkeypatch.setattr("unet3d.images.label_store.COARSEST", 8)
    write_label(tmp_path / "levels.ome.zarr", labels, open_image(scan).geometry)
    monkeypatch.setattr(fitting, "MOST_VOXELS", 21 * 15 * 12)
    monkeypatch.setattr(fitting, "MOST_READ", 1)  # both have a level
    label, shown, shape = open_fitting(tmp_path / "levels.ome.zarr", scan)
    assert shape == SHAPE and label.geometry.spacing_mm == pytest.approx((0.001,) * 3)
    x, y, z = reduce(image).shape
    np.testing.assert_array_equal(shown.read()[0], reduce(image))
    np.testing.assert_array_equal(label.array, every_second(labels)[:x, :y, :z])
    with pytest.raises(VolumeError, match="found.ome.zarr has 41x30x24 voxels, too many to look "):
        open_fitting(tmp_path / "found.ome.zarr", scan)


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
@pytest.mark.parametrize("axes", ["RAS", "PSL"])
def test_of_volumes_without_levels_every_few_voxels_are_read(tmp_path, monkeypatch, ending, axes):
    nib = pytest.importorskip("nibabel")
    image, labels = made()
    monkeypatch.setattr("unet3d.images.image.PIECE_VOXELS", 2000)
    monkeypatch.setattr(fitting, "MOST_VOXELS", 21 * 30 * 12)
    paths = []
    for name, array in (("found", labels), ("scan", image)):
        stored = nib.Nifti1Image(array, np.diag([1.0, 2.0, 1.0, 1]))
        turn = nib.orientations.ornt_transform(
            nib.orientations.axcodes2ornt("RAS"), nib.orientations.axcodes2ornt(axes)
        )
        paths.append(tmp_path / f"{name}{ending}")
        nib.save(stored.as_reoriented(turn), paths[-1])
    label, shown, shape = open_fitting(*paths)
    assert shape == SHAPE
    np.testing.assert_array_equal(shown.read()[0], image[::2, :, ::2])
    np.testing.assert_array_equal(label.array, labels[::2, :, ::2])
    assert shown.geometry.spacing_mm == pytest.approx((2, 2, 2))
    x, y, z = shown.geometry.affine[:3, 3]
    assert (x, y, z) == pytest.approx((0, 0, 0))


def test_a_scan_without_levels_is_read_at_the_level_of_its_labels(tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    image, labels = made()
    scan = write_volume(tmp_path / "scan.nii", image, (0.01, 0.01, 0.01))
    monkeypatch.setattr("unet3d.images.label_store.COARSEST", 8)
    write_label(tmp_path / "levels.ome.zarr", labels, open_image(scan).geometry)
    monkeypatch.setattr(fitting, "MOST_VOXELS", 1000)
    label, shown, _ = open_fitting(Path(tmp_path / "levels.ome.zarr"), scan)
    np.testing.assert_array_equal(shown.read()[0], image[::4, ::4, ::4])
    np.testing.assert_array_equal(label.array, labels[::4, ::4, ::4])
