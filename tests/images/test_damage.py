import contextlib
import gzip
import io
import itertools
import os
import re
import resource
import socket
import struct

import nibabel as nib
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.images.samples import READERS, read_image, read_or_refuse, refusal
from tests.mutations import property_test
from unet3d.errors import VolumeError
from unet3d.images.image import open_image
from unet3d.images.labels import read_label
from unet3d.memory import host

FORMATS = {
    "one.nii": nib.Nifti1Image,
    "two.nii": nib.Nifti2Image,
    "one.nii.gz": nib.Nifti1Image,
    "two.nii.gz": nib.Nifti2Image,
    "one.hdr": nib.Nifti1Pair,
    "two.hdr": nib.Nifti2Pair,
    "scan.mgh": nib.MGHImage,
    "scan.mgz": nib.MGHImage,
}
NUMBERS = [0, 1, 2, 3, -1, 7, 255, 32767, -32768, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
FLOATS = [*NUMBERS, 0.5, -0.0, np.nan, np.inf, -np.inf, 1e30, 1e-30, 1e300, 1e-300, 3e38, 1e-45]


def content_of(name, byte_order="<"):
    """Return the header of a small valid volume, and the bytes that follow it, uncompressed."""
    array = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    affine = np.array([[0.8, 0.1, 0, 5], [-0.1, 0.8, 0, 6], [0, 0, 3, 7], [0, 0, 0, 1]])
    kind = FORMATS[name]
    image, size = kind(array, affine), 284
    if kind is not nib.MGHImage:
        image = kind(array, affine, kind.header_class(endianness=byte_order))
        image.set_data_dtype(np.int16)
        image.set_qform(affine, 1)
        size = image.header.sizeof_hdr
    files = {name: nib.FileHolder(fileobj=io.BytesIO()) for name in ("header", "image")}
    image.to_file_map(files)
    header, voxels = (file.fileobj.getvalue() for file in files.values())
    return (header[:size], voxels) if header else (voxels[:size], voxels[size:])


def write(folder, name, header, rest):
    path = folder / name
    if name.endswith(".hdr"):
        path.write_bytes(header + bytes(4))
        path.with_suffix(".img").write_bytes(rest)
    elif name.endswith(("gz", "mgz")):
        path.write_bytes(gzip.compress(header + rest, compresslevel=1, mtime=0))
    else:
        path.write_bytes(header + rest)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("volumes")


def test_what_is_mutated_below_can_be_read(tmp_path):
    for name, byte_order in itertools.product(FORMATS, "<>"):
        path = write(tmp_path, name, *content_of(name, byte_order))
        assert sorted(open_image(path).whole().ravel()) == list(range(60))
        read_or_refuse(path)


def fields(dtypes, numbers):
    """Return strategies for bytes to write into fields of a header, in both byte orders."""
    with np.errstate(all="ignore"):
        values = [np.array(number).astype(dtype) for dtype in dtypes for number in numbers]
    return [raw for value in values for raw in (value.tobytes(), value.byteswap().tobytes())]


FIELDS = [*fields(("i2", "i4", "i8"), NUMBERS), *fields(("f4", "f8"), FLOATS)]
HEADERS = (nib.Nifti1Header.template_dtype, nib.Nifti2Header.template_dtype)
PLACES = sorted({offset for header in HEADERS for _, offset in header.fields.values()})
CHANGES = st.one_of(
    st.tuples(st.integers(0, 359), st.binary(min_size=1, max_size=1)),
    st.tuples(st.sampled_from(PLACES), st.sampled_from(FIELDS)),
)


@property_test
@given(
    name=st.sampled_from(list(FORMATS)),
    byte_order=st.sampled_from("<>"),
    changes=st.lists(CHANGES, min_size=1, max_size=6),
    end=st.one_of(st.none(), st.integers(0, 900)),
)
@example(name="scan.mgh", byte_order="<", changes=[(4, b"\4")], end=None)  # 2^31 bytes and more
@example(name="two.hdr", byte_order="<", changes=[(16, b"\xff" * 8)], end=None)
def test_bytes_and_fields_of_a_header_may_be_anything(folder, name, byte_order, changes, end):
    header, rest = content_of(name, byte_order)
    content = bytearray(header + rest)
    for place, raw in changes:
        content[place : place + len(raw)] = raw
    size = len(header)
    read_or_refuse(write(folder, name, bytes(content[:size]), bytes(content[size:end])))


def test_pipes_sockets_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.nii.gz")
    for link, target in {"zero": "/dev/zero", "link": "pipe.nii.gz", "loop": "loop.nii"}.items():
        (tmp_path / f"{link}.nii").symlink_to(target)
    pair = write(tmp_path, "one.hdr", *content_of("one.hdr"))
    pair.with_suffix(".img").unlink()
    os.mkfifo(pair.with_suffix(".img"))
    with socket.socket(socket.AF_UNIX) as server:
        with contextlib.chdir(tmp_path):  # the path of a socket may have 107 bytes
            server.bind("socket.nii")
        for read in READERS:
            assert "it is not a regular file" in refusal(tmp_path / "pipe.nii.gz", read)
            assert "it is not a regular file" in refusal(tmp_path / "link.nii", read)
            assert "it is not a regular file" in refusal(tmp_path / "zero.nii", read)
            assert "cannot read" in refusal(tmp_path / "socket.nii", read)
            assert "Too many levels of symbolic links" in refusal(tmp_path / "loop.nii", read)
            with pytest.raises(VolumeError, match="lacks its partner|not a regular file"):
                read(pair)


@pytest.mark.parametrize("name", ["one.nii.gz", "scan.mgz"])
def test_a_compressed_file_may_be_damaged_anywhere(tmp_path, name):
    """Also in the part that is decompressed to read the header alone."""
    header, rest = content_of(name)
    content = gzip.compress(header + rest, mtime=0)
    path = tmp_path / name
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        for damaged in (flipped, content[:place]):
            path.write_bytes(damaged)
            read_or_refuse(path)


def test_a_short_tail_is_no_fault_and_its_checksum_counts(tmp_path):
    header, rest = content_of("one.nii.gz")
    path = tmp_path / "tail.nii.gz"
    content = gzip.compress(header + rest, mtime=0) + gzip.compress(b"note" * 100, mtime=0)
    path.write_bytes(content)
    assert open_image(path).whole().max() == 59
    path.write_bytes(content[:-8] + b"1234" + content[-4:])
    assert "CRC check failed" in (words := refusal(path)) and words.endswith("copy it again")
    with path.open("wb") as raw, gzip.GzipFile("a name.nii", "wb", fileobj=raw) as file:
        file.write(header + rest)
    assert open_image(path).whole().max() == 59


def changed(place, raw):
    """Return a header with other bytes at a place, and the bytes that follow it."""
    header, rest = content_of("one.nii")
    return header[:place] + raw + header[place + len(raw) :], rest


def test_a_plain_file_may_not_go_on_either(tmp_path):
    path = write(tmp_path, "one.nii", *content_of("one.nii"))
    os.truncate(path, 2**33)  # a sparse file, which takes no space
    assert "after the voxels that its header describes" in refusal(path, open_image)


def test_a_false_offset_in_a_packed_file_takes_no_memory(tmp_path):
    header, rest = changed(108, struct.pack("<f", 1e9))
    zeros = gzip.compress(bytes(2**20), mtime=0) * 2**11  # MiB by MiB, which is quick
    path = tmp_path / "far.nii.gz"
    path.write_bytes(gzip.compress(header + rest, mtime=0) + zeros)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "after the voxels that its header describes" in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**18


def test_sizes_of_extensions_may_lie(tmp_path):
    """An extension claims 2 GB, in a file that decompresses to enough zeros to hold it."""
    for name in ("one.nii.gz", "two.nii.gz", "one.hdr", "one.nii"):
        header, rest = content_of(name)
        extension = b"\1\0\0\0" + struct.pack("<ii", 2**31 - 16, 6)
        path = write(tmp_path, name, header, extension + rest[12:])
        if name.endswith(".hdr"):
            path.write_bytes(header + extension)
            path.with_suffix(".img").write_bytes(rest)
        assert open_image(path).geometry.shape in ((4, 3, 5), (3, 4, 5))


def test_the_scaling_of_a_header_counts_if_it_is_one(tmp_path):
    for scaling in ((np.inf, 0), (1, -np.inf)):
        path = write(tmp_path, "one.nii", *changed(112, struct.pack("<ff", *scaling)))
        assert "scales its voxels by infinity" in refusal(path)
    no_scaling = np.arange(60)
    for slope, inter, expected in (
        (0.0, np.nan, no_scaling),
        (np.nan, np.nan, no_scaling),
        (0.5, -7, np.arange(60) * 0.5 - 7),
        (1, 3, np.arange(60) + 3),
    ):
        path = write(tmp_path, "one.nii", *changed(112, struct.pack("<ff", slope, inter)))
        np.testing.assert_array_equal(np.sort(open_image(path).whole().ravel()), expected)


def test_types_that_are_no_numbers_are_named(tmp_path):
    words = {128: "colour", 2304: "colour", 32: "complex", 1792: "complex", 1536: "unknown"}
    for code, word in words.items():
        header, rest = changed(70, struct.pack("<h", code))
        path = write(tmp_path, "one.nii", header, rest + bytes(10_000))
        assert f"holds {word} voxels" in refusal(path, open_image) or code == 1536


def test_what_the_memory_cannot_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    header, _ = content_of("two.nii")
    record = np.frombuffer(header, nib.Nifti2Header.template_dtype).copy()
    record["dim"][0][:4] = 3, 40_000, 40_000, 1_000
    path = write(tmp_path, "two.nii", record.tobytes(), b"")
    os.truncate(path, 544 + 2 * 1_600_000_000_000)  # a sparse file, which takes no space
    monkeypatch.setattr(host, "available_bytes", lambda: 2**34)
    for read in (read_image, read_label):
        message = refusal(path, read)
        assert re.search("reading 40000x40000x1000(x1)? voxels takes", message)
        assert "TiB of memory, but this machine has 16 GiB available" in message
