"""Normalised intensities, against the formulae in float64."""

import itertools

import numpy as np
import pytest
import torch

from tests.images.samples import held_image
from unet3d.errors import VolumeError
from unet3d.preparation.intensities import measured
from unet3d.preparation.normalization import ChannelNormalization, Scaling, kind_of

RNG = np.random.default_rng(0)


def channel(scale=1.0):
    array = RNG.normal(300, 40, (13, 9, 7)).astype(np.float32)
    array[RNG.random(array.shape) < 0.3] = 0
    return (array * np.float32(scale)).astype(np.float32)


def normalised(array, how, inside=None):
    image = held_image(array[None])
    (found,) = measured(image, [inside])
    values = torch.from_numpy(array.astype(np.float32))
    mask = None if inside is None else torch.from_numpy(inside)
    scaling = Scaling.of(how, found)
    scaling.apply_(values, mask)
    ends = torch.from_numpy(np.stack([found.lowest, found.highest]))
    scaling.apply_(ends)
    torch.testing.assert_close(ends.ravel(), torch.stack(values.aminmax()), rtol=1e-5, atol=1e-6)
    return values.numpy()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, -1e35])
def test_each_kind_is_its_formula(scale):
    array = channel(scale)
    values = array.astype(np.float64)
    inside = RNG.random(array.shape) < 0.5
    counted = values[inside]
    low, high = np.percentile(values, [20, 80])
    of_data = {"low": low, "high": high, "mean": low * 0.4, "std": (high - low) * 0.3}
    for kind, mask, expected in (
        ("none", None, values),
        ("z-score", None, (values - values.mean()) / values.std()),
        ("z-score-inside", inside, inside * (values - counted.mean()) / counted.std()),
        ("rescale", None, (values - values.min()) / (values.max() - values.min())),
        ("ct", None, (np.clip(values, low, high) - of_data["mean"]) / of_data["std"]),
    ):
        how = ChannelNormalization(kind=kind, **(of_data if kind == "ct" else {}))
        found = normalised(array, how, mask)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=kind)


KINDS = pytest.mark.parametrize("kind", ["z-score", "z-score-inside", "rescale"])


@KINDS
def test_a_constant_channel_becomes_zero_whatever_its_value(kind):
    for value in (0, 7, 0.1, -7.3, 1e-12, 3e38, 1234567.9):
        array = np.full((31, 17, 13), value, np.float32)
        for inside in (None, np.ones(array.shape, bool)):
            found = normalised(array, ChannelNormalization(kind=kind), inside)
            np.testing.assert_array_equal(found, 0)


@KINDS
def test_a_least_deviation_keeps_tiny_intensities_small(kind):
    for least, scale in itertools.product((1e-8, 1e-3), (1e-14, 1e-30)):
        array = channel(scale)
        how = ChannelNormalization(kind=kind, least_std=least)
        values = array.astype(np.float64)
        start = values.min() if kind == "rescale" else values.mean()
        expected = (values - start) / least
        found = normalised(array, how, np.ones(array.shape, bool))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


def test_colours_are_from_0_to_255():
    how = ChannelNormalization(kind="rgb")
    for dtype in (np.uint8, np.float32):
        array = RNG.integers(0, 256, (5, 6, 7)).astype(dtype)
        np.testing.assert_allclose(normalised(array, how), array / 255.0, atol=1e-7)
    for low, high in ((-1, 255), (0, 256), (-1024, 3071)):
        array = np.array([low, 3, high], np.int16).reshape(1, 1, 3)
        with pytest.raises(VolumeError, match=f"intensities from {low} to {high}, but colours"):
            normalised(array, how)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("CT", "ct"), (" ct ", "ct"), ("CT_portal", "ct"), ("ct-late", "ct"), ("CT 1", "ct")),
        *(("noNorm", "none"), ("rescale_to_0_1", "rescale"), ("RGB_to_0_1", "rgb")),
        *(("zscore", "z-score"), ("T1", "z-score"), ("CTA", "z-score"), ("rgb", "z-score")),
    ],
)
def test_a_training_normalises_a_channel_by_its_name_as_nnunet(name, kind):
    assert kind_of(name, "auto") == kind
    for setting in ("ct", "z-score", "none"):
        assert kind_of(name, setting) == setting
