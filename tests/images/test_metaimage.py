"""MetaImages in one file and in two, as people and programs write them, and as they are damaged."""

import zlib

import numpy as np
import pytest

from tests.images import itk_headers
from tests.images.itk_headers import ARRAY, VOXELS, meta_bytes, written
from tests.images.samples import refusal
from unet3d.images.files import members, stands_for_volume
from unet3d.images.header import read_header
from unet3d.images.nifti import read_image
from unet3d.preparation.cache import Cache


@pytest.mark.parametrize("name", ["scan.mha", "scan.mhd"])
def test_every_type_is_what_simpleitk_wrote(tmp_path, name):
    itk_headers.assert_reads_what_simpleitk_writes(tmp_path / name)


def test_other_spellings_are_the_same_volume(tmp_path):
    expected = read_image(written(tmp_path / "a.mha", meta_bytes()))
    np.testing.assert_allclose(expected.header.affine[:3, 3], (-1 - 2 * 0.7, -2 - 3 * 0.8, 3))
    for content in (
        meta_bytes(BinaryDataByteOrderMSB="True", voxels=ARRAY.astype(">i2").tobytes(order="F")),
        meta_bytes(BinaryDataByteOrderMSB=None, ElementByteOrderMSB="False"),
        meta_bytes(CompressedData="True"),
        meta_bytes(CompressedData="True", CompressedDataSize="7"),
        meta_bytes(TransformMatrix=None, Orientation="1 0 0 0 1 0 0 0 1"),
        meta_bytes(Offset=None, Position="1 2 3"),
        meta_bytes(ElementSpacing=None, ElementSize="0.7 0.8 3"),
        meta_bytes(DistanceUnits="mm"),
        meta_bytes(ElementSpacing="0.07 0.08 0.3", Offset="0.1 0.2 0.3", DistanceUnits="cm"),
        meta_bytes().replace(b"\n", b"\r\n", 11),
    ):
        volume = read_image(written(tmp_path / "SCAN.MHA", content))
        np.testing.assert_array_equal(volume.array, expected.array)
        np.testing.assert_allclose(volume.header.affine, expected.header.affine, rtol=1e-12)


def test_header_and_voxels_are_one_volume(tmp_path):
    path = written(tmp_path / "a.mhd", meta_bytes(b"", ElementDataFile="its voxels.raw"))
    assert members(path) == (path,)
    assert "lacks its voxels its voxels.raw; a volume needs both" in refusal(path)
    voxels = written(tmp_path / "its voxels.raw", VOXELS)
    assert members(path) == (path, voxels) and stands_for_volume(path)
    assert not stands_for_volume(voxels)
    expected = read_image(written(tmp_path / "b.mha", meta_bytes()))
    np.testing.assert_array_equal(read_image(path).array, expected.array)
    store = Cache(tmp_path / "cache")
    before = store.digest(path)
    written(voxels, VOXELS[::-1])
    assert store.digest(path) != before


def test_an_orientation_that_is_not_stated_is_warned_about(tmp_path, caplog):
    path = written(tmp_path / "a.mha", meta_bytes(TransformMatrix=None))
    assert read_header(path).spacing_mm == (0.7, 0.8, 3)
    assert "a.mha does not state its orientation" in caplog.text


def test_what_is_no_volume_is_refused(tmp_path):
    packed = bytearray(zlib.compress(VOXELS))
    packed[len(packed) // 2] ^= 0xFF  # ITK reads such a file without an error
    refused = [
        (b"", "is empty (0 bytes)"),
        (b"\x00\x01no header\n", "is no line of a MetaImage header"),
        (b"NDims = 3\n", "its header does not end"),
        (meta_bytes(NDims="99999999999"), "has '99999999999' axes"),  # ends the process in ITK
        (meta_bytes(BinaryData="False"), "has its voxels as text"),
        (meta_bytes(HeaderSize="-1"), "skips -1 bytes before its voxels"),
        (meta_bytes(ElementNumberOfChannels="3"), "has 3 numbers in each voxel"),
        (meta_bytes(ElementType="MET_UCHAR_ARRAY"), "of the type 'MET_UCHAR_ARRAY'"),
        (meta_bytes(ElementToIntensityFunctionSlope="2"), "scales its voxels by 2 and 0"),
        (meta_bytes(ElementSpacing=None), "its ElementSpacing is ''"),
        (meta_bytes(ElementSpacing="1 nan 1"), "its ElementSpacing is '1 nan 1'"),
        (meta_bytes(ElementSpacing="1 -1 1"), "its ElementSpacing is '1 -1 1'"),
        (meta_bytes(TransformMatrix="1 0 0 1 0 0 0 0 1"), "an affine that no scan has"),
        (meta_bytes(DistanceUnits="inch"), "has the units of length 'inch'"),
        (meta_bytes(ElementDataFile="../other.raw"), 'names "../other.raw" as the file of'),
        (meta_bytes(ElementDataFile="LIST"), "only one file in the same folder"),
        (meta_bytes(ElementDataFile="slice%03d.raw 1 5 1"), "only one file in the same folder"),
        (meta_bytes(VOXELS[:-1]), "it is damaged or incomplete"),
        (meta_bytes(VOXELS + bytes(2**21)), "goes on for more than"),
        (meta_bytes(zlib.compress(VOXELS)[:-1], CompressedData="True"), "before their checksum"),
        (meta_bytes(zlib.compress(VOXELS + b"x"), CompressedData="True"), "unpacks to more than"),
        (meta_bytes(bytes(packed), CompressedData="True"), "cannot read"),
    ]
    for content, reason in refused:
        assert reason in refusal(written(tmp_path / "a.mha", content))
