"""Folders of DICOM slices: a volume is read; anything else is refused with the reason."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.images.dicom_series import change, in_order, write_series, write_slice
from tests.images.samples import refusal, write_json
from unet3d.datasets.dataset import load_dataset
from unet3d.errors import VolumeError
from unet3d.images.image import open_image
from unet3d.images.scratch import Scratch
from unet3d.memory import host
from unet3d.preparation.check import examine

ARRAY = np.random.default_rng(0).integers(-1000, 3000, (5, 4, 6)).astype(np.int16)


@pytest.fixture
def series(tmp_path):
    return write_series(tmp_path / "series", ARRAY)


def test_other_files_of_the_folder_are_left_out(series):
    whole = open_image(series)
    (series / "notes.txt").write_text("not DICOM")
    (series / ".hidden").write_bytes(bytes(128) + b"DICM")
    (series / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    (series / "thumbnails").mkdir()
    again = open_image(series)
    np.testing.assert_array_equal(again.whole(), whole.whole())
    np.testing.assert_array_equal(whole.whole()[0], ARRAY)
    assert whole.geometry.shape == (5, 4, 6) and whole.geometry.spacing_mm == (0.7, 0.8, 2.5)


def test_headers_are_read_without_pixels(series):
    slices = in_order(series)
    cut = slices[2].read_bytes()
    image = open_image(series)
    assert image.geometry.shape == (5, 4, 6)
    slices[2].write_bytes(cut[:-20])
    with pytest.raises(VolumeError, match=f"{slices[2].name}: it has changed; run again"):
        image.load()


@pytest.mark.parametrize("ending", ["", ".dcm", ".12"])
def test_a_slice_that_is_lost_is_named_wherever_it_lies(tmp_path, ending):
    series = write_series(tmp_path / "series", ARRAY)
    slices = [path.rename(f"{path}{ending}") for path in in_order(series)]
    for name in ("README", "LICENSE", "notes.txt", "scan.json", "list.csv", "protocol.xml"):
        (series / name).write_text("not DICOM")
    assert open_image(series).geometry.shape == (5, 4, 6)
    if ending != ".12":  # names without a common part, such as hashes
        other = [series / f"{name}{ending}" for name in ("3F2A", "b7", "0c", "D4D", "e55e", "99")]
        slices = [path.rename(new) for path, new in zip(slices, other, strict=True)]
    for number in (0, 3, 5):  # without the last slice no gap would show
        whole = slices[number].read_bytes()
        for content, said in (
            (b"", "is named like the slices beside it but is not a DICOM file; it is damaged"),
            (whole[:100], "is named like the slices beside it but is not a DICOM file"),
            (whole[:128] + b"DISM" + whole[132:], "is named like the slices"),
            (whole[:140], "cannot read the header"),
            (whole[:-1], "cannot read the header"),
            (whole[:-44], "cannot read the header"),
            (whole[:-52], "ends before the last of 5x4 pixels; it is damaged or incomplete"),
        ):
            slices[number].write_bytes(content)
            line = refusal(series)
            assert said in line and slices[number].name in line
        slices[number].write_bytes(whole)
    assert open_image(series).geometry.shape == (5, 4, 6)


def test_slices_that_are_missing_or_twice_there_are_named(series):
    slices = in_order(series)
    shutil.copy(slices[1], series / "zcopy")
    assert f"two slices at one position, {slices[1].name} and zcopy" in refusal(series)
    (series / "zcopy").unlink()
    slices[3].unlink()
    line = refusal(series)
    assert "lacks slices, or they are not evenly stacked" in line
    names = f"{slices[2].name} and {slices[4].name}"
    assert f"the widest gap is 5 mm instead of 2.5, between {names}" in line
    write_slice(series.with_name("one") / "IM1", ARRAY[:, :, 0].T.copy())
    line = refusal(series.with_name("one"))
    assert "holds one DICOM slice; a volume needs at least two" in line


def test_a_tilted_gantry_is_refused(series):
    for number, path in enumerate(in_order(series)):
        # The table moves along Z while slices are tilted by 12 degrees.
        lean = [0, float(np.cos(np.radians(12))), float(-np.sin(np.radians(12)))]
        change(path, ImageOrientationPatient=[1, 0, 0, *lean])
        change(path, ImagePositionPatient=[0, 0, 2.5 * number])
    line = refusal(series)
    assert "tilted gantry" in line and "by 12 degrees" in line and "dcm2niix" in line


@pytest.mark.parametrize(
    ("number", "changes", "said"),
    [
        (2, {"ImagePositionPatient": [0, 0, 5.8]}, "{2} lies 0.8 mm from its place; the widest"),
        (2, {"ImagePositionPatient": [0.5, 0, 5]}, "{2} lies 0.5 mm from its place"),
        (
            3,
            {"Rows": 2, "Columns": 10},
            "{3} has 10x2 pixels of 0.7x0.8 mm along -1x0x0x0x-1x0, but {0} has 5x4 pixels",
        ),
        (3, {"PixelSpacing": [0.8, 0.9]}, "pixels of 0.9x0.8 mm"),
        (3, {"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}, "along 0x1x0x0x0x-1, but {0} has"),
        (
            0,
            {"SeriesInstanceUID": "1.2.3", "SeriesDescription": "Topo\x1b[2Jgram"},
            '2 DICOM series, "Topo\\x1b[2Jgram", such as {0}, "Abdomen", such as {5}; move ',
        ),
        (0, {"SeriesInstanceUID": "1", "SeriesDescription": None, "SeriesNumber": 7}, '"series 7"'),
    ],
)
def test_a_slice_that_does_not_belong_to_the_others_is_named(series, number, changes, said):
    slices = in_order(series)
    change(slices[number], **changes)
    line = refusal(series)
    assert said.format(*(path.name for path in slices)) in line and line.isprintable()


def test_rounded_positions_are_even_and_no_tilt(series):
    change(in_order(series)[2], ImagePositionPatient=[0.05, 0, 5.05])
    assert open_image(series).geometry.spacing_mm == (0.7, 0.8, 2.5)
    short = write_series(series.with_name("short"), ARRAY[:, :, :3])
    change(in_order(short)[2], ImagePositionPatient=[0.05, 0, 5])
    assert open_image(short).geometry.shape == (5, 4, 3)


def test_slices_may_be_scaled_each_on_its_own(tmp_path):
    series = write_series(tmp_path / "pet", np.abs(ARRAY))
    expected = np.abs(ARRAY).astype(np.float64)
    for number, path in enumerate(in_order(series)):
        change(path, RescaleSlope=0.5 + number / 8, RescaleIntercept=0)
        expected[:, :, number] *= 0.5 + number / 8
    np.testing.assert_array_equal(open_image(series).whole()[0], expected.astype(np.float32))


def test_memory_is_counted_before_pixels_are_read(series, monkeypatch):
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 100)
    assert "reading 5x4x6x1 voxels takes 240 bytes of memory" in refusal(series)


def test_a_data_set_may_have_folders_of_slices(tmp_path):
    write_series(tmp_path / "scans" / "case0.1", ARRAY)
    write_series(tmp_path / "labels" / "case0.1", (ARRAY > 500).astype(np.uint8))
    entries = [{"image": "scans/case0.1", "label": "labels/case0.1"}]
    tree = {"labels": {"0": "background", "1": "bone"}, "modality": {"0": "CT"}}
    write_json(tmp_path / "dataset.json", {**tree, "training": entries})
    dataset = load_dataset(tmp_path)
    assert [case.name for case in dataset.cases] == ["labels/case0.1"]
    assert examine(dataset, watch=print).findings == []


@pytest.mark.parametrize("is_memory", [True, False])
def test_slices_are_stacked_in_memory_or_on_a_disk(series, tmp_path, is_memory):
    (tmp_path / "disk").mkdir()
    image = open_image(series, Scratch(None if is_memory else tmp_path / "disk"))
    np.testing.assert_array_equal(image.whole()[0], ARRAY)
    planes = image.on_device(image.planes(1, slice(1, 3)), torch.device("cpu"))
    np.testing.assert_array_equal(planes[0], ARRAY[:, 1:3])
    assert (str(tmp_path) in Path("/proc/self/maps").read_text()) != is_memory
    assert not list((tmp_path / "disk").iterdir())


def test_a_pipe_is_no_slice_and_not_waited_for(series):
    os.mkfifo(series / "IM00099")
    assert "IM00099 is named like the slices" in refusal(series)
