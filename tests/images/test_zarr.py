"""OME-Zarr and plain zarr arrays, written by zarr itself, against NumPy."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from functools import partial

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images.samples import refusal, write_volume
from tests.images.zarr_stores import SPACING, VOXELS, axes_named, scaled, store, zipped
from tests.mutations import mutated, property_test
from tests.products import by_night, each_value
from unet3d.errors import VolumeError
from unet3d.images import ome_zarr
from unet3d.images.files import members, stands_for_volume, volume_stem, written_suffix
from unet3d.images.geometry import same_grid
from unet3d.images.image import open_image, open_source
from unet3d.images.label_names import read_label_names
from unet3d.images.labels import read_label, write_label
from unet3d.images.source import Reading

zarr = pytest.importorskip("zarr")
zarr_store = pytest.importorskip("unet3d.images.zarr_store")


def changed(path, change, name="zarr.json"):
    """Rewrite a file of metadata after a function has changed its content."""
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))
    return path


def level_of(content, number=0):
    return content["attributes"]["ome"]["multiscales"][0]["datasets"][number]


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_an_image_is_the_same_as_in_nifti(tmp_path, version):
    image = open_image(store(tmp_path / "scan.ome.zarr", version=version))
    other = open_image(write_volume(tmp_path / "scan.nii", VOXELS.T, (8e-6, 8e-6, 4e-5)))
    assert image.geometry.spacing_mm == (8e-6, 8e-6, 4e-5) and image.dtype == np.uint16
    assert not image.geometry.is_anatomical
    assert same_grid(image.geometry, other.geometry) is None
    assert list(image.pieces()) == list(other.pieces())  # sums in another order would differ
    np.testing.assert_array_equal(image.whole(), other.whole())
    for axis in range(3):
        np.testing.assert_array_equal(image.plane(axis, 5), other.plane(axis, 5))
    box = (slice(3, 12), slice(1, 9), slice(2, 7))
    np.testing.assert_array_equal(image.read(box), other.read(box))


def test_transformations_of_a_level_and_of_all_are_combined(tmp_path):
    path = store(tmp_path / "scan.zarr", coordinateTransformations=scaled([2, 2, 2], [1, 2, 3]))
    changed(
        path,
        lambda found: level_of(found).update(
            coordinateTransformations=scaled(SPACING, [10, 20, 30])
        ),
    )
    geometry = open_image(path).geometry
    assert geometry.spacing_mm == (1.6e-5, 1.6e-5, 8e-5)
    np.testing.assert_allclose(geometry.affine[:3, 3], [63e-6, 42e-6, 21e-6])


@each_value(
    version=["0.4", "0.5"],
    compression=[zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED],
    above=["", "scan.ome.zarr/"],
)
def test_a_zip_file_of_a_store_is_read(tmp_path, version, compression, above):
    folder = store(tmp_path / "scan.ome.zarr", version=version)
    path = zipped(folder, compression, above)
    np.testing.assert_array_equal(open_image(path).whole()[0], VOXELS.T)
    assert members(path) == (path,) and volume_stem(path) == "scan"
    assert stands_for_volume(path) and written_suffix(path) == ".ome.zarr"


def test_parts_of_a_zip_file_are_named_and_read_in_parts(tmp_path, monkeypatch):
    folder = store(tmp_path / "scan.ome.zarr")
    store(folder / "labels" / "cells", (VOXELS > 2000).astype(np.uint8))
    path = zipped(folder, above="scan.ome.zarr/")
    np.testing.assert_array_equal(read_label(path / "labels" / "cells").array, VOXELS.T > 2000)
    coarse = open_image(path / "1")
    assert (
        coarse.geometry.spacing_mm == (1.6e-5, 1.6e-5, 8e-5) and volume_stem(path / "1") == "scan"
    )
    np.testing.assert_array_equal(coarse.whole()[0], VOXELS[::2, ::2, ::2].T)
    assert "is not a zarr store" in refusal(path / "labels" / "others", open_image)
    image = open_image(path)
    read = counted_reads(monkeypatch)
    np.testing.assert_array_equal(
        image.read((slice(3, 5), slice(8, 9), slice(0, 4))), VOXELS.T[None, 3:5, 8:9, :4]
    )
    (index, chunk) = (size for name, size in read if "/c/" in name)
    assert index == 8 * 16 + 4 and chunk < 4 * 8 * 8 * 2 + 99


@pytest.mark.parametrize("names, shape", [("czyx", (2,)), ("tczyx", (1, 2)), ("tzyx", (1,))])
def test_channels_come_last_and_a_single_time_is_left_out(tmp_path, names, shape):
    voxels = np.stack([VOXELS, VOXELS + 1]) if 2 in shape else VOXELS
    path = store(tmp_path / "scan.zarr", voxels.reshape(*shape, *VOXELS.shape), names=names)
    image = open_image(path)
    assert image.num_channels == (2 if 2 in shape else 1)
    for channel in range(image.num_channels):
        np.testing.assert_array_equal(image.read(channel=channel)[0], VOXELS.T + channel)


def test_several_times_are_refused(tmp_path):
    path = store(tmp_path / "scan.zarr", np.stack([VOXELS, VOXELS + 1]), names="tzyx")
    message = refusal(path, open_image)
    assert "has 2 points in time; choose one with --time, 0 to 1" in message
    for time in range(2):
        image = open_image(path, reading=Reading(time=time))
        np.testing.assert_array_equal(image.whole()[0], VOXELS.T + time)
    with pytest.raises(VolumeError, match="no point in time 2; --time may be 0 to 1"):
        open_image(path, reading=Reading(time=2))


def test_levels_and_label_maps_in_a_store_are_named_by_their_paths(tmp_path):
    path = store(tmp_path / "scan.ome.zarr")
    store(path / "labels" / "cells", (VOXELS > 2000).astype(np.uint8))
    coarse = open_image(path / "1")
    assert coarse.geometry.spacing_mm == (1.6e-5, 1.6e-5, 8e-5)
    np.testing.assert_array_equal(coarse.whole()[0], VOXELS[::2, ::2, ::2].T)
    label = read_label(path / "labels" / "cells")
    np.testing.assert_array_equal(label.array, VOXELS.T > 2000)
    assert same_grid(label.geometry, open_image(path).geometry) is None
    assert members(path) == (path,)
    found = ome_zarr.files_of(path)
    assert found[0] == f"{path}/zarr.json" and len(found) == 1 + 1 + 8
    assert all(file.startswith(f"{path}/0/") for file in found[1:])
    assert ome_zarr.files_of(path / "0" / "..")[1:] == found[1:]
    assert f"{path}/1/zarr.json" in ome_zarr.files_of(path / "1")


LEVELS = [(8e-6, 8e-6, 4e-5), (1.6e-5, 1.6e-5, 8e-5)]


@pytest.mark.parametrize(
    "wanted, level",
    [
        ({}, 0),
        ({"level": 1}, 1),
        ({"near_mm": (8e-6, 8e-6, 8e-6)}, 0),
        ({"near_mm": (1.2e-5, 1.2e-5, 6e-5)}, 1),  # in ratios, nearer to the coarser level
        ({"near_mm": (1e-6, 1e-6, 1e-6)}, 0),
        ({"near_mm": (1.0, 1.0, 1.0)}, 1),
        ({"near_mm": (1.0, 1.0, 1.0), "level": 0}, 0),
    ],
)
def test_a_level_is_named_or_the_nearest_to_a_spacing(tmp_path, wanted, level):
    path = store(tmp_path / "scan.ome.zarr")
    source = open_source(path, Reading(**wanted))
    assert source.geometry.spacing_mm == LEVELS[level]
    step = 2**level
    expected = VOXELS[::step, ::step, ::step].T
    np.testing.assert_array_equal(source.voxels()[:, :, :, :][..., 0], expected)
    assert source.levels == ((21, 17, 9), (11, 9, 5))


def test_a_stated_spacing_is_that_of_the_finest_level(tmp_path):
    path = store(tmp_path / "scan.ome.zarr")
    for level, factor in ((0, 1), (1, 2)):
        for name in (path, path / str(level)):
            reading = Reading(spacing_mm=(1.0, 2.0, 3.0), level=level if name == path else None)
            geometry = open_image(name, reading=reading).geometry
            assert geometry.spacing_mm == (factor, 2 * factor, 3 * factor)
    nearest = open_image(path, reading=Reading(spacing_mm=(1, 1, 5), near_mm=(2, 2, 9)))
    assert nearest.geometry.spacing_mm == (2, 2, 10)


def test_levels_that_are_not_there_are_listed(tmp_path):
    path = store(tmp_path / "scan.ome.zarr")
    with pytest.raises(VolumeError) as caught:
        open_image(path, reading=Reading(level=2))
    assert str(caught.value) == (
        f"{path} has no level 2; it has 0 (8 x 8 x 40 nm), 1 (16 x 16 x 80 nm)"
    )
    shutil.rmtree(path / "1")
    assert open_source(path).levels == ((21, 17, 9),)


def test_a_level_is_read_without_the_finer_ones(tmp_path):
    path = store(tmp_path / "scan.ome.zarr")
    shutil.rmtree(path / "0")
    assert "has no level 0; it has 1 (16 x 16 x 80 nm)" in refusal(path, open_image)
    for name, reading in ((path, Reading(level=1)), (path / "1", Reading())):
        source = open_source(name, reading)
        assert source.geometry.spacing_mm == LEVELS[1] and source.levels == ()
        np.testing.assert_array_equal(source.voxels()[:, :, :, :][..., 0], VOXELS[::2, ::2, ::2].T)


@pytest.mark.parametrize("axes", [[], ["z", "y", "x"], [{"type": "space"}] * 3])
def test_users_may_name_the_axes_of_a_pyramid(tmp_path, axes):
    path = store(tmp_path / "scan.ome.zarr", axes=axes)  # as before version 0.4
    if axes != [*"zyx"]:
        assert "volume needs z, y and x, each once: name all axes with --axes" in refusal(path)
    image = open_image(path, reading=Reading(axes="zyx", spacing_mm=(1, 2, 3)))
    assert image.geometry.spacing_mm == (1, 2, 3)
    np.testing.assert_array_equal(image.whole()[0], VOXELS.T)


def test_axes_are_stated_where_a_file_has_no_names(tmp_path):
    path = tmp_path / "scan.zarr"
    zarr.create_array(path, data=np.stack([VOXELS, VOXELS + 1], axis=-1))
    message = refusal(path, open_image)
    assert "4 axes (9x17x21x2) without names; a volume needs z, y and x" in message
    image = open_image(path, reading=Reading(axes="zyxc", spacing_mm=(1e-5, 1e-5, 2e-5)))
    assert image.geometry.spacing_mm == (1e-5, 1e-5, 2e-5)
    np.testing.assert_array_equal(image.read(channel=1)[0], VOXELS.T + 1)
    for axes in ("zyx", "zyxx", "tczy"):
        with pytest.raises(VolumeError, match="name all axes with --axes, such as czyx"):
            open_image(path, reading=Reading(axes=axes))


def test_channels_have_the_names_of_omero(tmp_path):
    path = store(tmp_path / "scan.zarr", np.stack([VOXELS] * 2), names="czyx")
    omero = {"channels": [{"label": "DAPI"}, {"label": "actin\n"}]}
    changed(path, lambda found: found["attributes"]["ome"].update(omero=omero))
    assert open_source(path).channel_names == ("DAPI", "actin\\n")
    changed(path, lambda found: found["attributes"]["ome"].update(omero={"channels": [{}, 1]}))
    assert open_source(path).channel_names == ()


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_the_first_series_of_bioformats2raw_is_opened(tmp_path, version, caplog):
    path = tmp_path / "scan.zarr"
    layout = {"bioformats2raw.layout": 3}
    group = zarr.open_group(path, mode="w", zarr_format=3 if version == "0.5" else 2)
    group.attrs.update({"ome": layout} if version == "0.5" else layout)
    assert "without multiscales" in refusal(path, open_image)
    store(path / "0", version=version)
    np.testing.assert_array_equal(open_image(path).whole()[0], VOXELS.T)
    assert not caplog.records
    store(path / "1", VOXELS + 1, version=version)
    np.testing.assert_array_equal(open_image(path).whole()[0], VOXELS.T)
    assert f"{path} holds several images; 0 is read" in caplog.text
    np.testing.assert_array_equal(open_image(path / "1").whole()[0], VOXELS.T + 1)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("names", [None, "zyx", "xyz"])
def test_plain_arrays_have_a_spacing_of_one_and_say_so(tmp_path, names, zarr_format, caplog):
    path, voxels = tmp_path / "scan.zarr", VOXELS.T if names == "xyz" else VOXELS
    named = {} if zarr_format == 2 else {"dimension_names": names}
    array = zarr.create_array(path, data=voxels, zarr_format=zarr_format, **named)
    if zarr_format == 2 and names:
        array.attrs["_ARRAY_DIMENSIONS"] = [*names]
    image = open_image(path)
    np.testing.assert_array_equal(image.whole()[0], VOXELS.T)
    assert image.geometry.spacing_mm == (1, 1, 1)
    assert f"{path} does not state the distance of voxels" in caplog.text


def test_a_scale_without_a_unit_is_said_once_for_a_folder(tmp_path, caplog):
    for name in ("a.ome.zarr", "b.ome.zarr"):
        path = store(tmp_path / name, axes=axes_named("zyx", unit=None))
        assert open_source(path).geometry.spacing_mm == (8, 8, 40)
    (record,) = caplog.records
    assert "has a scale without a unit, which is taken as mm" in record.getMessage()
    assert open_source(path, Reading(spacing_mm=(1, 2, 3))).geometry.spacing_mm == (1, 2, 3)
    assert len(caplog.records) == 1


def counted_reads(monkeypatch):
    """Return a list that gets the name in the store and the number of bytes of each read."""
    found, read = [], zarr_store.StoreFiles._part

    def counted(self, key, *part):
        content = read(self, key, *part)
        found.append((key.partition("/")[2], len(content or b"")))
        return content

    monkeypatch.setattr(zarr_store.StoreFiles, "_part", counted)
    return found


def test_a_box_reads_only_its_chunks(tmp_path, monkeypatch):
    path = store(tmp_path / "scan.zarr", num_levels=1)
    read = counted_reads(monkeypatch)
    image = open_image(path)
    assert not any("/c/" in key for key, _ in read)
    image.read((slice(16, 20), slice(0, 4), slice(8, 9)))
    assert {key for key, _ in read if "c/" in key} == {"0/c/1/0/1"}
    read.clear()
    for plane in range(9):
        image.plane(2, plane)
    assert len({key for key, _ in read}) == 8  # every shard
    assert sum(size for _, size in read) < 3 * VOXELS.nbytes  # planes of one chunk read it once


def test_missing_chunks_of_label_maps_are_not_said(tmp_path, caplog):
    path = store(tmp_path / "cells.zarr")
    changed(path, lambda content: content["attributes"]["ome"].update({"image-label": {}}))
    (path / "0" / "c" / "1" / "1" / "1").unlink()
    assert not open_image(path).whole()[0, 16:, 16:, 8:].any() and not caplog.records


def test_missing_chunks_are_the_fill_value_and_said_once(tmp_path, caplog):
    path = store(tmp_path / "scan.zarr")
    (path / "0" / "c" / "1" / "1" / "1").unlink()
    expected = VOXELS.copy()
    expected[8:, 16:, 16:] = 0
    for _ in range(2):
        np.testing.assert_array_equal(open_image(path).whole()[0], expected.T)
    messages = [one.getMessage() for one in caplog.records]
    assert len(messages) == 1
    assert (
        f"{path} has no file for some chunks, such as scan.zarr/0/c/1/1/1; their voxels are 0"
        in messages[0]
    )


def written(tmp_path, shape=(300, 20, 10), dtype=np.uint8, spacing_mm=None, names=None):
    """Write labels for a scan in OME-Zarr; return the folder and the labels (X, Y, Z)."""
    labels = np.random.default_rng(1).integers(0, 4, shape).astype(dtype)
    scan = store(tmp_path / "scan.ome.zarr", labels.T, num_levels=1)
    path = tmp_path / "scan_seg.ome.zarr"
    write_label(path, labels, open_image(scan).geometry, names=names)
    return path, labels


def test_written_labels_are_a_pyramid_in_the_unit_of_the_scan(tmp_path, caplog):
    names = {1: "nucleus", 3: "membrane"}
    path, labels = written(tmp_path, names=names)
    assert {one.name for one in tmp_path.iterdir()} == {"scan.ome.zarr", path.name}
    group = zarr.open_group(path, mode="r")
    ome = group.attrs["ome"]
    (multiscale,) = ome["multiscales"]
    assert [axis["name"] for axis in multiscale["axes"]] == ["z", "y", "x"]
    assert {axis["unit"] for axis in multiscale["axes"]} == {"nanometer"}
    scales = [one["coordinateTransformations"][0]["scale"] for one in multiscale["datasets"]]
    assert scales == [[40, 8, 8], [40, 16, 16]]
    np.testing.assert_array_equal(group["0"][...], labels.T)
    np.testing.assert_array_equal(group["1"][...], labels.T[:, ::2, ::2])  # Z is coarse already
    assert group["0"].metadata.dimension_names == ("z", "y", "x")
    assert group["0"].chunks == (10, 20, 128) and group["0"].shards == (10, 20, 384)
    described = ome["image-label"]
    assert described["source"] == {"image": "../scan.ome.zarr"}
    assert described["colors"][1] == {"label-value": 3, "rgba": [0, 255, 0, 255]}
    assert read_label_names(path) == names
    found = read_label(path)
    assert found.array.dtype == np.uint8
    np.testing.assert_array_equal(found.array, labels)
    assert same_grid(found.geometry, open_image(tmp_path / "scan.ome.zarr").geometry) is None
    assert not caplog.records


def test_written_background_has_all_of_its_files(tmp_path):
    geometry = open_image(store(tmp_path / "scan.ome.zarr")).geometry
    write_label(tmp_path / "seg.ome.zarr", np.zeros(geometry.shape, np.uint8), geometry)
    assert not read_label(tmp_path / "seg.ome.zarr").array.any()


def test_a_lost_file_of_written_labels_is_an_error(tmp_path):
    path, _ = written(tmp_path)
    image = open_image(path)
    (path / "0/c/0/0/0").unlink()
    assert f"lacks its file {path.name}/0/c/0/0/0; write or copy it again" in refusal(path)
    with pytest.raises(VolumeError, match="lacks its file"):
        image.read()
    changed(path, lambda found: found["attributes"]["unet3d"].update(is_complete=False))
    for part in (path, path / "1"):
        assert "is incomplete; run the command that writes it to its end" in refusal(
            part, open_image
        )


def test_written_labels_are_valid_for_ome_zarr_models(tmp_path):
    models = pytest.importorskip("ome_zarr_models.v05")
    path, _ = written(tmp_path, names={1: "cell"})
    group = zarr.open_group(path, mode="r")
    models.Image.from_zarr(group)
    models.ImageLabel.from_zarr(group)


def test_a_store_is_replaced_as_a_whole_or_kept(tmp_path):
    path, labels = written(tmp_path)
    geometry = read_label(path).geometry
    with pytest.raises(FileExistsError):
        write_label(path, 1 - labels // 4, geometry, overwrite=False)
    np.testing.assert_array_equal(read_label(path).array, labels)
    write_label(path, labels // 2, geometry)
    np.testing.assert_array_equal(read_label(path).array, labels // 2)
    assert {one.name for one in tmp_path.iterdir()} == {"scan.ome.zarr", path.name}


def test_labels_of_a_turned_scan_lie_where_the_scan_lies(tmp_path):
    affine = np.array([[0, -2.0, 0, 5], [0, 0, 3, -1], [-1, 0, 0, 2], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(np.ones((4, 5, 6), np.uint8), affine), tmp_path / "scan.nii")
    scan = open_image(tmp_path / "scan.nii")
    labels = np.arange(120, dtype=np.uint16).reshape(scan.shape[1:]) + 400
    write_label(tmp_path / "a.zarr", labels, scan.geometry)
    found = read_label(tmp_path / "a.zarr")
    np.testing.assert_array_equal(found.array, labels)
    assert found.array.dtype == np.uint16
    assert same_grid(found.geometry, scan.geometry) is None


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    path = store(tmp_path / "scan.zarr")
    monkeypatch.setitem(sys.modules, "zarr", None)
    message = refusal(path, open_image)
    assert message == f"reading {path} needs zarr: pip install 'unet3d-parallel[microscopy]'"


def damaged(text):
    return lambda path: (path / "zarr.json").write_text(text)


def with_axes(axes):
    def change(found):
        found["attributes"]["ome"]["multiscales"][0]["axes"] = axes

    return lambda path: changed(path, change)


def with_level(number=0, **values):
    return lambda path: changed(path, lambda found: level_of(found, number).update(values))


def with_array(**values):
    return lambda path: changed(path / "0", lambda found: found.update(values))


FAULTS = {
    "Expecting value": damaged("no JSON"),
    "has metadata that cannot be used": damaged("[1, 2]"),
    "recursion": damaged("[" * 100_000),
    "not a number greater than 0": with_level(
        coordinateTransformations=scaled([float("nan"), 1, 1])
    ),
    "9x17x21) named z,?,x; a volume needs z": with_axes([{"name": "z"}, {}, {"name": "x"}]),
    "has 3 axes (9x17x21) named z,y,y": with_axes(axes_named("zyy")),
    "named z,q,x; a volume needs z, y and x": with_axes(axes_named("zqx")),
    "'parsec' is not one of length": with_axes(axes_named("zyx", "parsec")),
    "has levels that disagree: level 1 covers": with_level(
        1, coordinateTransformations=scaled(SPACING)
    ),
    "of the type 'affine'": with_level(coordinateTransformations=[{"type": "affine"}]),
    "metadata that cannot be used: ValueError": with_level(
        coordinateTransformations=scaled([1, 2])
    ),
    "has no level 0; it has 1 (16 x 16 x 80 nm)": with_level(path="5"),
    "'.' or '..' segments": with_level(path="../scan.zarr/0"),
    "lacks zarr.json or .zgroup": lambda path: (path / "zarr.json").unlink(),
    "covers 400x144x176, but the finest 4e+31": with_array(shape=[10**30, 17, 21]),
    "complex": with_array(data_type="complex64", fill_value=[0, 0]),
    "a scale is not a number": with_level(coordinateTransformations=scaled([math.inf, 1, 1])),
    "a chunk has no voxels": with_array(
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0, 8, 8]}},
        codecs=[{"name": "bytes"}],
    ),
    "no-such-codec": with_array(codecs=[{"name": "no-such-codec"}]),
}


@pytest.mark.parametrize("message", FAULTS)
def test_damaged_metadata_are_refused(tmp_path, message):
    path = store(tmp_path / "scan.zarr")
    FAULTS[message](path)
    assert message in refusal(path, open_image)


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "may not be read; ask for the right to read it"),
        ("0", "may not be read; ask for the right to read it"),
        ("0/c", "its voxels may not be read; ask for the right to"),
    ],
)
def test_stores_that_may_not_be_read_are_refused(tmp_path, monkeypatch, name, message):
    path = store(tmp_path / "scan.zarr")
    hidden = path / name

    open_regular = zarr_store.open_regular

    def opened(file):
        if file.is_relative_to(hidden):
            raise PermissionError(errno.EACCES, "Permission denied", file)
        return open_regular(file)

    monkeypatch.setattr(zarr_store, "open_regular", opened)
    assert message in refusal(path, lambda one: open_image(one).read())


def test_chunks_larger_than_memory_are_refused(tmp_path):
    zarr.create_array(tmp_path / "a.zarr", shape=[2**17] * 3, chunks=[2**17] * 3, dtype="u1")
    assert "unpacking one chunk of 131072x131072x131072" in refusal(tmp_path / "a.zarr", open_image)


@pytest.mark.parametrize("where", ["whole", "cut", "empty"])
def test_damaged_chunks_are_refused(tmp_path, where):
    path = store(tmp_path / "scan.zarr")
    file = path / "0" / "c" / "0" / "0" / "0"
    content = bytearray(file.read_bytes())
    content[20 : len(content) - 200 : 3] = b"\0" * len(content[20 : len(content) - 200 : 3])
    file.write_bytes({"whole": bytes(content), "cut": content[:-9], "empty": b""}[where])
    message = refusal(path, lambda one: open_image(one).read())
    assert ("of 0 bytes" if where == "empty" else "a chunk is damaged or incomplete") in message


@pytest.mark.nightly
def test_nothing_is_said_of_the_other_chunks_after_an_error(tmp_path):
    path = zarr.create_array(tmp_path / "a.zarr", data=VOXELS, chunks=(1, 1, 21)).store.root
    for number in range(0, 9, 2):
        (path / "c" / str(number) / "0" / "0").write_bytes(b"damaged")
    script = (
        f"from unet3d.images.image import *; open_source(Path({str(path)!r})).voxels()[:, :, :, :]"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr
    assert said.splitlines()[-1].endswith("damaged or incomplete: copy the volume again")


def test_files_larger_than_their_content_are_refused(tmp_path):
    path = store(tmp_path / "scan.zarr")
    with (path / "0" / "c" / "0" / "0" / "0").open("ab") as file:
        file.truncate(2**24)
    assert "bytes, but its content takes up to" in refusal(path, lambda one: open_image(one).read())


@pytest.mark.parametrize("bomb", ["0/c/0/0/0", *by_night("zarr.json")])
def test_zip_bombs_are_refused(tmp_path, bomb):
    folder = store(tmp_path / "scan.zarr")
    (folder / bomb).write_bytes(b" " * 2**26)
    path = zipped(folder, zipfile.ZIP_DEFLATED)
    message = refusal(path, lambda one: open_image(one).read())
    assert "bytes, but its content takes up to" in message


@pytest.mark.parametrize("name", ["zarr.json", "0/zarr.json", "0/c/0/0/0"])
def test_a_fifo_in_a_store_is_refused(tmp_path, name):
    path = store(tmp_path / "scan.zarr")
    (path / name).unlink()
    os.mkfifo(path / name)
    assert "it is not a regular file" in refusal(path, lambda one: open_image(one).read())


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_chunks_that_state_too_large_a_size_are_refused(tmp_path, codec):
    path = tmp_path / "scan.zarr"
    for voxels in (np.zeros((1, 2048, 4096), np.uint8), VOXELS[:1]):
        chunk = (path / "c/0/0/0").read_bytes() if path.exists() else b""
        zarr.create_array(
            path,
            data=voxels,
            chunks=voxels.shape,
            compressors=[{"name": codec, "configuration": {}}],
            config={"write_empty_chunks": True},
            overwrite=True,
        )
    (path / "c/0/0/0").write_bytes(chunk)
    assert "unpacks to more than" in refusal(path, lambda one: open_image(one).read())


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\5\6" + b"\0" * 18])
def test_damaged_zip_files_are_refused(tmp_path, content):
    path = tmp_path / "scan.zarr.zip"
    path.write_bytes(content)
    refusal(path, open_image)


def test_groups_and_files_that_are_no_volume_are_refused(tmp_path):
    zarr.open_group(tmp_path / "many.zarr", mode="w")
    store(tmp_path / "many.zarr" / "one")
    assert "without multiscales; name a volume in it" in refusal(tmp_path / "many.zarr", open_image)
    (tmp_path / "file.zarr").write_text("")
    refusal(tmp_path / "file.zarr", open_image)
    (tmp_path / "empty.zarr").mkdir()
    assert "is not a zarr store" in refusal(tmp_path / "empty.zarr", open_image)
    shutil.rmtree(tmp_path / "many.zarr")
    with pytest.raises(VolumeError, match="there is no file or folder"):
        open_image(tmp_path / "many.zarr")


@pytest.fixture(scope="module", params=["0.4", "0.5"])
def sound(tmp_path_factory, request):
    """Return a store, and its files of metadata with their content."""
    path = store(tmp_path_factory.mktemp("sound") / "scan.zarr", version=request.param)
    names = ("zarr.json", "0/zarr.json") if request.param == "0.5" else (".zattrs", "0/.zarray")
    return path, {path / name: json.loads((path / name).read_text()) for name in names}


@partial(property_test, share=0.3)
@given(data=st.data())
def test_metadata_may_be_anything(sound, data):
    path, contents = sound
    file = data.draw(st.sampled_from(list(contents)))
    file.write_text(json.dumps(data.draw(mutated(contents[file])), default=repr, skipkeys=True))
    try:
        with suppress(VolumeError):
            image = open_image(path)
            if math.prod(image.shape) < 2**20:
                image.whole()
        assert isinstance(read_label_names(path), dict) and members(path)
    finally:
        file.write_text(json.dumps(contents[file]))


def test_a_chunk_of_a_shard_may_not_be_of_any_size(tmp_path):
    path, codecs = tmp_path / "scan.zarr", zarr.codecs
    sharding = codecs.ShardingCodec(
        chunk_shape=(4, 4, 4), index_codecs=[codecs.BytesCodec()], index_location="start"
    )
    size = {"shape": (8, 8, 8), "chunks": (8, 8, 8)}
    array = zarr.create_array(path, **size, dtype="uint8", serializer=sharding, compressors=None)
    array[:] = 1
    with (path / "c" / "0" / "0" / "0").open("r+b") as file:
        file.seek(8)
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # without using the disk
    part = (slice(0, 2),) * 3
    assert "bytes, but its content" in refusal(path, lambda one: open_image(one).read(part))
