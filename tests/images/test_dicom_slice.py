"""Single slices: intensities are those that the header means, and no file ends but in one line."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images.dicom_series import change, write_slice
from tests.images.samples import refusal
from tests.mutations import damaged, property_test
from unet3d.errors import VolumeError
from unet3d.images.dicom_slice import read_pixels, read_slice

pydicom = pytest.importorskip("pydicom", reason="needs pydicom, of the extra itk")

TABLE = pydicom.Dataset()
TABLE.LUTDescriptor, TABLE.LUTData = [2, 0, 16], bytes(4)
PIXELS = np.random.default_rng(0).integers(-1000, 3000, (4, 6)).astype(np.int16)


@pytest.mark.parametrize(
    ("slope", "intercept", "dtype"),
    [
        (None, None, np.int16),
        (1, 0, np.int16),
        (2, -1024, np.int32),
        (-1, 0, np.int32),
        (0.25, 3.5, np.float32),
        (1e300, 0, np.float32),
    ],
)
def test_slope_and_intercept_are_applied(tmp_path, slope, intercept, dtype):
    path = write_slice(tmp_path / "a", PIXELS, RescaleSlope=slope, RescaleIntercept=intercept)
    one = read_slice(path)
    found = read_pixels(one)
    assert one.dtype == found.dtype == dtype
    with np.errstate(over="ignore"):
        expected = (PIXELS.T * float(slope or 1) + float(intercept or 0)).astype(np.float32)
        np.testing.assert_array_equal(found.astype(np.float32), expected)


def test_every_type_is_read(tmp_path):
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32):
        info = np.iinfo(dtype)
        pixels = np.array([[info.min, 0, 1], [2, 3, info.max]], dtype)
        one = read_slice(write_slice(tmp_path / "a", pixels))
        assert one.dtype == dtype
        np.testing.assert_array_equal(read_pixels(one), pixels.T)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3}, "is a colour image (RGB)"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "is a colour image (PALETTE COLOR)"),
        ({"NumberOfFrames": 3}, "holds 3 frames in one file; convert"),
        ({"ImagePositionPatient": None}, "its ImagePositionPatient is None"),
        ({"ImagePositionPatient": [1, 2]}, "does not say where it lies"),
        ({"PixelSpacing": None}, "its PixelSpacing is None"),
        ({"PixelSpacing": [0, 1]}, "has a PixelSpacing of 0x1 mm"),
        ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, "no pair of directions at right angles"),
        ({"ModalityLUTSequence": [TABLE]}, "ModalityLUTSequence"),
        ({"RescaleSlope": 0}, "scales its pixels by 0 and 0"),
        ({"BitsAllocated": 1}, "has pixels of 1 bits"),
        ({"Rows": 4000}, "is shorter than 6x4000 pixels"),
        ({"Rows": None}, "holds no image, or only the beginning of one (CT Image Storage)"),
    ],
)
def test_what_is_no_slice_is_refused(tmp_path, changes, reason):
    path = write_slice(tmp_path / "a", PIXELS)
    change(path, **changes)
    assert reason in refusal(path, read_slice)


def test_run_lengths_are_unpacked(tmp_path):
    path = write_slice(tmp_path / "a", PIXELS)
    packed = pydicom.dcmread(path)
    packed.compress(pydicom.uid.RLELossless)
    packed.save_as(path)
    np.testing.assert_array_equal(read_pixels(read_slice(path)), PIXELS.T)


@pytest.mark.parametrize(
    ("syntax", "name"),
    [("1.2.840.10008.1.2.4.100", "MPEG2 Main Profile"), ("1.2.840.10008.9", "1.2.840.10008.9")],
)
def test_pixels_that_nothing_decodes_are_refused(tmp_path, syntax, name):
    path = write_slice(tmp_path / "a", PIXELS)
    content = path.read_bytes()
    start = content.index(b"\x02\x00\x10\x00UI\x14\x001.2.840.10008.1.2.1\0")
    new = syntax.encode() + b"\0" * (len(syntax) % 2)
    content = content[: start + 6] + len(new).to_bytes(2, "little") + new + content[start + 28 :]
    path.write_bytes(content)
    assert f"is compressed as {name}" in refusal(path, read_slice)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe", read_slice)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """Return a slice whose bytes may be changed, and its bytes before that."""
    path = tmp_path_factory.mktemp("slice") / "a"
    write_slice(path, PIXELS, RescaleSlope=2, RescaleIntercept=0)
    return path, path.read_bytes()


@property_test
@given(data=st.data())
def test_bytes_of_a_slice_may_be_anything(content, data):
    path, sound = content
    path.write_bytes(data.draw(damaged(sound)))
    try:
        one = read_slice(path)
        assert read_pixels(one).shape == one.shape
    except VolumeError as error:
        assert "\n" not in str(error) and str(path) in str(error)
