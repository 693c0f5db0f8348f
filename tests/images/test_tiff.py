"""TIFF stacks as tifffile, ImageJ and libtiff lay them out, and damaged ones.

The references are the arrays that were written, or tifffile's own reading.
"""

import struct
import sys

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images.samples import read_image, read_or_refuse, refusal, write_json
from tests.mutations import damaged, property_test
from unet3d.errors import VolumeError
from unet3d.images import microscopy
from unet3d.images.files import is_volume_folder, members, stands_for_volume, written_suffix
from unet3d.images.geometry import same_grid
from unet3d.images.image import open_image
from unet3d.images.label_names import read_label_names
from unet3d.images.labels import read_label, write_label
from unet3d.images.source import Reading
from unet3d.inference.label_scores import read_pair
from unet3d.inference.pairing import find_pairs
from unet3d.memory import host
from unet3d.preparation.cache import Cache

tifffile = pytest.importorskip("tifffile")

RNG = np.random.default_rng(0)
ARRAY = RNG.integers(0, 255, (7, 40, 50), np.uint8)  # Z, Y, X
CHANNELS = RNG.integers(0, 60000, (7, 2, 40, 50)).astype(np.uint16)  # Z, C, Y, X
COLOURS = RNG.integers(0, 255, (7, 40, 50, 3), np.uint8)
NANOMETRES = {"PhysicalSizeXUnit": "nm", "PhysicalSizeYUnit": "nm", "PhysicalSizeZUnit": "nm"}


@pytest.fixture(autouse=True)
def every_warning():
    microscopy._warned.clear()


def written(path, array=ARRAY, **options):
    tifffile.imwrite(path, array, **options)
    return path


def ours(array, axes="ZYX"):
    """Return an array as (C, X, Y, Z)."""
    order = ["CSXYZ".index(axis) for axis in axes]
    array = array.transpose(np.argsort(order))
    return array if array.ndim == 4 else array[None]


def spacing_of(path):
    return open_image(path).geometry.spacing_mm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"metadata": None},
        {"bigtiff": True, "metadata": None},
        {"byteorder": ">"},
        {"rowsperstrip": 7, "metadata": None},
        {"tile": (16, 32)},
        {"tile": (16, 32), "compression": "zlib"},
        {"compression": "zlib", "predictor": True, "byteorder": ">"},
        {"compression": "lzw", "rowsperstrip": 7},
        {"compression": "zstd", "rowsperstrip": 1000},
        {"compression": "packbits"},
        {"imagej": True, "metadata": {"axes": "ZYX"}},
        {"ome": True, "metadata": {"axes": "ZYX"}, "compression": "zlib"},
    ],
    ids=str,
)
def test_every_layout_is_read_whole_and_in_boxes(tmp_path, options):
    for dtype in ("u1", "u2", "f4") if options.get("imagej") else ("u1", "i2", "u4", "f8"):
        image = open_image(written(tmp_path / "scan.tif", ARRAY.astype(dtype), **options))
        expected = ours(ARRAY)
        assert image.dtype == dtype and not image.geometry.is_anatomical
        np.testing.assert_array_equal(image.whole(), expected)
        for box in (np.s_[0:50, 0:40, 3:4], np.s_[3:9, 5:33, 2:5], np.s_[1:50, 9:9, 0:7]):
            np.testing.assert_array_equal(image.read(box), expected[:, *box])
        np.testing.assert_array_equal(image.cut(box).whole(), expected[:, *box])
        assert image.slowest_axis == 2 and image.unpacked_bytes == 0


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}], ids=str)
def test_pages_that_were_written_one_by_one_are_a_stack(tmp_path, options):
    for array, axes in ((ARRAY, "ZYX"), (COLOURS, "ZYXS")):
        with tifffile.TiffWriter(tmp_path / "scan.tif") as writer:
            for plane in array:
                writer.write(plane, contiguous=False, **options)
        with tifffile.TiffFile(tmp_path / "scan.tif") as tiff:
            assert len(tiff.series) == len(array)
        np.testing.assert_array_equal(read_image(tmp_path / "scan.tif"), ours(array, axes))


def test_truth_values_are_labels(tmp_path):
    path = written(tmp_path / "scan.tif", ARRAY > 100, photometric="minisblack")
    np.testing.assert_array_equal(read_label(path).array, ours(ARRAY)[0] > 100)


def test_lossy_compression_is_read_as_tifffile_reads_it(tmp_path):
    for array, options in ((ARRAY, {}), (COLOURS, {"photometric": "rgb"})):
        path = written(tmp_path / "scan.tif", array, compression="jpeg", **options)
        axes = "ZYXS"[: array.ndim]
        np.testing.assert_array_equal(read_image(path), ours(tifffile.imread(path), axes))


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}], ids=str)
def test_channels_and_colours_are_channels(tmp_path, options):
    kinds = (
        (CHANNELS, "ZCYX", {"metadata": {"axes": "ZCYX"}}),
        (CHANNELS, "ZCYX", {"metadata": {"axes": "ZCYX"}, "ome": True}),
        (CHANNELS.swapaxes(0, 1), "CZYX", {"metadata": {"axes": "CZYX"}, "ome": True}),
        (COLOURS, "ZYXS", {"photometric": "rgb"}),
        (COLOURS, "ZYXS", {"photometric": "rgb", "ome": True, "metadata": {"axes": "ZYXS"}}),
        (np.moveaxis(COLOURS, 3, 1), "ZSYX", {"photometric": "rgb", "planarconfig": "separate"}),
    )
    for array, axes, how in kinds:
        image = open_image(written(tmp_path / "scan.tif", array, **how, **options))
        expected = ours(array, axes)
        np.testing.assert_array_equal(image.whole(), expected)
        np.testing.assert_array_equal(image.read(channel=1), expected[1:2])
    hyperstack = {"imagej": True, "metadata": {"axes": "ZCYX"}}
    path = written(tmp_path / "fiji.tif", CHANNELS, **hyperstack)
    np.testing.assert_array_equal(read_image(path), ours(CHANNELS, "ZCYX"))


def test_users_may_name_the_axes_and_choose_a_point_in_time(tmp_path):
    film = np.stack([CHANNELS, CHANNELS[::-1]])  # T, Z, C, Y, X
    for options in (
        {"imagej": True, "metadata": {"axes": "TZCYX"}},
        {"ome": True, "metadata": {"axes": "TZCYX"}, "compression": "zlib"},
    ):
        path = written(tmp_path / "film.tif", film, **options)
        for time in range(2):
            image = open_image(path, reading=Reading(time=time))
            np.testing.assert_array_equal(image.whole(), ours(film[time], "ZCYX"))
    assert "2 points in time; choose one with --time, 0 to 1, or if they are planes" in refusal(
        path
    )
    path = written(tmp_path / "scan.tif", CHANNELS)  # QQYX
    image = open_image(path, reading=Reading(axes="zcyx"))
    np.testing.assert_array_equal(image.whole(), ours(CHANNELS, "ZCYX"))
    image = open_image(path, reading=Reading(axes="tzyx", time=3))
    np.testing.assert_array_equal(image.whole(), ours(CHANNELS[3]))
    path = written(tmp_path / "frames.tif", imagej=True, metadata={"axes": "TYX"})
    np.testing.assert_array_equal(
        open_image(path, reading=Reading(axes="zyx")).whole(), ours(ARRAY)
    )
    path = written(tmp_path / "colours.tif", COLOURS, photometric="rgb")
    image = open_image(path, reading=Reading(axes="zyxc"))
    np.testing.assert_array_equal(image.whole(), ours(COLOURS, "ZYXS"))

    def read_as(axes):
        return refusal(path, lambda path: open_image(path, reading=Reading(axes=axes)))

    assert "7x40x50x3) named z,y,x; a volume needs z, y and x, each once" in read_as("zyx")


def test_channels_and_the_position_of_ome(tmp_path):
    positions = {"PositionX": [3.0] * 14, "PositionY": [-2.0] * 14, "PositionZ": [8.0] * 14}
    units = {f"Position{axis}Unit": ["mm" if axis == "Z" else "µm"] * 14 for axis in "XYZ"}
    metadata = {"axes": "CZYX", "Channel": {"Name": ["nuclei", "walls"]}}
    metadata |= {"Plane": positions | units, "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm"}
    metadata |= {"PhysicalSizeY": 0.5, "PhysicalSizeZ": 2.0}
    path = written(tmp_path / "scan.tif", CHANNELS.swapaxes(0, 1), ome=True, metadata=metadata)
    (source,) = open_image(path)._sources
    assert source.channel_names == ("nuclei", "walls") and source.geometry.unit == "micrometer"
    np.testing.assert_allclose(source.geometry.affine[:3, 3], (3e-3, -2e-3, 8))
    write_label(tmp_path / "seg.tif", ours(ARRAY)[0], source.geometry)
    found = open_image(tmp_path / "seg.tif").geometry
    np.testing.assert_allclose(found.affine, source.geometry.affine, rtol=1e-9)


def test_a_large_file_of_imagej_describes_its_first_page_alone(tmp_path):
    text = f"ImageJ=1.54f\nimages={len(ARRAY)}\nslices={len(ARRAY)}\n"
    options = {"description": text, "metadata": None, "byteorder": ">"}
    path = written(tmp_path / "scan.tif", ARRAY[0].astype(np.uint16), **options)
    with path.open("ab") as file:
        file.write(ARRAY[1:].astype(">u2").tobytes())
    np.testing.assert_array_equal(read_image(path), ours(ARRAY))


@pytest.mark.parametrize("is_ome", [False, True])
def test_of_a_pyramid_the_whole_image_is_read(tmp_path, is_ome):
    path = tmp_path / "scan.tif"
    options = {"tile": (16, 16), "photometric": "minisblack", "compression": "zlib"}
    with tifffile.TiffWriter(path, ome=is_ome) as writer:
        writer.write(ARRAY, subifds=1, metadata={"axes": "ZYX"}, **options)
        writer.write(ARRAY[:, ::2, ::2], subfiletype=1, **options)
    np.testing.assert_array_equal(read_image(path), ours(ARRAY))


def test_spacing_of_ome_and_imagej_and_resolution(tmp_path):
    path = tmp_path / "scan.tif"
    sizes = {"PhysicalSizeX": 10, "PhysicalSizeY": 12, "PhysicalSizeZ": 25.5}
    ome = {"ome": True, "metadata": {"axes": "ZYX", **sizes, **NANOMETRES}}
    assert spacing_of(written(path, **ome)) == (1e-5, 1.2e-5, 2.55e-5)
    ome["metadata"] = {"axes": "ZYX", **sizes}  # micrometres, unless a unit is given
    assert spacing_of(written(path, **ome)) == (0.01, 0.012, 0.0255)
    for unit in ("um", "micron", "µm", "\\u00B5m", "\\u03BCm"):
        fiji = {"metadata": {"axes": "ZYX", "spacing": 2.5, "unit": unit}, "resolution": (5, 4)}
        if unit.isascii():
            assert spacing_of(written(path, imagej=True, **fiji)) == (0.0002, 0.00025, 0.0025)
        assert spacing_of(written(path, **fiji)) == (0.0002, 0.00025, 0.0025)
    fiji["metadata"] = {"axes": "ZYX", "unit": "nm"}  # Fiji leaves out a spacing of 1
    assert spacing_of(written(path, imagej=True, **fiji)) == (2e-7, 2.5e-7, 1e-6)
    fiji["metadata"] = {"axes": "ZYX", "unit": "um", "yunit": "nm", "zunit": "mm", "spacing": 3}
    assert spacing_of(written(path, imagej=True, **fiji)) == (2e-4, 2.5e-7, 3)
    fiji["metadata"] = {"axes": "ZYX", "unit": "pixel", "spacing": 3}
    assert spacing_of(written(path, imagej=True, **fiji)) == (0.2, 0.25, 3)
    printed = written(path, resolution=(72, 72), resolutionunit="inch")
    assert not open_image(printed).geometry.has_spacing


def test_an_unknown_spacing_is_said_once_for_a_folder(tmp_path, caplog):
    for name in ("a.tif", "b.tif"):
        assert spacing_of(written(tmp_path / name)) == (1, 1, 1)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}/a.tif does not state the distance of voxels along X, Y, Z, so 1 mm is taken; "
        "state it with --spacing"
    )
    caplog.clear()
    path = written(tmp_path / "c.tif", resolution=(100, 50), resolutionunit="centimeter")
    assert spacing_of(path) == (0.1, 0.2, 0.1)
    assert "along Z, so 0.1 mm is taken" in caplog.text
    caplog.clear()
    for number, plane in enumerate(ARRAY):  # as ImageJ saves an image sequence
        fields = {"description": "ImageJ=1.53t\nunit=nm\n", "metadata": None}
        (tmp_path / "of/slices").mkdir(parents=True, exist_ok=True)
        written(tmp_path / f"of/slices/z{number}.tif", plane, resolution=(0.1, 0.1), **fields)
    assert spacing_of(tmp_path / "of/slices") == pytest.approx((1e-5, 1e-5, 1e-5))
    assert "along Z, so 1e-05 mm is taken" in caplog.text
    for bad in (0, -1, float("nan"), float("inf")):
        sizes = {"PhysicalSizeX": 2, "PhysicalSizeY": 2, "PhysicalSizeZ": bad}
        written(path, ome=True, metadata={"axes": "ZYX", **sizes})
        assert spacing_of(path) == (0.002, 0.002, 0.002)


def test_nnunets_file_of_the_spacing_comes_first(tmp_path, caplog):
    sizes = {"PhysicalSizeX": 1, "PhysicalSizeY": 1, "PhysicalSizeZ": 1}
    metadata = {"axes": "ZYX", **sizes}
    image = written(tmp_path / "case_0000.tif", ome=True, metadata=metadata)
    label = written(tmp_path / "case.tif", ome=True, metadata=metadata)
    cache = Cache(tmp_path / "cache")
    before = cache.digest(image)
    beside = write_json(tmp_path / "case.json", {"spacing": [3, 2, 1.5]})
    for path in (image, label):
        assert spacing_of(path) == (1.5, 2, 3)
        assert members(path) == (path, beside) and stands_for_volume(path)
    assert cache.digest(image) != before
    write_json(beside, {"of": "another program"})
    assert spacing_of(image) == (0.001, 0.001, 0.001)
    for bad in ([1, 2], [1, 2, 0], "1, 2, 3", [1, 2, None], None):
        write_json(beside, {"spacing": bad})
        with pytest.raises(VolumeError, match=r'case.json has the spacing .*write {"spacing"'):
            open_image(image)
    beside.write_text("{")
    with pytest.raises(VolumeError, match=r"cannot read .*case.json.*write {"):
        open_image(image)
    assert not caplog.records


def slices_in(folder, name="z{}.tif", array=ARRAY, first=8, step=1):
    folder.mkdir()
    for number, plane in enumerate(array):
        written(folder / name.format(first + number * step), plane)
    return folder


def test_a_folder_of_slices_is_a_volume_in_natural_order(tmp_path):
    folder = slices_in(tmp_path / "scan")  # z8, z9, z10
    image = open_image(folder)
    np.testing.assert_array_equal(image.whole(), ours(ARRAY))
    assert is_volume_folder(folder) and written_suffix(folder) == ".tif"
    assert members(folder) == tuple(folder / f"z{number}.tif" for number in range(8, 15))
    beside = write_json(tmp_path / "scan.json", {"spacing": [3, 2, 1]})
    assert spacing_of(folder) == (1, 2, 3) and members(folder)[-1] == beside
    by_ten = slices_in(tmp_path / "ten", "a1_{:04}.TIFF", first=0, step=10)
    np.testing.assert_array_equal(read_image(by_ten), ours(ARRAY))
    coloured = slices_in(tmp_path / "coloured", array=COLOURS)
    np.testing.assert_array_equal(read_image(coloured), ours(COLOURS, "ZYXS"))


def test_folders_of_slices_are_paired_with_label_maps(tmp_path):
    labels = tmp_path / "labels"
    labels.mkdir()
    folder = slices_in(labels / "case", array=ARRAY % 3)
    seg = written(tmp_path / "case.tif", ARRAY % 3)
    assert find_pairs(seg, folder).pairs == [(seg, folder)]
    assert find_pairs(seg, labels).pairs == [(seg, folder)]
    np.testing.assert_array_equal(read_label(folder).array, read_label(seg).array)


def test_names_of_slices_may_have_their_depth(tmp_path):
    for number, plane in enumerate(ARRAY):
        written(tmp_path / f"slice_{number}_z={9.5 + 0.3 * number:.4f}um.tif", plane)
    np.testing.assert_array_equal(read_image(tmp_path), ours(ARRAY))


def test_other_folders_are_not_volumes(tmp_path):
    written(tmp_path / "a.tif")
    written(tmp_path / "b.tif")
    assert not is_volume_folder(tmp_path)
    folder = slices_in(tmp_path / "scan", array=ARRAY[:1])  # a picture
    assert not is_volume_folder(folder)
    folder = slices_in(tmp_path / "pictures", array=ARRAY[:2])
    for number in range(2):
        (folder / f"slice{number}.dcm").touch()
    assert not is_volume_folder(folder)


def test_folders_of_other_slices_are_refused(tmp_path):
    folder = slices_in(tmp_path / "gap")
    (folder / "z10.tif").unlink()
    assert "lacks a slice, or holds others: z11.tif comes after z9" in refusal(folder)
    folder = slices_in(tmp_path / "twice")
    written(folder / "z08.tif", ARRAY[0])
    assert "lacks a slice, or holds others" in refusal(folder)
    folder = slices_in(tmp_path / "channels", "z{}_c0.tif")
    written(folder / "z8_c1.tif", ARRAY[0])
    assert "holds others: z8_c1.tif comes after z8_c0.tif" in refusal(folder)
    folder = slices_in(tmp_path / "names")
    written(folder / "overview.tif", ARRAY[0])
    assert "or holds others: z8.tif comes after overview.tif" in refusal(folder)
    folder = slices_in(tmp_path / "series", "a{}.tif")
    written(folder / "b8.tif", ARRAY[0])
    assert "or holds others: b8.tif comes after a14.tif" in refusal(folder)
    folder = slices_in(tmp_path / "sizes")
    written(folder / "z15.tif", ARRAY[0, :30])
    text = "z15.tif has 30x50 voxels (y, x) of uint8, but z8.tif has 40x50 voxels (y, x) of uint8"
    assert text in refusal(folder)
    written(folder / "z15.tif", ARRAY)
    assert "z15.tif has 7x40x50 voxels (z, y, x) of uint8" in refusal(folder)


def test_labels_are_written_as_ome_tiff(tmp_path):
    sizes = {"PhysicalSizeX": 10, "PhysicalSizeY": 12, "PhysicalSizeZ": 25.5}
    metadata = {"axes": "ZYX", **sizes, **NANOMETRES}
    scan = open_image(written(tmp_path / "scan.tif", ome=True, metadata=metadata))
    for highest in (1, 255, 300, 70000):
        labels = (ours(ARRAY)[0] > 100) * np.uint32(highest)
        path = tmp_path / "scan_seg.tif"
        write_label(path, labels, scan.geometry, names={1: "wall", highest: "<µ>"})
        with tifffile.TiffFile(path) as tiff:
            (series,) = tiff.series
            assert (series.axes, series.kind) == ("ZYX", "ome")
            assert series.dtype == np.min_scalar_type(highest)
            assert {page.compression for page in tiff.pages} == {8} and len(tiff.pages) == 7
            np.testing.assert_array_equal(series.asarray(), labels.T)
            for text in ('PhysicalSizeX="10.0"', 'PhysicalSizeZ="25.5"', 'XUnit="nm"'):
                assert text in tiff.ome_metadata
        label = read_label(path)
        np.testing.assert_array_equal(label.array, labels)
        assert label.geometry.spacing_mm == scan.geometry.spacing_mm
        assert read_label_names(path) == {1: "wall"} | {highest: "<µ>"}
    assert {*tmp_path.iterdir()} == {scan.geometry.path, path}
    assert read_label_names(scan.geometry.path) == {}
    with pytest.raises(VolumeError, match="no labels above 4294967295; use .nii.gz"):
        write_label(path, labels.astype(np.uint64) + 2**40, scan.geometry)
    np.testing.assert_array_equal(read_label(path).array, labels)


@pytest.mark.parametrize("unit", ["nm", "micron", ""])
def test_labels_of_an_imagej_scan_are_written_as_imagej_does(tmp_path, unit):
    metadata = {"axes": "ZYX", "spacing": 25.5, "unit": unit} if unit else {"axes": "ZYX"}
    resolution = {"resolution": (0.1, 0.2)} if unit else {}
    path = written(tmp_path / "scan.tif", imagej=True, metadata=metadata, **resolution)
    scan, labels = open_image(path), (ours(ARRAY)[0] > 100).astype(np.uint16)
    for highest in (1, 255, 256):
        labels[0, 0, 0] = highest
        write_label(tmp_path / "seg.tif", labels, scan.geometry, names={1: "wall", highest: "µ x"})
        with tifffile.TiffFile(tmp_path / "seg.tif") as tiff:
            assert tiff.is_imagej and {page.compression for page in tiff.pages} == {8}
            np.testing.assert_array_equal(tiff.asarray(), labels.T)
            if highest < 256:  # black, red, green, blue
                assert (tiff.pages[0].colormap[:, :4] // 256).T.tolist() == [
                    *([0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255])
                ]
        np.testing.assert_array_equal(read_label(tmp_path / "seg.tif").array, labels)
        found = open_image(tmp_path / "seg.tif").geometry
        assert found.spacing_mm == pytest.approx(scan.geometry.spacing_mm, rel=1e-6)
        assert read_label_names(tmp_path / "seg.tif") == {1: "wall"} | {highest: "µ x"}
    write_label(tmp_path / "seg.tif", labels.astype(np.uint32) * 2**10, scan.geometry)
    with tifffile.TiffFile(tmp_path / "seg.tif") as tiff:
        assert tiff.is_ome


def test_the_unit_is_that_of_the_scan(tmp_path):
    sizes = {f"PhysicalSize{axis}": 100 for axis in "XYZ"}
    ome = {"ome": True, "metadata": {"axes": "ZYX", **sizes, **NANOMETRES}}
    fiji = {
        "metadata": {"axes": "ZYX", "spacing": 0.01, "unit": "micron"},
        "resolution": (100, 100),
    }
    for options, text in ((ome, 'XUnit="nm"'), ({"imagej": True, **fiji}, "unit=um")):
        scan = open_image(written(tmp_path / "scan.tif", **options))
        write_label(tmp_path / "seg.tif", ours(ARRAY)[0], scan.geometry)
        with tifffile.TiffFile(tmp_path / "seg.tif") as tiff:
            assert text in tiff.pages[0].description
        assert spacing_of(tmp_path / "seg.tif") == pytest.approx(scan.geometry.spacing_mm)


def test_units_suit_the_spacing(tmp_path):
    for spacing_mm, unit in ((2e-4, "µm"), (0.5, "mm")):
        nib.save(nib.Nifti1Image(ARRAY.T, np.diag([*[spacing_mm] * 3, 1])), tmp_path / "scan.nii")
        scan = open_image(tmp_path / "scan.nii")
        write_label(tmp_path / "seg.tif", ours(ARRAY)[0], scan.geometry)
        with tifffile.TiffFile(tmp_path / "seg.tif") as tiff:
            assert f'PhysicalSizeXUnit="{unit}"' in tiff.ome_metadata
        assert spacing_of(tmp_path / "seg.tif") == pytest.approx([spacing_mm] * 3)


def test_labels_of_a_nifti_scan_turn_with_their_voxels(tmp_path):
    affine = np.array([[0, -2.0, 0, 5], [0, 0, 3, 6], [4, 0, 0, 7], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(ARRAY.T, affine), tmp_path / "scan.nii")
    scan = open_image(tmp_path / "scan.nii")
    path = tmp_path / "seg.tif"
    write_label(path, (scan.whole()[0] > 100).astype(np.uint8), scan.geometry)
    np.testing.assert_array_equal(tifffile.imread(path), ARRAY > 100)
    assert spacing_of(path) == (4, 2, 3)


def test_an_unknown_spacing_stays_unknown(tmp_path):
    scan = open_image(written(tmp_path / "scan.tif"))
    write_label(tmp_path / "seg.tif", ours(ARRAY)[0], scan.geometry)
    with tifffile.TiffFile(tmp_path / "seg.tif") as tiff:
        assert "PhysicalSize" not in tiff.ome_metadata
    assert not open_image(tmp_path / "seg.tif").geometry.has_spacing


def test_files_without_a_spacing_are_on_the_grid_of_those_with_one(tmp_path):
    scan = open_image(written(tmp_path / "scan.tif"))
    stated = open_image(scan.geometry.path, reading=Reading(spacing_mm=(1e-3, 1e-3, 4e-3)))
    assert stated.geometry.has_spacing and stated.geometry.spacing_mm == (1e-3, 1e-3, 4e-3)
    write_label(tmp_path / "seg.tif", ours(ARRAY)[0], stated.geometry)
    assert same_grid(scan.geometry, open_image(tmp_path / "seg.tif").geometry) is None
    both = open_image([scan.geometry.path, tmp_path / "seg.tif"])
    assert both.geometry.spacing_mm == (1e-3, 1e-3, 4e-3) and both.num_channels == 2
    prediction, label = read_pair(tmp_path / "seg.tif", scan.geometry.path)
    assert label.geometry.spacing_mm == prediction.geometry.spacing_mm == (1e-3, 1e-3, 4e-3)
    other = written(tmp_path / "other.tif", ARRAY[:, :-1])
    assert "shapes 50x40x7 and 50x39x7 differ" in same_grid(
        scan.geometry, open_image(other).geometry
    )


def test_other_images_are_refused(tmp_path):
    path = tmp_path / "scan.tif"

    def message(array, **options):
        return refusal(written(path, array, **options))

    assert "has one page, and a volume needs at least two; name the folder" in message(ARRAY[0])
    frames = {"imagej": True, "metadata": {"axes": "TYX"}}
    assert "has 7 points in time; choose one with --time, 0 to 6, or" in message(ARRAY, **frames)
    assert "has 4 axes (7x2x40x50) named z,z,y,x; a volume needs" in message(CHANNELS)
    alpha = np.concatenate([COLOURS, COLOURS[..., :1]], axis=3)
    rgba = {"photometric": "rgb", "extrasamples": ["unassalpha"]}
    assert "has colours with alpha (transparency); save it without" in message(alpha, **rgba)
    complex_ = {"metadata": None, "photometric": "minisblack"}
    assert "holds complex voxels" in message(ARRAY.astype(np.complex64), **complex_)
    with tifffile.TiffWriter(path) as writer:
        for width in (50, 49, 50, 48):
            writer.write(ARRAY[0, :, :width], metadata=None)
    assert "holds 3 images, 2x40x50, 40x49, 40x48; save one of them" in refusal(path)
    with tifffile.TiffWriter(path) as writer:
        for dtype in ("u1", "u2"):
            writer.write(ARRAY[0].astype(dtype))
    assert "holds 2 images, 40x50, 40x50; save one of them" in refusal(path)
    path.write_bytes(b"no TIFF file at all")
    assert "not a TIFF file" in refusal(path)
    path.write_bytes(b"")
    assert "is empty" in refusal(path)
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 0))
    assert "has no pages" in refusal(path)


def test_a_real_volume_is_the_same_as_in_nifti(tmp_path, test_data):
    for name in ("raw", "membrane", "bodies"):
        path = test_data / f"microscopy/fib25_{name}.tif"
        array = tifffile.imread(path)[:20]
        small = written(tmp_path / f"{name}.tif", array, compression="zlib", predictor=True)
        write_json(tmp_path / f"{name}.json", {"spacing": [1e-5, 1e-5, 1e-5]})
        nib.save(nib.Nifti1Image(array.T, np.diag([1e-5, 1e-5, 1e-5, 1])), tmp_path / "same.nii")
        found, same = open_image(small), open_image(tmp_path / "same.nii")
        assert same_grid(found.geometry, same.geometry) is None and found.dtype == same.dtype
        np.testing.assert_array_equal(found.whole(), same.whole())
        np.testing.assert_array_equal(open_image(path).read(np.s_[:, :, 0:20]), same.whole())


def test_nan_is_refused_like_in_every_format(tmp_path):
    array = ARRAY.astype(np.float32)
    array[3, 4, 5] = np.nan
    path = written(tmp_path / "scan.tif", array, compression="zlib", predictor=True)
    assert np.isnan(read_image(path)[0, 5, 4, 3])
    with pytest.raises(VolumeError, match="not integer labels, such as nan"):
        read_label(path)


@pytest.mark.parametrize("options", [{}, {"metadata": None}, {"compression": "zlib"}], ids=str)
def test_a_file_that_is_cut_off_is_refused_at_any_length(tmp_path, options):
    path = tmp_path / "scan.tif"
    for metadata in (None, {"axes": "ZYX"}):
        with tifffile.TiffWriter(path, ome=False) as writer:
            for plane in ARRAY if metadata is None else [ARRAY]:
                writer.write(plane, **{"metadata": metadata, **options}, contiguous=False)
        content = path.read_bytes()
        for size in range(1, len(content) - 1, 97):
            path.write_bytes(content[:size])
            assert "damaged or incomplete" in refusal(path, open_image) or size < 4


@pytest.mark.parametrize("num_pages", [7, 150])  # tifffile notices loops of up to 100 pages
def test_a_chain_of_pages_with_a_loop_is_refused(tmp_path, num_pages):
    path = tmp_path / "scan.tif"
    pages = np.zeros((num_pages, 16, 15), np.uint8)
    tifffile.imwrite(path, pages, metadata=None, compression="zlib")
    with tifffile.TiffFile(path) as tiff:
        first, end = tiff.pages[0].offset, tiff.pages.next_page_offset
    content = bytearray(path.read_bytes())
    content[end : end + 4] = struct.pack("<I", first)
    path.write_bytes(content)
    assert "has a broken chain of pages" in refusal(path)


@pytest.mark.parametrize("tag", ["ImageLength", "ImageWidth"])
def test_huge_claims_are_refused_before_anything_is_allocated(tmp_path, tag, monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 2**34)
    for options in ({}, {"compression": "zlib"}):
        path = written(tmp_path / "scan.tif", metadata=None, **options)
        with tifffile.TiffFile(path, mode="r+") as tiff:
            for page in tiff.pages:
                page.tags[tag].overwrite(2**30)
        message = refusal(path, open_image)
        assert "lacks voxels" in message or "of memory, but this machine has" in message


def test_missing_strips_and_damaged_ones_are_refused(tmp_path):
    path = written(tmp_path / "scan.tif", metadata=None, compression="zlib")
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[3]
        offset = page.dataoffsets[0]
        place = page.tags["StripByteCounts"].valueoffset
    content = bytearray(path.read_bytes())
    content[offset : offset + 20] = bytes(20)
    path.write_bytes(content)
    assert open_image(path).read((slice(None), slice(None), slice(0, 3))).any()
    assert "cannot read plane 4 in" in refusal(path)
    content[place : place + 4] = bytes(4)
    path.write_bytes(content)
    assert "lacks voxels of plane 4 of 7, or claims more" in refusal(path, open_image)


def test_a_file_cannot_make_tifffile_open_another(tmp_path):
    first, second = tmp_path / "one.ome.tif", tmp_path / "two.ome.tif"
    pages = "".join(
        f'<TiffData IFD="0" FirstZ="{z}" PlaneCount="1"><UUID FileName="{path.name}">urn:uuid:{z}'
        "</UUID></TiffData>"
        for z, path in enumerate((first, second))
    )
    xml = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        '<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="50" SizeY="40" '
        f'SizeZ="2" SizeC="1" SizeT="1">{pages}</Pixels></Image></OME>'
    )
    for path in (first, second):
        written(path, ARRAY[0], description=xml, metadata=None)
    assert "has one page" in refusal(first)
    for path in (first, second):
        written(path, ARRAY[:2], description=xml, metadata=None)
    assert "is one of several files of an OME-TIFF; save" in refusal(first)


@pytest.mark.parametrize("name", ["plain", "zlib", "ome"])
def test_damaged_files_are_read_or_refused(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp(name)
    path = folder / "scan.tif"
    options = {"plain": {}, "zlib": {"compression": "zlib"}, "ome": {"ome": True}}[name]
    options["photometric"] = "minisblack"
    content = written(path, ARRAY[:3, :6, :5], **options).read_bytes()

    @given(st.data())
    def check(data):
        path.write_bytes(data.draw(damaged(content)))
        read_or_refuse(path)

    property_test(check, share=0.5)()


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    path = written(tmp_path / "scan.tif")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    message = refusal(path, open_image)
    assert message == f"reading {path} needs tifffile: pip install 'unet3d-parallel[microscopy]'"
