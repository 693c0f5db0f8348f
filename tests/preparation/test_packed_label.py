import struct

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mutations import damaged, property_test
from unet3d.errors import CacheError
from unet3d.preparation.packed_label import CHUNK_SHAPE, PackedLabel, pack_label

SHAPE = (2 * CHUNK_SHAPE[0] + 7, CHUNK_SHAPE[1], CHUNK_SHAPE[2] + 1)


def some_label(dtype=np.uint8):
    """Objects, noise, a large class index, and chunks of one class only."""
    label = np.zeros(SHAPE, dtype)
    label[3:40, 2:20, 100:] = 2
    label[:8, :8, :8] = np.random.default_rng(0).integers(0, 5, (8, 8, 8))
    label[CHUNK_SHAPE[0] : 2 * CHUNK_SHAPE[0], :, : CHUNK_SHAPE[2]] = np.iinfo(dtype).max
    return label


def packed(folder, label):
    np.save(folder / "label.npy", pack_label(label))
    return PackedLabel(folder / "label.npy")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_every_box_is_that_of_the_label_map(tmp_path, dtype):
    label = some_label(dtype)
    stored = packed(tmp_path, label)
    assert stored.shape == SHAPE and stored.dtype == dtype
    assert (tmp_path / "label.npy").stat().st_size < label.nbytes / 20
    whole = stored[...]
    np.testing.assert_array_equal(whole, label)
    assert whole.dtype == dtype and whole.flags.writeable
    np.testing.assert_array_equal(np.asarray(stored), label)
    rng = np.random.default_rng(0)
    for _ in range(100):
        ends = [np.sort(rng.integers(0, size + 1, 2)).tolist() for size in SHAPE]
        box = tuple(slice(start, end) for start, end in ends)
        np.testing.assert_array_equal(stored[box], label[box])
    np.testing.assert_array_equal(stored[..., 5:6, :, -3:], label[..., 5:6, :, -3:])


def test_small_label_maps_and_whole_chunks(tmp_path):
    for shape in ((1, 1, 1), CHUNK_SHAPE, (200, 3, 1)):
        label = (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)
        np.testing.assert_array_equal(packed(tmp_path, label)[...], label)


def test_other_indices_are_refused(tmp_path):
    stored = packed(tmp_path, some_label())
    for key in (3, (0, 0, 0), slice(None), (slice(0, 9, 2), ...), (..., None)):
        with pytest.raises(IndexError, match="three slices"):
            stored[key]


SMALL = some_label()[:40, :8, :16]


@property_test
@given(data=st.data())
def test_damaged_bytes_end_in_an_array_or_in_one_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("packed") / "label.npy"
    content = data.draw(damaged(pack_label(SMALL).tobytes()))
    np.save(path, np.frombuffer(content, np.uint8))
    try:
        label = PackedLabel(path)
        box = label[:40, :8, :16]
    except CacheError as error:
        assert "gone or damaged" in str(error)
    else:
        assert box.size <= SMALL.size


BOMB = lz4.block.compress(bytes(2**24), store_size=False)


def test_what_was_forged_is_refused(tmp_path):
    forged = [
        ([1, 8, 8, 8, 0, len(BOMB)], BOMB),  # unpacks to more than its chunk
        ([1, 8, 8, 8, 0, 2**63], b"\1\2\3"),
        ([1, 8, 8, 8, 9, 4], bytes(16)),
        ([1, 2**62, 8, 8, 0, 1], b"\1"),
        ([1, 8, 0, 8, 0, 1], b"\1"),
        ([4, 8, 8, 8, 0, 4], b"\1\0\0\0"),
        ([1, 8], b""),
    ]
    contents = [struct.pack(f"<{len(words)}Q", *words) + chunks for words, chunks in forged]
    arrays = [np.frombuffer(content, np.uint8) for content in contents]
    for array in (*arrays, np.zeros((6, 2), np.float32), np.zeros(100)):
        np.save(tmp_path / "label.npy", array)
        with pytest.raises(CacheError, match="gone or damaged"):
            PackedLabel(tmp_path / "label.npy")[0:4, 0:4, 0:4]
