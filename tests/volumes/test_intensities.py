from pathlib import Path

import numpy as np
import pytest

from tests.volumes.samples import noise, write_volume
from unet3d.errors import VolumeError
from unet3d.volumes.nifti import read_image, read_label


def refusal(path: Path) -> str:
    with pytest.raises(VolumeError) as caught:
        read_image(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [1e10, 1e20, -1e30, 3.4e38, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_marks_for_no_data_are_refused_with_their_number(
    tmp_path: Path, value: float, share: float
) -> None:
    array = noise()
    wrong = np.random.default_rng(0).random(array.shape) < share
    wrong[3, 4, 5] = True
    array[wrong] = value
    message = refusal(write_volume(tmp_path / "scan.nii", array))
    assert f"has {wrong.sum()} voxels of {array.size} with values up to {abs(value):.3g}" in message
    assert "replace them" in message


def test_damaged_bytes_of_different_size_are_refused(tmp_path: Path) -> None:
    array = noise((20, 20, 20))
    array[0, 0, :3] = 1e12, -3e25, 5e18
    assert "has 1 voxels" in refusal(write_volume(tmp_path / "scan.nii", array))


def test_one_channel_of_several_is_enough(tmp_path: Path) -> None:
    array = noise((10, 10, 10, 3))
    array[1, 2, 3, 1] = 1e15
    assert "has 1 voxels of 1000" in refusal(write_volume(tmp_path / "scan.nii", array))


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 1e30, 1e35])
@pytest.mark.parametrize(
    "kind", ["noise", "mask", "far apart", "soft mask", "hot spot", "noise off"]
)
def test_pictures_of_any_scale_are_read(tmp_path: Path, kind: str, scale: float) -> None:
    array = noise((16, 16, 16)).astype(np.float64)
    rng = np.random.default_rng(0)
    if kind == "mask":
        array[:] = 0
        array[4:8] = 1
    elif kind == "far apart":  # tissue, and what interpolation left of the air around it
        array[:8] = rng.uniform(0, 1e-9, (8, 16, 16))
    elif kind == "soft mask":
        array = 1 / (1 + np.exp(noise((16, 16, 16)).astype(np.float64) - 100))
    elif kind == "hot spot":
        array[3, 3, 3] = 3e4
    elif kind == "noise off":
        array[:] = 0
        array[4:8] = 1
        array[0, 0, :5] = rng.uniform(0, 1e-12, 5)
    array = (array * scale / np.abs(array).max()).astype(np.float32)
    assert np.array_equal(read_image(write_volume(tmp_path / "scan.nii", array)).array[0], array)


def test_no_image_of_16_bits_is_refused(tmp_path: Path) -> None:
    array = np.random.default_rng(0).poisson(1, (16, 16, 16)).astype(np.uint16)
    array[5, 5, 5] = 65535  # a hot pixel of a camera
    assert read_image(write_volume(tmp_path / "counts.nii", array)).array.max() == 65535


def test_label_maps_may_hold_large_values(tmp_path: Path) -> None:
    array = np.array([0, 1, 2, 614454277], np.uint32).reshape(1, 2, 2)
    assert read_label(write_volume(tmp_path / "atlas.nii", array)).array.max() == 614454277
