"""Names of labels in the header: readable by TotalSegmentator and nibabel, damaged, or hostile."""

import gzip
import struct
import tracemalloc
from xml.etree import ElementTree

import nibabel as nib
import numpy as np
import pytest

from tests.images.samples import write_volume
from unet3d.images.image import open_image
from unet3d.images.label_names import read_label_names
from unet3d.images.labels import read_label, write_label

NAMES = {1: "left kidney", 7: "Gefäß <& more>"}


@pytest.fixture
def geometry(tmp_path):
    return open_image([write_volume(tmp_path / "scan.nii.gz", np.ones((4, 5, 6)))]).geometry


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_names_come_back_and_the_voxels_are_where_they_were(name, geometry, tmp_path):
    path, labels = tmp_path / name, np.arange(120).reshape(4, 5, 6) % 8
    write_label(path, labels, geometry, names=NAMES)
    assert read_label_names(path) == NAMES
    np.testing.assert_array_equal(read_label(path).array, labels)
    image = nib.load(path)
    np.testing.assert_array_equal(np.asarray(image.dataobj), labels)
    # TotalSegmentator's reader looks for the first extension, and in it for this path.
    (extension,) = image.header.extensions
    assert extension.get_code() == 0
    root = ElementTree.fromstring(extension.get_content().rstrip(b"\0"))
    found = root.findall("VolumeInformation/LabelTable/Label")
    assert root.tag == "CaretExtension"
    assert {int(one.attrib["Key"]): one.text for one in found} == NAMES
    assert all(0 <= float(one.attrib[colour]) <= 1 for one in found for colour in ("Red", "Alpha"))


def test_a_file_without_names_or_with_damaged_ones_has_none(geometry, tmp_path):
    path = tmp_path / "a.nii"
    assert read_label_names(path) == {}
    write_label(path, np.ones(geometry.shape, np.uint8), geometry)
    assert read_label_names(path) == {}
    write_label(path, np.ones(geometry.shape, np.uint8), geometry, names=NAMES)
    content = path.read_bytes()
    for old, new in (
        (b'Key="7"', b'Key="x"'),
        (b"</LabelTable>", b"</LabelTabel>"),
        (b"&lt;", b"&l;;"),
    ):
        path.write_bytes(content.replace(old, new))
        assert read_label_names(path) == {}
    path.write_bytes(b"\x1f\x8b\x08damaged")
    assert read_label_names(path) == {}


def test_only_the_beginning_of_a_packed_file_is_unpacked(tmp_path):
    """A small file may claim that gigabytes of names follow."""
    header, num_bytes = nib.Nifti1Header(), 2**26
    header.set_data_shape((1, 1, 1))
    header.structarr["magic"], header.structarr["vox_offset"] = b"n+1", 352 + num_bytes
    extension = struct.pack("<4bii", 1, 0, 0, 0, num_bytes, 0) + bytes(num_bytes)
    path = tmp_path / "packed.nii.gz"
    path.write_bytes(gzip.compress(header.binaryblock + extension, 1))
    tracemalloc.start()
    assert read_label_names(path) == {}
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
