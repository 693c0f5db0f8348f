"""Voxels in a part of a file: mapped where they are, or unpacked."""

import gzip
import itertools
import os
import zlib

import numpy as np
import pytest

from unet3d.errors import VolumeError
from unet3d.images.scratch import Scratch
from unet3d.images.voxels import FileVoxels, HeldVoxels
from unet3d.memory import host

SHAPE = (5, 4, 3, 2)
DTYPES = ("|u1", "<i2", ">i2", ">f4", "<f8")
ORDERS = ("C", "F")
HEADER = b"a header of 29 bytes, not even"[:29]


def numbers(dtype):
    return np.random.default_rng(0).integers(0, 2, SHAPE).astype(dtype) * 3


def test_mapped_voxels_stay_in_their_file(tmp_path):
    path = tmp_path / "voxels"
    for dtype, order in itertools.product(DTYPES, ORDERS):
        array = numbers(dtype)
        path.write_bytes(HEADER + array.tobytes(order) + b"a tail")
        voxels = FileVoxels(path, SHAPE, array.dtype, offset=len(HEADER), order=order)
        assert voxels.is_mapped and (voxels.slope, voxels.inter) == (1, 0)
        found = voxels.read(Scratch(), "reading")
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype and not found.flags.writeable
        path.unlink()  # what is mapped stays there
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_packed_voxels_come_in_their_own_type(tmp_path, pack):
    path = tmp_path / "voxels"
    for dtype, order in itertools.product(DTYPES, ORDERS):
        array = numbers(dtype)
        path.write_bytes(b"text" + pack(HEADER + array.tobytes(order) + b"a tail"))
        voxels = FileVoxels(
            path,
            SHAPE,
            array.dtype,
            **{"offset": len(HEADER), "order": order, "slope": 2.0, "inter": -1.0},
            **{"is_packed": True, "packed_from": 4, "max_tail_bytes": 6},
        )
        assert not voxels.is_mapped and (voxels.slope, voxels.inter) == (2, -1)
        for scratch in (Scratch(), Scratch(tmp_path)):
            found = voxels.read(scratch, "reading")
            np.testing.assert_array_equal(found, array)  # not scaled
            assert found.dtype == array.dtype and found.flags[f"{order}_CONTIGUOUS"]
            assert os.listdir(tmp_path) == ["voxels"]


def test_packed_voxels_that_have_no_room_are_not_unpacked(tmp_path, monkeypatch):
    array = np.zeros((64, 64, 64), "<f8")
    (tmp_path / "voxels").write_bytes(gzip.compress(array.tobytes()))
    voxels = FileVoxels(tmp_path / "voxels", array.shape, array.dtype, is_packed=True)
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 2**20)
    with pytest.raises(VolumeError, match="^reading it takes 2 MiB of memory"):
        voxels.read(Scratch(), "reading it")
    assert not voxels.read(Scratch(tmp_path), "reading it").any()


def test_a_file_that_has_shrunk_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "voxels"
    path.write_bytes(bytes(10_000))
    voxels = FileVoxels(path, (10, 10, 10), np.dtype("<f8"), offset=2000)
    assert voxels.read(Scratch(), "reading").shape == (10, 10, 10)
    os.truncate(path, 9999)
    with pytest.raises(ValueError, match="mmap"):
        voxels.read(Scratch(), "reading")


def test_voxels_in_memory_are_not_copied():
    array = numbers("<i2")
    voxels = HeldVoxels(array)
    assert voxels.read(Scratch(), "reading") is array
    assert (voxels.shape, voxels.dtype, voxels.offset) == (SHAPE, array.dtype, 0)
    assert (voxels.slope, voxels.inter) == (1, 0)
