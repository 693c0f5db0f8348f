"""Single slices: intensities are as the header means, and damaged files end in one line."""

import numpy as np
import pytest
import SimpleITK as sitk
from hypothesis import given
from hypothesis import strategies as st

from tests.images.dicom_series import IMPLICIT, change, element, write_slice
from tests.images.samples import refusal
from tests.mutations import damaged, property_test
from unet3d.errors import VolumeError
from unet3d.images.dicom_slice import read_pixels, read_slice

PIXELS = np.random.default_rng(0).integers(-1000, 3000, (24, 36)).astype(np.int16)
JPEG_LOSSLESS, JPEG_2000 = "1.2.840.10008.1.2.4.70", "1.2.840.10008.1.2.4.90"


def by_simpleitk(path):
    """Return the pixels (columns, rows) of a slice as SimpleITK reads them."""
    return sitk.GetArrayFromImage(sitk.ReadImage(str(path), imageIO="GDCMImageIO"))[0].T


@pytest.mark.parametrize(
    ("slope", "intercept"), [(None, None), (1, 0), (2, -1024), (-1, 0), (0.25, 3.5), (1e300, 0)]
)
def test_slope_and_intercept_are_applied(tmp_path, slope, intercept):
    path = write_slice(tmp_path / "a", PIXELS, RescaleSlope=slope, RescaleIntercept=intercept)
    one = read_slice(path)
    assert one.dtype == np.int16
    with np.errstate(over="ignore"):
        found = (read_pixels(one) * one.scale[0] + one.scale[1]).astype(np.float32)
        expected = (PIXELS.T * float(slope or 1) + float(intercept or 0)).astype(np.float32)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(found, by_simpleitk(path).astype(np.float32))


@pytest.mark.parametrize("syntax", [{}, {"syntax": IMPLICIT}], ids=["explicit", "implicit"])
def test_every_type_is_read(tmp_path, syntax):
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32):
        info = np.iinfo(dtype)
        pixels = np.array([[info.min, 0, 1], [2, 3, info.max]], dtype)
        path = write_slice(tmp_path / "a", pixels, **syntax)
        one = read_slice(path)
        assert one.dtype == dtype
        np.testing.assert_array_equal(read_pixels(one), pixels.T)
        np.testing.assert_array_equal(read_pixels(one), by_simpleitk(path))


def test_bits_that_are_not_stored_do_not_count(tmp_path):
    for dtype, low, high in ((np.uint16, 0, 4096), (np.int16, -2048, 2048)):
        pixels = np.random.default_rng(0).integers(low, high, (4, 6)).astype(dtype)
        dirty = (pixels & 0x0FFF) | np.array(0x5000, dtype)
        path = write_slice(tmp_path / "a", dirty, BitsStored=12, HighBit=11)
        np.testing.assert_array_equal(read_pixels(read_slice(path)), pixels.T)
        np.testing.assert_array_equal(by_simpleitk(path), pixels.T)


def test_inverted_grey_is_read_as_it_is_stored(tmp_path):
    path = write_slice(tmp_path / "a", PIXELS, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(read_pixels(read_slice(path)), PIXELS.T)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3},
            "SamplesPerPixel must be 1, but is 3; PhotometricInterpretation must be 'MONOCHROME1' "
            "or 'MONOCHROME2', but is 'RGB'; move it out of the folder, or convert the series",
        ),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "but is 'PALETTE COLOR'"),
        ({"NumberOfFrames": 3}, "NumberOfFrames must be '1', but is '3'"),
        ({"ImagePositionPatient": None}, "ImagePositionPatient is missing"),
        ({"ImagePositionPatient": [1, 2]}, "ImagePositionPatient.2 is missing"),
        (
            {"ImagePositionPatient": [1, 2, 3, 4]},
            "ImagePositionPatient Tuple should have at most 3",
        ),
        ({"ImagePositionPatient": [1, "\x1b[2J", 3]}, "ImagePositionPatient.1 must be a valid num"),
        ({"PixelSpacing": None}, "PixelSpacing is missing"),
        ({"PixelSpacing": [0, 1]}, "PixelSpacing.0 must be greater than 0, but is '0'"),
        ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, "that is not at right angles"),
        ({"ModalityLUTSequence": b"\xfe\xff\0\xe0\0\0\0\0"}, "ModalityLUTSequence is present, but"),
        ({"RescaleSlope": 0}, "has the RescaleSlope 0"),
        ({"RescaleSlope": "nan"}, "RescaleSlope must be a finite number, but is 'nan'"),
        ({"BitsAllocated": 1}, "BitsAllocated must be 8, 16 or 32, but is 1"),
        ({"BitsStored": 12, "HighBit": 15}, "has BitsStored 12 and HighBit 15 of 16 bits"),
        ({"BitsStored": 17, "HighBit": 16}, "has BitsStored 17 and HighBit 16 of 16 bits"),
        ({"PixelData": None, "FloatPixelData": bytes(24 * 36 * 4)}, "FloatPixelData is present"),
        ({"DoubleFloatPixelData": bytes(24 * 36 * 8)}, "DoubleFloatPixelData is present"),
        ({"Rows": 4000}, "ends before the last of 36x4000 pixels"),
        ({"PixelData": bytes(100)}, "ends before the last of 36x24 pixels"),
        ({"PixelData": None}, "ends before the last of 36x24 pixels"),
        ({"Rows": None}, "Rows is missing"),
        ({"syntax": "1.2.840.10008.1.2.2"}, "(transfer syntax 1.2.840.10008.1.2.2)"),
        ({"syntax": "1.2.840.10008.1.2.4.100"}, "(transfer syntax 1.2.840.10008.1.2.4.100)"),
        ({"syntax": ""}, "(transfer syntax not named)"),
        (
            {"syntax": JPEG_2000, "PhotometricInterpretation": "MONOCHROME1"},
            "has compressed MONOCHROME1, which GDCM inverts",
        ),
    ],
)
def test_what_is_no_slice_is_refused(tmp_path, changes, reason):
    path = write_slice(tmp_path / "a", PIXELS)
    change(path, **changes)
    assert reason in refusal(path, read_slice)


@pytest.mark.parametrize("scale", [{}, {"RescaleSlope": 0.5, "RescaleIntercept": 2}])
@pytest.mark.parametrize("compressor", ["JPEG", "JPEG2000"])
def test_compressed_pixels_are_unpacked(tmp_path, compressor, scale):
    path = write_slice(tmp_path / "a", PIXELS, **compressed(tmp_path, compressor), **scale)
    one = read_slice(path)
    expected = PIXELS.T * scale.get("RescaleSlope", 1) + scale.get("RescaleIntercept", 0)
    np.testing.assert_array_equal(read_pixels(one), expected)
    content = path.read_bytes()
    path.write_bytes(content[:-300])
    assert "cannot read the header" in refusal(path, read_slice)


def compressed(tmp_path, compressor):
    """Return the attributes of a slice whose pixels SimpleITK has compressed."""
    writer = sitk.ImageFileWriter()
    writer.SetFileName(str(tmp_path / "packed.dcm"))
    writer.SetUseCompression(True)
    writer.SetCompressor(compressor)
    writer.Execute(sitk.GetImageFromArray(PIXELS[None])[:, :, 0])
    content = (tmp_path / "packed.dcm").read_bytes()
    mark = b"\xe0\x7f\x10\x00OB\0\0\xff\xff\xff\xff"
    fragments = content[content.index(mark) + len(mark) :]
    return {
        "syntax": JPEG_LOSSLESS if compressor == "JPEG" else JPEG_2000,
        "fragments": fragments,
    }


def test_nested_elements_are_passed_over(tmp_path):
    undefined = b"\xff\xff\xff\xff"
    item, item_end = b"\xfe\xff\x00\xe0", b"\xfe\xff\x0d\xe0" + bytes(4)
    end = b"\xfe\xff\xdd\xe0" + bytes(4)
    inner = b"\x08\x00\x15\x11SQ\0\0" + undefined + item + undefined
    pixels = element(0x7FE00010, "OW", b"not the pixels")
    nested = inner + pixels + item_end + end
    sequence = item + undefined + nested + item_end + item + bytes(4) + end
    path = write_slice(tmp_path / "a", PIXELS, PrivateCreator="x")
    content = path.read_bytes()
    place = content.index(b"\x29\x00\x10\x00LO")
    unknown = item + undefined + b"\x28\x00\x10\x00" + bytes(4) + item_end + end  # no types written
    for vr, value in ((b"SQ", sequence), (b"UN", unknown)):
        added = b"\x29\x00\x01\x10" + vr + bytes(2) + undefined + value
        path.write_bytes(content[:place] + added + content[place:])
        np.testing.assert_array_equal(read_pixels(read_slice(path)), PIXELS.T)
    path.write_bytes(content[:place] + (inner * 3000) + content[place:])
    assert "cannot read the header" in refusal(path, read_slice)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """Return the path of a slice that tests may overwrite, and its original bytes."""
    path = tmp_path_factory.mktemp("slice") / "a"
    write_slice(path, PIXELS[:4, :6], RescaleSlope=2, RescaleIntercept=0)
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
