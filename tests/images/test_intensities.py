import math
from pathlib import Path

import numpy as np
import pytest

from tests.images.samples import noise, refusal, write_volume
from tests.products import pairwise
from unet3d.errors import VolumeError
from unet3d.images import image_voxels, intensities
from unet3d.images.image_voxels import ImageVoxels, StoredChannels
from unet3d.images.intensities import refuse_unusable
from unet3d.images.nifti import read_image, read_label


@pytest.mark.parametrize(
    ("value", "share"),
    [(1e10, 0), (1e10, 0.9), (-1e30, 0.3), (3.4e38, 0), (float(np.finfo(np.float32).min), 0.9)],
)
def test_marks_for_no_data_are_refused_with_their_number(tmp_path, value, share):
    array = noise((20, 17, 13, 2))
    wrong = np.random.default_rng(0).random(array.shape[:3]) < share
    wrong[3, 4, 5] = True
    array[wrong, 1] = value
    message = refusal(write_volume(tmp_path / "scan.nii", array))
    assert f"has {wrong.sum()} voxels of {wrong.size} with values up to {abs(value):.3g}" in message
    assert "replace them" in message


@pytest.mark.parametrize("kind", ["mask", "far apart", "soft mask", "hot spot"])
def test_pictures_of_any_scale_are_read(tmp_path, kind):
    array = noise((16, 16, 16)).astype(np.float64)
    if kind == "mask":
        array[:] = 0
        array[4:8] = 1
    elif kind == "far apart":  # tissue, and what interpolation left of the air around it
        array[:8] = np.random.default_rng(0).uniform(0, 1e-9, (8, 16, 16))
    elif kind == "soft mask":
        array = 1 / (1 + np.exp(array - 100))
    else:
        array[3, 3, 3] = 3e4
    for scale in (1e-30, 1e-9, 1.0, 1e35):
        scaled = (array * (scale / np.abs(array).max())).astype(np.float32)
        found = read_image(write_volume(tmp_path / "scan.nii", scaled)).array[0]
        assert np.array_equal(found, scaled)


def test_no_image_of_16_bits_and_no_label_map_is_refused(tmp_path):
    array = np.random.default_rng(0).poisson(1, (16, 16, 16)).astype(np.uint16)
    array[5, 5, 5] = 65535  # a hot pixel of a camera
    assert read_image(write_volume(tmp_path / "counts.nii", array)).array.max() == 65535
    array = np.array([0, 1, 2, 614454277], np.uint32).reshape(1, 2, 2)
    assert read_label(write_volume(tmp_path / "atlas.nii", array)).array.max() == 614454277


def looked_at(stored, piece_voxels, monkeypatch, slope=1.0):
    """Return what is said of an image that is looked at so many voxels at a time."""
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", piece_voxels)
    image = ImageVoxels([StoredChannels(voxels=stored[None], slope=slope)])
    try:
        refuse_unusable(Path("scan.nii"), image)
    except VolumeError as error:
        return str(error)
    return ""


@pairwise(
    value=[math.nan, math.inf, -math.inf, 1e39], number=[1, 3, 4913], piece_voxels=[1, 300, 2**20]
)
def test_every_voxel_that_is_no_number_is_counted(value, number, piece_voxels, monkeypatch):
    array = noise((17, 17, 17)).astype(np.float64)
    wrong = np.random.default_rng(0).permutation(array.size)[:number]
    array.reshape(-1)[wrong] = value
    told = looked_at(array, piece_voxels, monkeypatch)
    assert told.startswith(f"scan.nii has {number} voxels of 4913 that are NaN or infinite")


def test_a_slope_may_make_infinite_what_is_counted(monkeypatch):
    """Of integers, each value for itself: those from 4 on are beyond float32."""
    array = np.random.default_rng(0).integers(-5, 6, (9, 9, 9)).astype(np.int16)
    number = int((abs(array) >= 4).sum())
    told = looked_at(array, 2**20, monkeypatch, slope=1e38)
    assert told.startswith(f"scan.nii has {number} voxels of 729 that are NaN or infinite")


@pairwise(is_spotted=[True, False], ratio=[1e5, 100], piece_voxels=[1, 300, 2**20])
def test_counted_intensities_are_judged_as_others(is_spotted, ratio, piece_voxels, monkeypatch):
    """Integers with a slope; the same numbers in float32 are looked at piece by piece."""
    monkeypatch.setattr(intensities, "HUGE_RATIO", ratio)
    array = np.zeros((16, 16, 16), np.int16)
    array[4:12] = np.random.default_rng(0).integers(1, 100, (8, 16, 16))
    if is_spotted:
        array[3, 3, 3] = -32768
    told = looked_at(array, piece_voxels, monkeypatch, slope=0.5)
    assert told == looked_at((array * 0.5).astype(np.float32), piece_voxels, monkeypatch)
    assert bool(told) == (is_spotted and ratio == 100)
    if told:
        assert "has 1 voxels of 4096 with values up to 1.64e+04" in told
        assert f"the others, up to {array.max() / 2:.3g}," in told


@pairwise(piece_voxels=[1, 300], share=[1 / 4096, 1e-3, 2e-3, 0.5, 0.995], are_alike=[True, False])
def test_the_size_of_a_piece_does_not_matter(piece_voxels, share, are_alike, monkeypatch):
    """Against the rule in the documentation, on the whole array at once."""
    rng = np.random.default_rng(1)
    array = rng.uniform(1, 2, (16, 16, 16))
    huge = np.zeros(array.shape, bool)
    huge.reshape(-1)[rng.permutation(array.size)[: max(1, round(share * array.size))]] = True
    array[huge] = 1e12 if are_alike else rng.uniform(1e12, 2e12, huge.sum())
    array = array.astype(np.float32)
    others, number = array[~huge], int(huge.sum())
    is_noise = others.size <= number * 0.01
    expected = not is_noise and (number <= 1e-3 * array.size or are_alike)
    told = looked_at(array, piece_voxels, monkeypatch)
    assert told == looked_at(array, 2**20, monkeypatch)
    assert bool(told) == expected
    assert not told or told.startswith(f"scan.nii has {number} voxels of 4096 with values up to")
