"""Statistics and normalisation of channels, compared with NumPy on whole arrays in float64."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.images.samples import held_image, noise
from tests.products import each_value
from unet3d.errors import VolumeError
from unet3d.images import image as image_module
from unet3d.images.geometry import geometry_of_affine
from unet3d.preparation import normalization
from unet3d.preparation.normalization import (
    ChannelNormalization,
    Scaling,
    is_microscopic,
    kind_of,
    measured,
    sampled,
)

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
    assert kind_of(name, "auto", is_microscopic=False) == kind
    of_microscope = "percentiles" if kind == "z-score" else kind
    assert kind_of(name, "auto", is_microscopic=True) == of_microscope
    for setting in ("ct", "percentiles", "z-score", "none"):
        assert kind_of(name, setting, is_microscopic=True) == setting


@pytest.mark.parametrize(
    ("name", "spacing_mm", "expected"),
    [
        *(("a.tif", 1, True), ("a.ome.tiff", 1, True), ("a.ome.zarr", 1, True)),
        *(("a.zarr.zip", 1, True), ("a.nii.gz", 1e-5, True), ("a.nii.gz", 0.06, False)),
        *(("a.nrrd", 0.009, True), ("a.mha", 0.5, False), ("series", 1, False)),
    ],
)
def test_a_volume_is_of_a_microscope_by_its_format_or_its_fine_voxels(name, spacing_mm, expected):
    affine = np.diag([1.0, spacing_mm, 1.0, 1.0])
    assert is_microscopic(geometry_of_affine(Path(name), (2, 2, 2, 1), affine)) == expected


def large_image(array, monkeypatch, is_fine=True):
    monkeypatch.setattr(normalization, "LARGE_VOXELS", 1000)
    monkeypatch.setattr(normalization, "BOX_SHAPE", (3, 4, 5))
    image = held_image(array, spacing_mm=(1e-5,) * 3 if is_fine else (1, 1, 1))
    read, boxes = image.read, []

    def noted(box=None, channel=None):
        boxes.append(box)
        return read(box, channel)

    monkeypatch.setattr(image, "read", noted)
    return image, boxes


def test_of_a_large_volume_of_a_microscope_a_spread_sample_is_measured(monkeypatch):
    array = RNG.integers(0, 60000, (2, 30, 41, 17), np.uint16)
    image, boxes = large_image(array, monkeypatch)
    found = measured(image, [None] * 2)
    assert len(boxes) == 4**3
    seen = np.zeros(array.shape[1:], int)
    for box in boxes:
        seen[box] += 1
    # A quarter of the planes, 4 or 5 of 17, is at most what a box has.
    assert seen.max() == 1 and seen.sum() == (4 * 3) * (4 * 4) * 17
    for axis, size in enumerate(seen.shape):  # no quarter is left out
        lines = seen.any(axis=tuple({0, 1, 2} - {axis}))
        assert all(part.any() for part in np.array_split(lines, 4)), size
    for one, channel in zip(found, array.astype(np.float64), strict=True):
        counted = channel[seen > 0]
        assert (one.mean, one.std) == pytest.approx((counted.mean(), counted.std()), rel=1e-5)
    sample = sampled(image)
    assert sorted(sample[1].ravel()) == sorted(array[1][seen > 0])


def test_all_of_a_large_volume_is_measured_for_a_mask_an_axis_or_a_patient(monkeypatch):
    array = RNG.normal(size=(1, 30, 41, 17)).astype(np.float32)
    inside = array[0] > 0
    for mask, axis, is_fine in ((inside, None, True), (None, 2, True), (None, None, False)):
        image, _ = large_image(array, monkeypatch, is_fine)
        (found,) = measured(image, [mask], axis)
        counted = array[0] if mask is None else array[0][mask]
        assert found.mean == pytest.approx(counted.mean(dtype=np.float64), rel=1e-5)
    assert sampled(image).shape == array.shape


def image_of(stored, slope=1.0, inter=0.0):
    return held_image(stored, slope, inter)


@each_value(
    dtype=["u1", "<u2", ">i2", "<i4", "?", "<f4", ">f8"],
    scaling=[(1.0, 0.0), (0.5, -1024.0), (1e30, 0.0), (-1e-30, 0.0)],
    axis=[None, 0, 1, 2],
    piece_voxels=[1, 100, 2**23],
    order=["C", "F"],
)
def test_extremes_mean_and_deviation_are_those_of_numpy(
    dtype, scaling, axis, piece_voxels, order, monkeypatch
):
    monkeypatch.setattr(image_module, "PIECE_VOXELS", piece_voxels)
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 2 if dtype == "?" else 100, (2, 13, 9, 7)).astype(dtype)
    stored = np.asarray(stored, order=order)
    array = (stored.astype(np.float64) * scaling[0] + scaling[1]).astype(np.float32)
    mask = rng.random(array.shape[1:]) < 0.5
    mask[(slice(None),) * (axis or 0) + (2,)] = False  # a plane without voxels
    for masks in ([None, None], [mask, None]):
        found = measured(image_of(stored, *scaling), masks, axis)
        for one, values, inside in zip(found, array, masks, strict=True):
            numbers = (values if inside is None else values[inside]).astype(np.float64)
            assert one.mean == pytest.approx(numbers.mean(), rel=1e-12)
            assert one.std == pytest.approx(numbers.std(), rel=1e-9)
            filled = values if inside is None else np.where(inside, values, np.float32(one.mean))
            others = tuple(other for other in range(3) if other != axis)
            np.testing.assert_array_equal(one.lowest, filled.min(others, keepdims=True).ravel())
            np.testing.assert_array_equal(one.highest, filled.max(others, keepdims=True).ravel())


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_many_voxels_lose_no_digits(dtype, monkeypatch):
    """A large mean would hide the deviation in float32 sums or in sums of squares."""
    monkeypatch.setattr(image_module, "PIECE_VOXELS", 1000)
    rng = np.random.default_rng(3)
    stored = (30_000 + rng.integers(0, 3, (1, 90, 80, 70))).astype(dtype)
    (found,) = measured(image_of(stored), [None])
    assert found.mean == pytest.approx(stored.astype(np.float64).mean(), rel=1e-13)
    assert found.std == pytest.approx(stored.astype(np.float64).std(), rel=1e-11)


def test_equal_voxels_have_no_deviation_at_all(monkeypatch):
    monkeypatch.setattr(image_module, "PIECE_VOXELS", 1000)
    for value in (0.1, -7.3, 3e38, 1234567.9):
        (found,) = measured(held_image(np.full((1, 31, 17, 13), value, np.float32)), [None])
        assert (found.mean, found.std) == (np.float32(value), 0), value


def test_a_mask_without_voxels_has_no_intensities():
    (found,) = measured(held_image(noise((1, 4, 5, 6))), [np.zeros((4, 5, 6), bool)])
    assert (found.mean, found.std, found.lowest, found.highest) == (0, 0, [0], [0])


@each_value(
    value=[math.nan, math.inf, -math.inf, 1e39], number=[1, 3, 4913], piece_voxels=[1, 300, 2**20]
)
def test_every_voxel_that_is_no_number_is_counted(value, number, piece_voxels, monkeypatch):
    monkeypatch.setattr(image_module, "PIECE_VOXELS", piece_voxels)
    array = noise((2, 17, 17, 17)).astype(np.float64)
    wrong = np.random.default_rng(0).permutation(4913)[:number]
    array[1].reshape(-1)[wrong] = value
    with pytest.raises(VolumeError, match=f"has {number} of 9826 voxels that are NaN .*; replace"):
        measured(image_of(array), [None, None])
