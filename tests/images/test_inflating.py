"""What Python's own gzip and zlib have packed, and what is left of it when a file is damaged."""

import gzip
import random
import zlib
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from tests.mutations import property_test
from tests.products import pairwise
from unet3d.errors import VolumeError
from unet3d.images import inflating
from unet3d.images.inflating import unpack

DAMAGED = (EOFError, VolumeError, isal_zlib.error)


def content(size, seed=0):
    """Return bytes of which some can be packed well and others cannot be packed at all."""
    choices = random.Random(seed)
    return b"".join(
        choices.randbytes(50) if choices.random() < 0.5 else bytes([choices.randrange(256)]) * 50
        for _ in range(size // 50 + 1)
    )[:size]


PACKERS = pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])


def unpacked(packed, size, path, **more):
    """Return what a file of these bytes unpacks to."""
    path.write_bytes(packed)
    target = bytearray(size)
    unpack(path, memoryview(target), **more)
    return bytes(target)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("packed") / "packed"


@pytest.mark.parametrize("level", [0, 1, 9])
@PACKERS
def test_gzip_and_zlib_of_every_level(pack, level, path):
    wanted = content(2**21 + 77)  # more than a piece
    assert unpacked(pack(wanted, level), len(wanted), path) == wanted
    zeros = bytes(2**21 + 3)  # of which a thousand are packed into one byte
    assert unpacked(pack(zeros, level), len(zeros), path) == zeros


@partial(property_test, share=0.5)
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=5),
    piece=st.integers(1, 400),
    num_zeros=st.integers(0, 900),
    tail=st.sampled_from([b"", b"\0", b"\x1f", b"junk" * 300, b"\0\0\x1e\x8b"]),
)
def test_several_parts_however_they_are_read(path, sizes, piece, num_zeros, tail):
    """A part may begin anywhere in what is read at a time, also in the middle of its mark."""
    parts = [content(size, seed) for seed, size in enumerate(sizes)]
    packed = bytes(num_zeros).join(gzip.compress(part) for part in parts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inflating, "PIECE_BYTES", piece)
        found = unpacked(packed + bytes(num_zeros) + tail, sum(sizes), path)
    assert found == b"".join(parts)


@pairwise(piece=[1, 7, 1000, 2**20], skip=[0, 1, 352, 2999], tail=[0, 1, 40])
def test_what_lies_around_the_voxels_is_left_out(piece, skip, tail, path, monkeypatch):
    monkeypatch.setattr(inflating, "PIECE_BYTES", piece)
    whole = content(skip + 2000 + tail)
    packed = b"a header" + zlib.compress(whole)
    found = unpacked(packed, 2000, path, start=8, skip=skip, max_tail_bytes=40)
    assert found == whole[skip : skip + 2000]
    # More than may follow is refused.
    for size, limit in ((2001, 0), (2041, 40), (6000, 40)):
        with pytest.raises(VolumeError, match="unpacks to more than the 2000 bytes"):
            unpacked(gzip.compress(bytes(size)), 2000, path, max_tail_bytes=limit)


def test_it_says_how_far_it_is(path):
    """And unpacks no more than is refused: a gigabyte in a megabyte takes little time."""
    told = []
    path.write_bytes(gzip.compress(bytes(2**26)) * 16)
    with pytest.raises(VolumeError):
        unpack(path, memoryview(bytearray(1000)), unpacked=told.append)
    assert told == [1000]
    told.clear()
    wanted = content(3 * 2**20)
    path.write_bytes(gzip.compress(wanted))
    target = bytearray(len(wanted) - 500)
    unpack(path, memoryview(target), skip=500, unpacked=told.append)
    assert told == sorted(told) and len(told) > 2 and told[-1] == len(target)


@PACKERS
def test_a_file_that_was_cut_off_anywhere_is_refused(pack, path):
    wanted = content(400)
    packed = pack(wanted)
    for length in range(len(packed)):
        with pytest.raises(EOFError, match="compressed voxels end "):
            unpacked(packed[:length], len(wanted), path)
    assert unpacked(packed, len(wanted), path) == wanted
    second = gzip.compress(content(200, seed=1))
    for length in range(len(second) if pack is gzip.compress else 0):
        with pytest.raises(EOFError):
            unpacked(packed + second[:length], 600, path)


def test_what_was_never_packed_is_refused(path):
    for packed in (b"", b"\x1f", b"\x1f\x8b", b"no gzip at all" * 9):
        with pytest.raises(DAMAGED):
            unpacked(packed, 100, path)


@PACKERS
def test_no_bit_of_the_voxels_is_flipped_unseen(pack, path):
    """No bit of the checksum after the voxels, either."""
    wanted = content(600)
    packed = pack(wanted)
    checksum = len(packed) - (8 if pack is gzip.compress else 4)
    for place in range(10, len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 1 << place % 8
        try:
            found = unpacked(bytes(damaged), len(wanted), path)
        except DAMAGED:
            continue
        assert place < checksum and found == wanted, place
