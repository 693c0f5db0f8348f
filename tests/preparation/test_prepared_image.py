"""Images that are cropped, clipped and resampled slice by slice, against SciPy in float64."""

import logging
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import ndimage

from tests.images.samples import held_image
from tests.products import each_value
from unet3d.errors import VolumeError
from unet3d.preparation import interpolation, normalization
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.prepared_image import PreparedImage, inside_mask, nonzero_box
from unet3d.preparation.resample import Interpolation
from unet3d.preparation.transform import Preprocessing

GPU = torch.device("cuda", 0)
PLAIN = ChannelNormalization(kind="none")


def plan(target_mm, interpolation, how=(PLAIN,)):
    return Preprocessing(
        spacing_mm=target_mm,
        channels=tuple(how),
        channel_names=tuple(f"m{number}" for number in range(len(how))),
        label_names=("background",),
        label_values=(0,),
        interpolation=interpolation,
    )


def zoomed(array, shape, order, clips=True):
    """Return an array resampled by SciPy, and clipped to its range."""
    factors = [new / old for new, old in zip(shape, array.shape, strict=True)]
    array = array.astype(np.float64)
    found = ndimage.zoom(array, factors, order=order, mode="nearest", grid_mode=True)
    return np.clip(found, array.min(), array.max()) if clips else found


def slice_by_slice(array, shape, axis, order, across):
    """Return an array whose slices are resampled one by one, and then across them."""
    in_plane = tuple(size for one, size in enumerate(shape) if one != axis)
    slices = np.stack([zoomed(one, in_plane, order) for one in np.moveaxis(array, axis, 0)])
    places = len(slices) / shape[axis] * (np.arange(shape[axis]) + 0.5) - 0.5
    grid = np.stack(np.meshgrid(places, *map(np.arange, in_plane), indexing="ij"))
    found = ndimage.map_coordinates(slices, grid, order=across, mode="nearest")
    return np.moveaxis(found, 0, axis)


def assert_planes(prepared, axis, number, expected):
    """Check that planes along an axis, ``number`` at a time, equal the whole image's planes."""
    starts = range(0, prepared.shape[axis], number)
    ends = [min(start + number, prepared.shape[axis]) for start in starts]
    found = [prepared.planes(axis, start, end) for start, end in zip(starts, ends, strict=True)]
    np.testing.assert_allclose(torch.cat(found, 1 + axis), expected, rtol=0, atol=1e-5)


def noise(shape, channels=1, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (channels, *shape)).astype(np.float32)


SHAPES = [
    ((19, 14, 11), (1.0, 1.0, 1.0), (0.4, 1.0, 2.9)),
    ((19, 14, 11), (1.0, 1.0, 1.0), (0.6, 1.3, 0.9)),
    ((19, 14, 11), (1.0, 1.0, 1.0), (1.7, 1.7, 2.0)),
    ((19, 14, 11), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
    ((19, 14, 1), (1.0, 1.0, 1.0), (1.0, 0.5, 0.5)),
]


@each_value(
    order=[1, 3], shapes=SHAPES, axis=[0, 1, 2], clips=[False, True], piece_voxels=[700, 2**24]
)
def test_planes_are_those_of_scipy(order, shapes, axis, clips, piece_voxels, monkeypatch):
    monkeypatch.setattr(interpolation, "SOURCE_VOXELS", piece_voxels)
    shape, spacing_mm, target_mm = shapes
    image = noise(shape, 2)
    how = Interpolation(order=order, clips=clips, thick="never")
    prepared = PreparedImage(
        held_image(image, spacing_mm=spacing_mm), plan(target_mm, how, [PLAIN] * 2)
    )
    expected = [zoomed(one, prepared.shape, order, clips) for one in image]
    assert_planes(prepared, axis, 4, expected)


@each_value(
    across=[0, 1],
    thick_axis=[0, 1, 2],
    axis=[0, 1, 2],
    target_mm=[(0.7, 1.4, 2.0), (1.3, 0.8, 9.0), (0.7, 1.0, 5.0)],
)
def test_slices_are_clipped_each_and_then_interpolated_across(across, thick_axis, axis, target_mm):
    def turned(numbers):
        return tuple(np.roll(numbers, thick_axis + 1).tolist())

    shape, spacing_mm = turned((16, 13, 7)), turned((1.0, 1.0, 5.0))
    image = noise(shape)
    image *= np.linspace(0.1, 3, 7).reshape(turned((1, 1, 7)))  # each slice has its own range
    how = Interpolation(across_slices=across, clips=True)
    prepared = PreparedImage(held_image(image, spacing_mm=spacing_mm), plan(turned(target_mm), how))
    expected = slice_by_slice(image[0], prepared.shape, thick_axis, 3, across)
    assert_planes(prepared, axis, 3, [expected])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_ranges_are_those_of_normalised_and_masked_intensities(axis):
    """If the outside is set to 0, that may be the lowest or the highest value of a slice."""
    rng = np.random.default_rng(2)
    stored = np.zeros((1, 18, 15, 9), np.int16)
    stored[:, 3:16, 2:13, 2:] = rng.integers(100, 200, (1, 13, 11, 7))
    stored[:, :, :, 5] += rng.integers(300, 400, (1, 18, 15)).astype(np.int16)
    how = Interpolation(across_slices=0, clips=True)
    preprocessing = plan((1.0, 0.9, 2.5), how, [ChannelNormalization(kind="z-score-inside")])
    inside = ndimage.binary_fill_holes(stored[0] != 0)
    counted = stored[0][inside].astype(np.float64)
    normal = np.where(inside, (stored[0] - counted.mean()) / counted.std(), 0)
    for thickness_mm in (5, 2):
        prepared = PreparedImage(held_image(stored, spacing_mm=(1, 1, thickness_mm)), preprocessing)
        if thickness_mm == 5:
            expected = slice_by_slice(normal, prepared.shape, 2, 3, 0)
        else:
            expected = zoomed(normal, prepared.shape, 3)
        assert_planes(prepared, axis, 4, [expected])


FINE = plan((0.5, 0.5, 0.5), Interpolation())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.float32])
@pytest.mark.parametrize("spacing_mm", [(1.0, 1.0, 1.0), (1.0, 1.0, 5.0), (0.6, 1.3, 2.5)], ids=str)
@pytest.mark.parametrize("kind", ["ct", "z-score-inside", "rescale"])
def test_a_gpu_prepares_what_the_cpu_prepares(dtype, spacing_mm, kind):
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 1000, (2, 60, 70, 40)).astype(dtype)
    stored[:, :10] = 0
    stored = np.asfortranarray(stored)  # in the order of files
    how = ChannelNormalization(kind=kind, low=50, high=900, mean=400, std=250)
    interpolation = Interpolation(across_slices=0, clips=True)
    preprocessing = plan((0.6, 1.3, 2.5), interpolation, [how] * 2)
    prepared = PreparedImage(held_image(stored, spacing_mm=spacing_mm), preprocessing)
    for axis in range(3):
        end = min(20, prepared.shape[axis])
        found = prepared.planes(axis, 1, end, GPU)
        assert found.device == GPU and found.dtype == torch.float32
        torch.testing.assert_close(found.cpu(), prepared.planes(axis, 1, end), rtol=0, atol=1e-5)


FULL_GPU = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def test_a_full_gpu_is_told_once_and_other_errors_are_not_taken_for_it(monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    def failing(error):
        monkeypatch.setattr(torch.cuda, "device", mock.Mock(side_effect=error))
        return PreparedImage(held_image(noise((8, 8, 8))), FINE)

    for error in FULL_GPU:
        caplog.clear()
        prepared = failing(error)
        for begin in (0, 8):
            found = prepared.planes(0, begin, begin + 8, GPU)
            torch.testing.assert_close(found, prepared.planes(0, begin, begin + 8))
        (message,) = caplog.messages
        assert message == "cuda:0 has too little memory to prepare the image; the CPU does"
    with pytest.raises(VolumeError, match="^the image cannot be prepared: too little memory"):
        failing(MemoryError()).planes(0, 0, 8, GPU)
    with pytest.raises(RuntimeError, match="^an illegal access$"):
        failing(RuntimeError("an illegal access")).planes(0, 0, 8, GPU)


RNG = np.random.default_rng(0)


def test_the_box_holds_all_that_is_not_zero_and_no_plane_more():
    rng = np.random.default_rng(0)
    for _ in range(50):
        size = rng.integers(1, 9, 3)
        image = np.zeros((2, *size), np.float32)
        for channel in range(2):
            for place in rng.integers(0, size, (rng.integers(1, 4), 3)):
                image[(channel, *place)] = rng.choice([-1.0, 1e-30, 7.0])
        places = np.argwhere(image)[:, 1:]
        box = nonzero_box(held_image(image))
        assert box == tuple(map(slice, places.min(0), places.max(0) + 1))
    whole = (slice(0, 3), slice(0, 4), slice(0, 5))
    assert nonzero_box(held_image(np.zeros((1, 3, 4, 5), np.float32))) == whole


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_what_is_enclosed_is_inside(share):
    rng = np.random.default_rng(0)
    image = np.zeros((2, 12, 11, 13), np.float32)
    image[:, 2:10, 3:9, 1:12] = rng.random((2, 8, 6, 11)) < share
    numbered, _ = ndimage.label(np.pad(~image.any(axis=0), 1, constant_values=True))
    expected = (numbered != numbered[0, 0, 0])[1:-1, 1:-1, 1:-1]
    assert expected.sum() > image.any(axis=0).sum()  # the body has holes
    np.testing.assert_array_equal(inside_mask(held_image(image)), expected)
    box = nonzero_box(held_image(image))
    np.testing.assert_array_equal(inside_mask(held_image(image).cut(box)), expected[box])


def test_clipped_integers_are_prepared_without_reading_them_first(monkeypatch):
    array = np.random.default_rng(1).integers(0, 255, (1, 9, 8, 7), np.uint8)
    how = ChannelNormalization(kind="ct", low=20, high=200, mean=100, std=40)
    image = held_image(array)
    with monkeypatch.context() as patch:
        patch.delattr(type(image), "read")
        prepared = PreparedImage(image, plan(None, Interpolation(), [how]))
        np.testing.assert_allclose(prepared.whole(), (array.clip(20, 200) - 100.0) / 40, atol=1e-6)
    assert prepared.largest == pytest.approx(2.5)
    with pytest.raises(VolumeError, match="1 of 504 voxels that are NaN"):  # floats are looked at
        floats = array.astype(np.float32)
        floats[0, 1, 2, 3] = np.nan
        PreparedImage(held_image(floats), plan(None, Interpolation(), [how]))


def test_what_a_sample_does_not_show_is_found_when_it_is_read(monkeypatch):
    monkeypatch.setattr(normalization, "LARGE_VOXELS", 1000)
    array = noise((20, 30, 40))
    array[0, 19, 29, 39] = np.nan  # a corner, which no box of the sample has
    image = held_image(array, spacing_mm=(1e-4,) * 3)
    monkeypatch.setattr(normalization, "BOX_SHAPE", (2, 2, 2))
    for kind in ("z-score", "none"):
        prepared = PreparedImage(
            image, plan(None, Interpolation(), [ChannelNormalization(kind=kind)])
        )
        prepared.planes(0, 0, 19)
        with pytest.raises(VolumeError, match="held has voxels that are NaN or infinite"):
            prepared.planes(0, 15, 20)
