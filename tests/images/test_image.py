"""Voxels as they are stored, against plain arrays of all of them."""

import gzip
import itertools
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests import products
from tests.images.samples import held_image, write_volume
from tests.products import by_night
from tests.resident import resident_kib
from unet3d.images import image as image_module
from unet3d.images.geometry import geometry_of_affine
from unet3d.images.image import image_of, open_image
from unet3d.images.scratch import Scratch
from unet3d.images.source import Source

CPU = torch.device("cpu")
SHAPE = (7, 6, 5)
TYPES = ("|u1", "|i1", "<u2", ">u2", "<i2", ">i2", "<i4", ">i4", "<f4", ">f4", "<f8", ">f8")
SCALINGS = ((1.0, 0.0), (0.25, 0.0), (1.0, -1024.0), (-0.3, 17.5))


def stored_numbers(dtype, shape, seed=0):
    """Return numbers over the whole range of a type, with some zeros."""
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
    """Return the values that stored numbers represent, computed in float64."""
    return (stored.astype(np.float64) * slope + inter).astype(np.float32)


def write_stored(path, stored, slope, inter):
    """Write numbers as they are, with a scaling in the header."""
    endianness = ">" if stored.dtype.byteorder == ">" else "<"
    image = nib.Nifti1Image(stored, np.eye(4), nib.Nifti1Header(endianness=endianness))
    image.header.set_data_dtype(stored.dtype)
    content = bytearray(image.to_bytes())
    # scl_slope and scl_inter of the NIfTI standard, in float32, at bytes 112 and 116.
    content[112:120] = np.array([slope, inter], f"{endianness}f4").tobytes()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def assert_like(image, expected):
    """Check that every method of an image agrees with an array (C, X, Y, Z)."""
    shape = expected.shape[1:]
    assert (image.shape, image.num_channels) == (expected.shape, len(expected))
    assert image.geometry.shape == shape
    whole = tuple(slice(0, size) for size in shape)
    for axis, size in enumerate(shape):
        for planes in (slice(0, size), slice(1, 3), slice(size - 1, size)):
            box = (*whole[:axis], planes, *whole[axis + 1 :])
            sent = image.on_device(box, CPU)
            assert sent.dtype == torch.float32
            np.testing.assert_array_equal(sent, expected[:, *box])
            sent.fill_(77)  # it is a copy
            np.testing.assert_array_equal(image.read(box), expected[:, *box])
    found = image.whole()
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(image.read(), expected)
    covered = np.zeros(shape, int)
    for piece in image.pieces():
        covered[piece] += 1
        np.testing.assert_array_equal(image.read(piece), expected[:, *piece])
    assert (covered == 1).all()
    for axis in range(3):
        np.testing.assert_array_equal(image.plane(axis, 2), expected[0].take(2, axis))
    for number, values in enumerate(expected):
        np.testing.assert_array_equal(image.read(channel=number)[0], values)


@products.each_value(
    dtype=TYPES, scaling=SCALINGS, name=["scan.nii", "scan.nii.gz"], piece_voxels=[50, 2**20]
)
def test_every_type_in_a_file(dtype, scaling, name, piece_voxels, tmp_path, monkeypatch):
    monkeypatch.setattr(image_module, "PIECE_VOXELS", piece_voxels)
    slope, inter = scaling
    stored = stored_numbers(dtype, (*SHAPE, 2))
    path = write_stored(tmp_path / name, stored, slope, inter)
    expected = np.moveaxis(nib.load(path).get_fdata().astype(np.float32), 3, 0)
    assert_like(open_image(path), expected)
    assert_like(open_image(path, Scratch(tmp_path)), expected)
    np.testing.assert_array_equal(open_image(path).whole(), expected)


@products.each_value(
    axes=list(itertools.permutations(range(3))),
    steps=[(1, 1, 1), (-1, -1, 1), (-1, 1, -1), (1, -1, -1)],
    order=["C", "F"],
)
def test_every_order_and_direction_of_the_axes(axes, steps, order, monkeypatch):
    monkeypatch.setattr(image_module, "PIECE_VOXELS", 40)
    dtype, *scaling = ("<f4", 1.0, 0.0) if order == "C" else ("<i2", 0.5, 3.0)
    stored = np.asarray(stored_numbers(dtype, (2, 4, 5, 6)), order=order)
    turned = stored.transpose(0, *(1 + axis for axis in axes))
    turned = turned[:, :: steps[0], :: steps[1], :: steps[2]]
    before = turned.copy()
    image = held_image(turned, *scaling)
    assert_like(image, scaled(before, *scaling))
    np.testing.assert_array_equal(turned, before)  # the user's array is not changed
    # The pieces are planes that are contiguous in the stored array.
    slowest = axes.index(0 if order == "C" else 2)
    assert image.slowest_axis == slowest
    whole = [slice(0, n) for n in image.shape[1:]]
    for piece in image.pieces():
        assert all(piece[axis] == whole[axis] for axis in range(3) if axis != slowest)


def test_channels_of_several_files_and_types_follow_each_other(tmp_path):
    paths, expected = [], []
    for number, (dtype, count) in enumerate((("<i2", 2), ("|u1", 1), ("<f4", 1))):
        stored = stored_numbers(dtype, (*SHAPE, count), seed=number)
        path = tmp_path / f"{number}.nii{'.gz' * (number % 2)}"
        paths.append(write_stored(path, stored, 0.5, number))
        expected.append(np.moveaxis(scaled(stored, 0.5, number), 3, 0))
    assert_like(open_image(paths), np.concatenate(expected))


@pytest.mark.parametrize("dtype", ["<i2", "<f4", "|b1"])
def test_a_part_is_that_of_the_array_and_no_copy(dtype):
    stored = stored_numbers(dtype, (2, *SHAPE))
    image = held_image(stored, 3.0, 5.0)
    cut = image.cut((slice(2, 6), slice(1, 6), slice(0, 4)))
    assert_like(cut, scaled(stored[:, 2:6, 1:6, :4], 3.0, 5.0))
    assert_like(image, scaled(stored, 3.0, 5.0))
    stored[0, 3, 3, 2] = 1  # a copy would not change with it
    assert cut.read(channel=0)[0, 1, 2, 2] == 8


def test_what_float32_cannot_hold_becomes_infinite():
    image = held_image(np.full((1, *SHAPE), -1e300))
    assert torch.isinf(image.on_device((slice(0, 2), slice(0, 6), slice(0, 5)), CPU)).all()
    assert np.isinf(image.whole()).all()


@pytest.mark.parametrize(("kind", "dtype"), [("mapped", "<i2"), *by_night(("scratch", "<f4"))])
def test_a_file_is_not_held_in_memory(kind, dtype, tmp_path, monkeypatch):
    """Of 24 or 12 MB, at most some planes are in memory at a time."""
    monkeypatch.setattr(image_module, "PIECE_VOXELS", 2**18)
    shape = (200, 200, 150)
    array = np.random.default_rng(0).integers(0, 1000, shape).astype(dtype)
    path = write_volume(tmp_path / ("scan.nii" if kind == "mapped" else "scan.nii.gz"), array)
    image = open_image(path, Scratch(tmp_path))
    held = [resident_kib(tmp_path)]
    for first in range(0, 150, 10):
        box = (slice(0, 200), slice(0, 200), slice(first, first + 10))
        planes = image.on_device(box, CPU)
        np.testing.assert_array_equal(planes[0], array[..., first : first + 10])
        held.append(resident_kib(tmp_path))
    for piece in image.pieces():
        np.testing.assert_array_equal(image.read(piece)[0], array[piece])
        held.append(resident_kib(tmp_path))
    assert max(held) < 4096, held


def test_a_part_of_a_part_lies_where_it_lay(tmp_path):
    array = stored_numbers("<i2", (*SHAPE, 2))
    affine = np.array([[-0.5, 0, 0, 9], [0, 0, 2.0, -3], [0, 0.7, 0, 4], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(array, affine), tmp_path / "scan.nii")
    image = open_image(tmp_path / "scan.nii")
    part = image.cut((slice(1, 6), slice(0, 4), slice(2, 5))).cut(
        (slice(2, 4), slice(1, 3), slice(0, 2))
    )
    np.testing.assert_array_equal(part.whole(), image.whole()[:, 3:5, 1:3, 2:4])
    np.testing.assert_allclose(
        part.geometry.affine @ [0, 0, 0, 1], image.geometry.affine @ [3, 1, 2, 1], rtol=1e-6
    )


def test_a_part_may_be_open_at_its_ends_and_be_as_it_is_stored(tmp_path):
    array = stored_numbers("<i2", SHAPE)
    affine = np.array([[0, -0.5, 0, 9], [0, 0, 2.0, -3], [-0.7, 0, 0, 4], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(array, affine), tmp_path / "scan.nii")
    image = open_image(tmp_path / "scan.nii")
    part = image.cut((slice(None), slice(1, None), slice(2, 6)))
    np.testing.assert_array_equal(part.whole(), image.whole()[:, :, 1:, 2:6])
    np.testing.assert_allclose(
        part.geometry.affine[:3, 3], (image.geometry.affine @ [0, 1, 2, 1])[:3], rtol=1e-6
    )
    # X of the image runs against the second axis of the file, Y with the third, and Z against the
    # first: voxels 2 to 5 of these 7 in the image are voxels 1 to 4 in the file.
    stored = image.as_stored().cut((slice(1, 5), slice(None), slice(1, None)))
    np.testing.assert_array_equal(stored.whole()[0], array[1:5, :, 1:])
    np.testing.assert_array_equal(
        stored.whole()[0].transpose(1, 2, 0)[::-1, :, ::-1], part.whole()[0]
    )
    np.testing.assert_allclose(
        stored.geometry.affine, affine @ nib.affines.from_matvec(np.eye(3), [1, 0, 1]), rtol=1e-6
    )


def test_a_chunked_array_is_read_box_by_box():
    """Any object that can be sliced like an array is a source; only requested boxes are read."""

    class Chunked:
        def __init__(self, array):
            self.array, self.shape, self.read = array, array.shape, []

        def __getitem__(self, box):
            assert all(0 <= one.start < one.stop and one.step is None for one in box)
            found = self.array[box]
            self.read.append(found.size)
            return found

    array = stored_numbers("<i2", (6, 7, 8, 1))
    affine = np.array([[0, -2.0, 0, 5], [3.0, 0, 0, -1], [0, 0, -1, 2], [0, 0, 0, 1]])
    chunked = Chunked(array)
    geometry = geometry_of_affine(Path("chunked"), array.shape, affine)
    image = image_of([Source(geometry, array.dtype, lambda scratch: chunked)])
    expected = nib.as_closest_canonical(nib.Nifti1Image(array, affine)).get_fdata()[..., 0]
    box = (slice(2, 5), slice(1, 3), slice(0, 4))
    np.testing.assert_array_equal(image.read(box)[0], expected[box])
    assert chunked.read == [3 * 2 * 4]
    np.testing.assert_array_equal(image.whole()[0], expected)
