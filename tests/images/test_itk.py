"""NRRD files and MetaImages as programs write them, and damaged ones.

The references are arrays and affines that SimpleITK, or a header written here, puts into a file.
"""

import gzip
import subprocess
import sys
import zlib
from functools import partial

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from hypothesis import given
from hypothesis import strategies as st

from tests.images.itk_headers import ARRAY, META, NRRD, VOXELS, meta_bytes, nrrd_bytes, written
from tests.images.samples import read_or_refuse, refusal
from tests.mutations import property_test
from unet3d.images.files import members, stands_for_volume
from unet3d.images.geometry import shear_warning
from unet3d.images.image import open_image
from unet3d.images.labels import read_label
from unet3d.preparation.cache import Cache

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", ["scan.nrrd", "scan.mha", "scan.mhd"])
def test_every_type_is_what_simpleitk_wrote(tmp_path, name):
    found = nib.apply_orientation(ARRAY, [[0, -1], [1, -1], [2, 1]])
    for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"):
        image = sitk.GetImageFromArray(np.ascontiguousarray(ARRAY.T).astype(dtype))
        for is_packed in (False, True):
            sitk.WriteImage(image, str(tmp_path / name), useCompression=is_packed)
            image_read, label_read = open_image(tmp_path / name), read_label(tmp_path / name)
            np.testing.assert_array_equal(image_read.whole()[0], found, err_msg=dtype)
            np.testing.assert_array_equal(label_read.array, found, err_msg=dtype)


def test_every_space_of_nrrd_is_turned_to_ras(tmp_path):
    for space, signs in (
        ("left-posterior-superior", (-1, -1, 1)),
        ("LPS", (-1, -1, 1)),
        ("right-anterior-superior", (1, 1, 1)),
        ("RAS", (1, 1, 1)),
        ("left-anterior-superior", (-1, 1, 1)),
    ):
        path = written(tmp_path / "scan.nrrd", nrrd_bytes(space=space))
        affine = np.diag([*np.multiply((0.7, 0.8, 3), signs), 1])
        affine[:3, 3] = np.multiply((1, 2, 3), signs)
        expected = nib.as_closest_canonical(nib.Nifti1Image(ARRAY, affine))
        volume = open_image(path)
        np.testing.assert_allclose(volume.geometry.affine, expected.affine, atol=1e-6)
        np.testing.assert_array_equal(volume.whole()[0], expected.get_fdata())


def test_other_spellings_of_nrrd_are_the_same_volume(tmp_path):
    expected = open_image(written(tmp_path / "a.nrrd", nrrd_bytes()))
    parts = gzip.compress(VOXELS[:50]) + gzip.compress(VOXELS[50:])
    for content in (
        nrrd_bytes(endian="big", voxels=ARRAY.astype(">i2").tobytes(order="F")),
        nrrd_bytes(type="signed short int", kinds="domain space ???"),
        nrrd_bytes(encoding="gz", voxels=gzip.compress(VOXELS)),
        nrrd_bytes(encoding="gzip", voxels=parts),
        nrrd_bytes().replace(b"\n", b"\r\n", 12),
        nrrd_bytes(content="a: b\ntype:=float", voxels=VOXELS + b"and a tail"),
    ):
        volume = open_image(written(tmp_path / "SCAN.NRRD", content))
        np.testing.assert_array_equal(volume.whole(), expected.whole())
        np.testing.assert_array_equal(volume.geometry.affine, expected.geometry.affine)


def test_other_spellings_of_metaimage_are_the_same_volume(tmp_path):
    expected = open_image(written(tmp_path / "a.mha", meta_bytes()))
    np.testing.assert_allclose(expected.geometry.affine[:3, 3], (-1 - 2 * 0.7, -2 - 3 * 0.8, 3))
    for content in (
        meta_bytes(BinaryDataByteOrderMSB="True", voxels=ARRAY.astype(">i2").tobytes(order="F")),
        meta_bytes(BinaryDataByteOrderMSB=None, ElementByteOrderMSB="False"),
        meta_bytes(CompressedData="True"),
        meta_bytes(CompressedData="True", CompressedDataSize="7"),
        meta_bytes(TransformMatrix=None, Orientation="1 0 0 0 1 0 0 0 1"),
        meta_bytes(Offset=None, Position="1 2 3"),
        meta_bytes(ElementSpacing=None, ElementSize="0.7 0.8 3"),
        meta_bytes(DistanceUnits="mm"),
        meta_bytes(Type="CT", Space="RAS", Units="um", Kinds="vector", Encoding="gzip", Sizes="1"),
        meta_bytes(ElementSpacing="0.07 0.08 0.3", Offset="0.1 0.2 0.3", DistanceUnits="cm"),
        meta_bytes().replace(b"\n", b"\r\n", 11),
    ):
        volume = open_image(written(tmp_path / "SCAN.MHA", content))
        np.testing.assert_array_equal(volume.whole(), expected.whole())
        np.testing.assert_allclose(volume.geometry.affine, expected.geometry.affine, rtol=1e-12)


def test_header_and_voxels_of_a_metaimage_are_one_volume(tmp_path):
    path = written(tmp_path / "a.mhd", meta_bytes(b"", ElementDataFile="its voxels.raw"))
    assert members(path) == (path,)
    assert "lacks the file of its voxels, its voxels.raw; a volume" in refusal(path)
    voxels = written(tmp_path / "its voxels.raw", VOXELS)
    assert members(path) == (path, voxels) and stands_for_volume(path)
    assert not stands_for_volume(voxels)
    expected = open_image(written(tmp_path / "b.mha", meta_bytes()))
    np.testing.assert_array_equal(open_image(path).whole(), expected.whole())
    store = Cache(tmp_path / "cache")
    before = store.digest(path)
    written(voxels, VOXELS[::-1])
    assert store.digest(path) != before


def test_units_of_length_count(tmp_path):
    path = written(tmp_path / "a.nrrd", nrrd_bytes(space_units='"um" "um" "um"'))
    assert open_image(path).geometry.spacing_mm == (0.0007, 0.0008, 0.003)
    np.testing.assert_allclose(open_image(path).geometry.affine[2, 3], 0.003)


def test_an_orientation_that_is_not_stated_is_warned_about(tmp_path, caplog):
    plain = {"space_directions": None, "spacings": "0.7 0.8 3"}
    for name, content in (
        ("a.nrrd", nrrd_bytes(space=None, space_origin=None, **plain)),
        ("b.nrrd", nrrd_bytes(**plain)),
        ("c.nrrd", nrrd_bytes(space=None)),
        ("d.mha", meta_bytes(TransformMatrix=None)),
    ):
        assert open_image(written(tmp_path / name, content)).geometry.spacing_mm == (0.7, 0.8, 3)
        assert f"{name} does not state its orientation" in caplog.text


def test_sheared_axes_are_those_of_a_nifti_file(tmp_path):
    directions = "(0.7,0,0) (0,0.8,0.3) (0,0,3)"
    path = written(tmp_path / "a.nrrd", nrrd_bytes(space_directions=directions))
    header = open_image(path).geometry
    assert "deviate from a right angle by 20.6 degrees" in (shear_warning(header) or "")
    np.testing.assert_allclose(header.affine[:3, 1], (0, 0.8, -0.3), atol=1e-12)


def test_what_is_no_nrrd_volume_is_refused(tmp_path):
    def packed(content, **changes):
        return nrrd_bytes(encoding="gzip", voxels=content, **changes)

    gz = gzip.compress(VOXELS)
    flipped = gz[:-6] + bytes([gz[-6] ^ 1]) + gz[-5:]
    for content, reason in (
        (b"", "is empty (0 bytes)"),
        (b"NRRD0004\ntype: short\n", "does not begin with a whole header of NRRD"),
        (b"NRRD0004\n" + b" " * 2**20, "does not begin with a whole header of NRRD"),
        (b"NRRD0004\n" + b" " * 2**19 + b"\n\n", "dimension is missing"),
        (b"no header\n\n", "does not begin with a whole header of NRRD"),
        (nrrd_bytes(data_file="/etc/passwd"), "datafile must be '' or '0', but is '/etc/passwd'"),
        (
            nrrd_bytes(encoding="bzip2"),
            "encoding must be 'raw', 'gzip' or 'gz', but is 'bzip2'; save it",
        ),
        (
            nrrd_bytes(space="scanner-xyz"),
            "space 'scanner-xyz' is not one of left-posterior-superior",
        ),
        (
            nrrd_bytes(space_units='"mm" "mm" "um"'),
            "is not one unit of length, such as mm, for all axes",
        ),
        (nrrd_bytes(dimension="4", sizes="3 4 5 2"), "dimension must be '3', but is '4'"),
        (nrrd_bytes(kinds="RGB-color domain domain"), "kinds 'rgb-color domain"),
        (nrrd_bytes(sizes="3 4 0"), "sizes.2 must be greater than 0, but is '0'"),
        (nrrd_bytes(sizes="300 400 500"), "claims the shape 300x400x500"),
        (packed(gz, sizes="3000 4000 5000"), "claims the shape 3000x4000x5000"),
        (nrrd_bytes(type="block"), "type 'block' is not one of"),
        (nrrd_bytes(type="x" * 10_000), "xxx...xxx"),
        (nrrd_bytes(endian=None), "endian is missing"),
        (nrrd_bytes(space_directions="(nan,0,0) (0,1,0) (0,0,1)"), "spacedirections.0 must be"),
        (
            nrrd_bytes(space_directions="(1,0,0) none (0,0,1)"),
            "spacedirections.3 must be a valid number",
        ),
        (nrrd_bytes(space_directions="(1,1,0) (1,1,0) (0,0,1)"), "an impossible affine"),
        (nrrd_bytes(space_origin="(99999999999,0,0)"), "an impossible affine"),
        (nrrd_bytes(space_directions=None, spacings=None), "the spacing is missing"),
        (nrrd_bytes(voxels=VOXELS[:-1]), "it is damaged or incomplete"),
        (packed(gz[:-1]), "Compressed file ended before"),
        (packed(gzip.compress(VOXELS + bytes(2**21))), "has more than"),
        (packed(VOXELS), "cannot read"),
        (packed(flipped), "CRC check failed"),
    ):
        assert reason in refusal(written(tmp_path / "a.nrrd", content))
    halves = nrrd_bytes(type="float", voxels=(ARRAY / 2).astype("f4").tobytes(order="F"))
    path = written(tmp_path / "a.nrrd", halves)
    assert "30 voxels that are not integer labels" in refusal(path, read_label)


def test_what_is_no_metaimage_is_refused(tmp_path):
    packed = bytearray(zlib.compress(VOXELS))
    packed[len(packed) // 2] ^= 0xFF  # ITK reads such a file without an error
    for content, reason in (
        (b"", "is empty (0 bytes)"),
        (b"\x00\x01no header\n", "does not begin with a whole header of MetaImage"),
        (b"NDims = 3\nElementDataFile = LOCAL", "does not begin with a whole header of MetaImage"),
        (meta_bytes(NDims="99999999999"), "ndims must be '3', but is"),  # ITK would end the process
        (meta_bytes(BinaryData="False"), "binarydata must be 'true', 't' or '1', but is 'false'"),
        (
            meta_bytes(ElementNumberOfChannels="3"),
            "elementnumberofchannels must be '1', but is '3'",
        ),
        (meta_bytes(ElementType="MET_UCHAR_ARRAY"), "elementtype 'met_uchar_array' is not one of"),
        (
            meta_bytes(ElementToIntensityFunctionSlope="2"),
            "elementtointensityfunctionslope must be",
        ),
        (meta_bytes(DimSize="3 4 -5"), "dimsize.2 must be greater than 0, but is '-5'"),
        (meta_bytes(ElementSpacing=None), "the spacing is missing"),
        (meta_bytes(ElementSpacing="1 nan 1"), "elementspacing.1 must be"),
        (
            meta_bytes(ElementSpacing="1 -1 1"),
            "elementspacing.1 must be greater than 0, but is '-1'",
        ),
        (meta_bytes(ElementSpacing="0,7 0,7 3"), "elementspacing Tuple should have at most 3"),
        (meta_bytes(DistanceUnits="furlong"), "distanceunits 'furlong' is not one unit"),
        (meta_bytes(ElementDataFile="../other.raw"), 'names "../other.raw" as the file of'),
        (meta_bytes(ElementDataFile="LIST"), "only one file in the same folder"),
        (meta_bytes(ElementDataFile="slice%03d.raw 1 5 1"), "only one file in the same folder"),
        (meta_bytes(ElementDataFile="v\x1b" * 300), "lacks the file of its voxels, v\\x1bv"),
        (meta_bytes(VOXELS[:-1]), "it is damaged or incomplete"),
        (
            meta_bytes(zlib.compress(VOXELS)[:-1], CompressedData="True"),
            "ended before its checksum",
        ),
        (meta_bytes(zlib.compress(VOXELS + bytes(2**21)), CompressedData="True"), "has more than"),
        (meta_bytes(bytes(packed), CompressedData="True"), "cannot read"),
    ):
        assert reason in refusal(written(tmp_path / "a.mha", content))


def test_simpleitk_is_imported_only_for_files_that_need_it():
    code = "import sys, unet3d.images.image, unet3d.cli.app; print('SimpleITK' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


TEXTS = st.one_of(
    st.none(),
    st.sampled_from(
        [
            *("", "0", "1", "-1", "3", "4", "99999999999", "1e300", "nan", "inf", "none", "True"),
            *("0 0 0", "1 1 1", "1e300 1 1", "1 0 0 0 1 0 0 0 1", "(1e-300,0,0) (0,1,0) (0,0,1)"),
            *("3 4 5", "5 4 3", "99999999999 1 1", "60 1 1", "gzip", "raw", "big", "um", "RAS"),
            *("float", "uchar", "MET_UCHAR", "MET_DOUBLE", "LOCAL", "/dev/zero", "a.nrrd", "."),
            *("domain domain domain", "vector domain domain", "1_0 1 1", "۳ 4 5", "1,2,3"),
        ]
    ),
    st.text(max_size=8),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("headers")


META_NAMES = [*META, "ElementDataFile", "HeaderSize", "DistanceUnits"]
NRRD_NAMES = [*NRRD, "space units", "data file", "kinds", "spacings"]


@partial(property_test, share=1.4)
@given(
    name=st.sampled_from(["a.nrrd", "a.mha", "a.mhd"]),
    voxels=st.sampled_from([None, VOXELS, VOXELS[:50], b""]),
    changes=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=6),
    end=st.one_of(st.none(), st.integers(0, 500)),
    data=st.data(),
)
def test_fields_and_bytes_may_be_anything(folder, capfd, name, voxels, changes, end, data):
    bytes_of, names = (nrrd_bytes, NRRD_NAMES) if name == "a.nrrd" else (meta_bytes, META_NAMES)
    fields = data.draw(st.dictionaries(st.sampled_from(names), TEXTS))
    fields = {field.replace(" ", "_"): text for field, text in fields.items()}
    content = bytearray(bytes_of(voxels, **fields))
    for place, value in changes:
        content[place % len(content)] = value
    read_or_refuse(written(folder / name, content[:end]))
    assert capfd.readouterr().err == ""  # MetaIO would print there
