"""Voxels as they are stored, against plain arrays of all of them."""

import gzip
import itertools

import nibabel as nib
import numpy as np
import pytest
import torch

from tests import products
from tests.images.samples import write_volume
from tests.resident import resident_kib
from unet3d.images import image_voxels
from unet3d.images.image_voxels import ImageVoxels, StoredChannels
from unet3d.images.nifti import open_channels, read_channels
from unet3d.images.scratch import Scratch

CPU = torch.device("cpu")
SHAPE = (7, 6, 5)
TYPES = ("|u1", "|i1", "<u2", ">u2", "<i2", ">i2", "<i4", ">i4", "<f4", ">f4", "<f8", ">f8")
SCALINGS = ((1.0, 0.0), (0.25, 0.0), (1.0, -1024.0), (-0.3, 17.5))


def stored_numbers(dtype, shape, seed=0):
    """Return numbers over all that a type can hold, with some zeros."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        numbers = rng.normal(0, 1e4, shape)
    elif kind.kind == "b":
        numbers = rng.integers(0, 2, shape)
    else:
        limits = np.iinfo(kind)
        numbers = rng.integers(limits.min, limits.max, shape, endpoint=True)
    return np.where(rng.random(shape) < 0.2, 0, numbers).astype(kind)


def scaled(stored, slope, inter):
    """Return what numbers stand for, computed in float64."""
    return (stored.astype(np.float64) * slope + inter).astype(np.float32)


def write_stored(path, stored, slope, inter):
    """Write numbers as they are, with a scaling in the header."""
    endianness = ">" if stored.dtype.byteorder == ">" else "<"
    image = nib.Nifti1Image(stored, np.eye(4), nib.Nifti1Header(endianness=endianness))
    image.header.set_data_dtype(stored.dtype)
    content = bytearray(image.to_bytes())
    # The NIfTI standard: scl_slope and scl_inter, in float32, at bytes 112 and 116.
    content[112:120] = np.array([slope, inter], f"{endianness}f4").tobytes()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def assert_like(image, expected):
    """See that all that can be asked of an image is that of an array (C, X, Y, Z)."""
    shape = expected.shape[1:]
    assert (image.num_channels, image.shape) == (len(expected), shape)
    for axis, size in enumerate(shape):
        for planes in (slice(0, size), slice(1, 3), slice(size - 1, size)):
            sent = image.on_device(axis, planes, CPU)
            assert sent.dtype == torch.float32
            np.testing.assert_array_equal(sent, expected[(slice(None),) * (1 + axis) + (planes,)])
            sent.fill_(77)  # it is a copy
    whole = image.whole()
    assert whole.dtype == np.float32 and whole.flags.c_contiguous
    np.testing.assert_array_equal(whole, expected)
    covered = np.zeros(shape, int)
    for piece in image.pieces():
        covered[piece] += 1
        np.testing.assert_array_equal(image.read(piece), expected[:, *piece])
    assert (covered == 1).all()
    for number, values in enumerate(expected):
        channel = image.channel(number)
        assert channel.shape == shape
        np.testing.assert_array_equal(channel[1:4, :, 2], values[1:4, :, 2])
        np.testing.assert_array_equal(channel[2], values[2])


@products.pairwise(
    dtype=TYPES, scaling=SCALINGS, name=["scan.nii", "scan.nii.gz"], piece_voxels=[50, 2**20]
)
def test_every_type_in_a_file(dtype, scaling, name, piece_voxels, tmp_path, monkeypatch):
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", piece_voxels)
    slope, inter = scaling
    stored = stored_numbers(dtype, (*SHAPE, 2))
    path = write_stored(tmp_path / name, stored, slope, inter)
    expected = np.moveaxis(nib.load(path).get_fdata().astype(np.float32), 3, 0)
    assert_like(open_channels([path]).voxels, expected)
    assert_like(open_channels([path], Scratch(tmp_path)).voxels, expected)
    np.testing.assert_array_equal(read_channels([path]).array, expected)


@products.pairwise(
    axes=list(itertools.permutations(range(3))),
    steps=[(1, 1, 1), (-1, -1, 1), (-1, 1, -1), (1, -1, -1)],
    order=["C", "F"],
)
def test_every_order_and_direction_of_the_axes(axes, steps, order, monkeypatch):
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", 40)
    dtype, *scaling = ("<f4", 1.0, 0.0) if order == "C" else ("<i2", 0.5, 3.0)
    stored = np.asarray(stored_numbers(dtype, (2, 4, 5, 6)), order=order)
    turned = stored.transpose(0, *(1 + axis for axis in axes))
    turned = turned[:, :: steps[0], :: steps[1], :: steps[2]]
    before = turned.copy()
    image = ImageVoxels([StoredChannels(voxels=turned, slope=scaling[0], inter=scaling[1])])
    assert_like(image, scaled(before, *scaling))
    np.testing.assert_array_equal(turned, before)  # nobody changes an array of the user
    # The pieces are planes that lie together in what is stored.
    slowest = axes.index(0 if order == "C" else 2)
    assert image.slowest_axis == slowest
    whole = [slice(0, n) for n in image.shape]
    for piece in image.pieces():
        assert all(piece[axis] == whole[axis] for axis in range(3) if axis != slowest)


def test_channels_of_several_files_and_types_follow_each_other(tmp_path):
    paths, expected = [], []
    for number, (dtype, count) in enumerate((("<i2", 2), ("|u1", 1), ("<f4", 1))):
        stored = stored_numbers(dtype, (*SHAPE, count), seed=number)
        path = tmp_path / f"{number}.nii{'.gz' * (number % 2)}"
        paths.append(write_stored(path, stored, 0.5, number))
        expected.append(np.moveaxis(scaled(stored, 0.5, number), 3, 0))
    assert_like(open_channels(paths).voxels, np.concatenate(expected))


@pytest.mark.parametrize("dtype", ["<i2", "<f4", "|b1"])
def test_a_part_is_that_of_the_array_and_no_copy(dtype):
    stored = stored_numbers(dtype, (2, *SHAPE))
    image = ImageVoxels([StoredChannels(voxels=stored, slope=3.0, inter=5.0)])
    cut = image.cut((slice(2, 6), slice(1, 6), slice(0, 4)))
    assert_like(cut, scaled(stored[:, 2:6, 1:6, :4], 3.0, 5.0))
    assert_like(image, scaled(stored, 3.0, 5.0))
    stored[0, 3, 3, 2] = 1  # a copy would not change with it
    assert cut.channel(0)[1, 2, 2] == 8


def test_what_float32_cannot_hold_becomes_infinite():
    image = ImageVoxels([StoredChannels(voxels=np.full((1, *SHAPE), -1e300))])
    assert torch.isinf(image.on_device(0, slice(0, 2), CPU)).all()
    assert np.isinf(image.whole()).all()


@pytest.mark.parametrize(("kind", "dtype"), [("mapped", "<i2"), ("scratch", "<f4")])
def test_a_file_is_not_held_in_memory(kind, dtype, tmp_path, monkeypatch):
    """24 MB or 12 of which at most some planes are there at a time."""
    monkeypatch.setattr(image_voxels, "PIECE_VOXELS", 2**16)
    shape = (200, 200, 150)
    array = np.random.default_rng(0).integers(0, 1000, shape).astype(dtype)
    path = write_volume(tmp_path / ("scan.nii" if kind == "mapped" else "scan.nii.gz"), array)
    image = open_channels([path], Scratch(tmp_path)).voxels
    held = [resident_kib(tmp_path)]
    for first in range(0, 150, 10):
        planes = image.on_device(2, slice(first, first + 10), CPU)
        np.testing.assert_array_equal(planes[0], array[..., first : first + 10])
        held.append(resident_kib(tmp_path))
    for place in image.pieces():
        image.read(place)
        held.append(resident_kib(tmp_path))
    assert max(held) < 4096, held
