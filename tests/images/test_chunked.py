"""Voxels in chunks, over an array that notes which chunks it unpacks."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from unet3d.images import chunked
from unet3d.images import image as image_module
from unet3d.images.chunked import ChunkedVoxels
from unet3d.images.geometry import geometry_of_affine
from unet3d.images.image import image_of
from unet3d.images.source import Source

SIZES = {"t": 1, "c": 2, "z": 13, "y": 20, "x": 17}
CHUNKS = {"t": 1, "c": 1, "z": 4, "y": 8, "x": 6}


class Noting:
    """An array that counts how often each chunk is unpacked."""

    def __init__(self, axes, chunks=None):
        self.shape = tuple(SIZES[name] for name in axes)
        self.chunks = chunks or tuple(CHUNKS[name] for name in axes)
        self.dtype = np.dtype(np.uint16)
        rng = np.random.default_rng(0)
        self.content = rng.integers(0, 999, self.shape).astype(self.dtype)
        self.unpacked = Counter()

    def __getitem__(self, box):
        parts = zip(box, self.chunks, strict=True)
        touched = [range(part.start // n, -(-part.stop // n)) for part, n in parts]
        self.unpacked.update(itertools.product(*touched))
        return self.content[box]


def opened(axes, chunks=None):
    """Return an array that notes, and voxels (I, J, K, C) over it."""
    array = Noting(axes, chunks)
    return array, ChunkedVoxels(Path("scan.zarr"), array, axes)


def in_order(array, axes):
    """Return the content of an array as (I, J, K, C)."""
    content = np.moveaxis(array.content, [axes.index(name) for name in "xyz"], [-3, -2, -1])
    return np.moveaxis(content.reshape(-1, *content.shape[-3:]), 0, -1)


@pytest.mark.parametrize("axes", ["zyx", "xyz", "tczyx", "zyxc"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_consecutive_planes_along_any_axis_unpack_a_chunk_once(axes, axis):
    array, voxels = opened(axes)
    expected = in_order(array, axes)
    assert voxels.shape == expected.shape
    for first in range(0, voxels.shape[axis], 2):  # an even chunk has whole pairs of planes
        for channel in range(voxels.shape[3]):
            box = [slice(None)] * 4
            box[axis], box[3] = slice(first, first + 2), slice(channel, channel + 1)
            np.testing.assert_array_equal(voxels[tuple(box)], expected[tuple(box)])
    assert set(array.unpacked.values()) == {1}


def test_layers_that_are_too_large_are_not_kept(monkeypatch):
    array, voxels = opened("zyx")
    monkeypatch.setattr(chunked, "KEPT_BYTES", 1)
    for z in range(3):
        expected = array.content[z : z + 1].transpose(2, 1, 0)[..., None]
        np.testing.assert_array_equal(voxels[:, :, z : z + 1, :], expected)
    assert set(array.unpacked.values()) == {3}


@pytest.mark.parametrize("most", [20, 4 * 8 * 6, 1000, 4000, 10**6])
@pytest.mark.parametrize("is_turned", [False, True])
def test_pieces_are_whole_chunks_and_each_is_unpacked_once(most, is_turned, monkeypatch):
    monkeypatch.setattr(image_module, "PIECE_VOXELS", most)
    array, voxels = opened("zyx")
    affine = np.diag([1.0, 1, 1, 1])
    if is_turned:
        affine[:3, :3] = np.eye(3)[:, [1, 2, 0]]
    geometry = geometry_of_affine(Path("scan.zarr"), voxels.shape, affine, (1, 1, 1))
    image = image_of([Source(geometry, voxels.dtype, lambda scratch: voxels)])
    expected = np.empty(image.shape, np.float32)
    boxes = list(image.pieces())
    for box in boxes:
        expected[:, *box] = image.read(box)
    np.testing.assert_array_equal(expected, image.read())
    assert sum(np.prod([part.stop - part.start for part in box]) for box in boxes) == 13 * 20 * 17
    array.unpacked.clear()
    for box in boxes:
        image.read(box)
        assert np.prod([part.stop - part.start for part in box]) <= 2 * max(most, 8 * 6)
    assert set(array.unpacked.values()) == {1}
    part = image.cut((slice(3, 11), slice(2, 19), slice(5, 9)))
    filled = np.zeros(part.shape, np.float32)
    for box in part.pieces():
        assert not filled[:, *box].any()
        filled[:, *box] = part.read(box) + 1
    np.testing.assert_array_equal(filled, image.read((slice(3, 11), slice(2, 19), slice(5, 9))) + 1)


@pytest.mark.parametrize("chunks", [(2, 4, 9), (8, 8, 3), (1, 20, 17)])
def test_pieces_of_files_with_chunks_of_different_sizes_unpack_each_once(chunks, monkeypatch):
    monkeypatch.setattr(image_module, "PIECE_VOXELS", 100)
    arrays, sources = [], []
    for one in (chunks, None):
        array, voxels = opened("zyx", one)
        geometry = geometry_of_affine(Path("scan.zarr"), voxels.shape, np.eye(4), (1, 1, 1))
        arrays.append(array)
        sources.append(Source(geometry, voxels.dtype, lambda scratch, voxels=voxels: voxels))
    image = image_of(sources)
    for box in image.pieces():
        for channel in (0, 1):
            expected = in_order(arrays[channel], "zyx")[*box]
            np.testing.assert_array_equal(image.stored(box, channel), expected)
    assert {*arrays[0].unpacked.values(), *arrays[1].unpacked.values()} == {1}
    monkeypatch.setattr(image_module, "KEPT_BYTES", 0)
    arrays[0].unpacked.clear()
    for box in image.pieces():
        image.stored(box)
    assert set(arrays[0].unpacked.values()) == {1}
