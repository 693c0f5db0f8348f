import itertools

import numpy as np
import pytest
import torch

from tests.products import pairwise
from unet3d.errors import VolumeError
from unet3d.images import image_voxels
from unet3d.images.image_voxels import ImageVoxels, StoredChannels
from unet3d.preparation.normalization import ChannelNormalization, ChannelScaling

RNG = np.random.default_rng(0)
Z_SCORE = ChannelNormalization(kind="z-score")


def channel(scale=1.0):
    array = RNG.normal(300, 40, (13, 9, 7)).astype(np.float32)
    array[RNG.random(array.shape) < 0.3] = 0
    return (array * np.float32(scale)).astype(np.float32)


def scaling_of(array, how, inside=None):
    return ChannelScaling.of(ImageVoxels([StoredChannels(voxels=array[None])]), 0, how, inside)


def normalised(array, how, inside=None):
    values = torch.from_numpy(array.copy())
    mask = None if inside is None else torch.from_numpy(inside)
    scaling_of(array, how, inside).apply_(values, mask)
    return values.numpy()


def plain_z_score(array, inside):
    """Return mean and deviation of the voxels that count, in float64."""
    counted = array[array != 0 if inside is None else inside].astype(np.float64)
    return float(counted.mean()), float(counted.std())


@pytest.mark.parametrize("piece_voxels", [1, 100, 2**23])
@pytest.mark.parametrize("is_masked", [False, True])
def test_intensities_are_those_of_the_voxels_that_count(piece_voxels, is_masked, monkeypatch):
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", piece_voxels)
    for scale in (1.0, 1e-30, 1e30, -1e35):
        array = channel(scale)
        inside = RNG.random(array.shape) < 0.5 if is_masked else None
        values = array.astype(np.float64)
        of_all = (values - values.mean()) / values.std()
        mean, std = plain_z_score(array, inside)
        of_inside = (values - mean) / std
        if is_masked:
            of_inside[~inside] = 0
        for kind, wanted in {
            "z-score": of_inside,
            "z-score-inside": of_inside if is_masked else of_all,
            "z-score-all": of_all,
            "rescale": (values - values.min()) / (values.max() - values.min()),
        }.items():
            found = normalised(array, ChannelNormalization(kind=kind), inside)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=kind)


def test_what_has_no_intensities_stays():
    array = np.zeros((4, 5, 6), np.float32)
    for how in (Z_SCORE, ChannelNormalization(kind="none")):
        np.testing.assert_array_equal(scaling_of(array, how).apply(array), array)
    assert scaling_of(array + 1, Z_SCORE, np.zeros(array.shape, bool)) == ChannelScaling()


@pairwise(
    dtype=["u1", "i1", "<u2", ">i2", "<i4", "?"],
    scaling=[(1.0, 0.0), (0.5, -1024.0), (1e30, 0.0)],
    is_masked=[False, True],
    piece_voxels=[1, 100, 2**23],
)
def test_integers_have_the_z_score_of_what_they_stand_for(
    dtype, scaling, is_masked, piece_voxels, monkeypatch
):
    """Counted or not: four bytes are not."""
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", piece_voxels)
    slope, inter = scaling
    rng = np.random.default_rng(2)
    stored = rng.integers(0, 2 if dtype == "?" else 100, (13, 9, 7)).astype(dtype)
    stored[rng.random(stored.shape) < 0.3] = 0
    array = (stored.astype(np.float64) * slope + inter).astype(np.float32)
    inside = rng.random(array.shape) < 0.5 if is_masked else None
    image = ImageVoxels([StoredChannels(voxels=stored[None], slope=slope, inter=inter)])
    found = ChannelScaling.of(image, 0, Z_SCORE, inside)
    mean, std = plain_z_score(array, inside)
    if std < 1e-6 * abs(mean):  # all that is not 0 is alike
        std = float(np.abs(array).max())
    assert np.ldexp(found.mean, -found.exponent) == pytest.approx(mean, rel=1e-12)
    assert np.ldexp(found.std, -found.exponent) == pytest.approx(std, rel=1e-12)


def test_many_voxels_lose_no_digits(monkeypatch):
    """Added up in float32, or as squares, a large mean would hide the deviation."""
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", 1000)
    rng = np.random.default_rng(3)
    stored = (30_000 + rng.integers(0, 3, (90, 80, 70))).astype(np.uint16)
    mean, std = plain_z_score(stored, None)
    for voxels in (stored, stored.astype(np.float32)):
        scaling = scaling_of(voxels, Z_SCORE)
        assert scaling.mean == pytest.approx(mean, rel=1e-13)
        assert scaling.std == pytest.approx(std, rel=1e-11)


KINDS = pytest.mark.parametrize("kind", ["z-score", "z-score-all", "z-score-inside", "rescale"])


@KINDS
def test_a_constant_channel_becomes_zero_whatever_its_value(kind):
    for value in (7, 0.1, -7.3, 1e-12, 3e38, 1234567.9):
        array = np.full((31, 17, 13), value, np.float32)
        for inside in (None, np.ones(array.shape, bool)):
            found = normalised(array, ChannelNormalization(kind=kind), inside)
            np.testing.assert_array_equal(found, 0)


@KINDS
def test_a_least_deviation_keeps_tiny_intensities_small(kind):
    for least, scale in itertools.product((1e-8, 1e-3), (1e-14, 1e-30)):
        array = channel(scale)
        inside = np.ones(array.shape, bool)
        how = ChannelNormalization(kind=kind, least_std=least)
        values = array.astype(np.float64)
        start = values.min() if kind == "rescale" else values.mean()
        expected = (values - start) / least
        found = normalised(array, how, inside)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


def test_the_largest_numbers_do_not_overflow():
    array = np.array([-3e38, 0, 3e38], np.float32).reshape(1, 1, 3)
    for how, expected in (
        (ChannelNormalization(kind="rescale"), [0, 0.5, 1]),
        (Z_SCORE, [-1, 0, 1]),
    ):
        np.testing.assert_allclose(normalised(array, how).ravel(), expected, atol=1e-6)


def test_colours_are_from_0_to_255():
    how = ChannelNormalization(kind="rgb")
    for dtype in (np.uint8, np.float32):
        array = RNG.integers(0, 256, (5, 6, 7)).astype(dtype)
        found = scaling_of(array, how).apply(array.astype(np.float32))
        np.testing.assert_allclose(found, array / 255.0, atol=1e-7)
    for low, high in ((-1, 255), (0, 256), (-1024, 3071)):
        array = np.array([low, 3, high], np.int16).reshape(1, 1, 3)
        with pytest.raises(VolumeError, match=f"intensities from {low} to {high}, but colours"):
            scaling_of(array, how)
