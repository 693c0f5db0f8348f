"""Prediction from Python equals prediction by the command, for images from any source."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch

import unet3d
from tests.command_line import run, scan_array
from tests.networks import write_checkpoint
from tests.nnunet.models import archive_of, write_model
from tests.products import by_night
from unet3d.errors import (
    CheckpointError,
    ConfigError,
    DatasetError,
    DeviceError,
    ResultExistsError,
    VolumeError,
)
from unet3d.runs.checkpoint import load_checkpoint, save_checkpoint

TURNED = np.array([[0, 0, 2.0, -10], [-1.5, 0, 0, 30], [0, 1.0, 0, 5], [0, 0, 0, 1]])
"""An affine with voxels of 1.5 x 1 x 2 mm, whose axes run to the back, top and right."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return write_checkpoint(folder / "checkpoint-latest.pt", patch_size=(8, 8, 8))


@pytest.fixture(scope="module")
def segmenter(checkpoint):
    return unet3d.load(checkpoint, devices="cpu")


@pytest.fixture
def file(tmp_path):
    nib.save(nib.Nifti1Image(scan_array((20, 14, 11)), TURNED), tmp_path / "scan.nii.gz")
    return tmp_path / "scan.nii.gz"


def labels_of(image):
    return np.asarray(image.dataobj)


def test_a_file_is_segmented_as_the_command_does(segmenter, checkpoint, file):
    assert run("predict", file, "--checkpoint", checkpoint, "--devices", "cpu") == 0
    written = nib.load(file.with_name("scan_seg.nii.gz"))
    result = segmenter.segment(file)
    assert np.array_equal(labels_of(result), labels_of(written))
    assert len(np.unique(labels_of(result))) == 3
    assert result.header == written.header and np.array_equal(result.affine, written.affine)
    assert segmenter.label_names == {1: "label 1", 2: "label 2"}
    assert segmenter.channel_names == ("channel 0",)


def test_what_is_in_memory_is_segmented_as_its_file(segmenter, file, tmp_path):
    expected, image = segmenter.segment(str(file)), nib.load(file)
    array = np.asarray(image.dataobj)
    units = nib.Nifti1Image(array, np.diag([1e-3, 1e-3, 1e-3, 1]) @ TURNED)
    units.header.set_xyzt_units("meter")
    sources = {
        "read": (image,),
        "made": (nib.Nifti1Image(array, TURNED),),
        "long": (nib.Nifti2Image(array, TURNED),),
        "of another format": (nib.MGHImage(array.astype(np.float32), TURNED),),
        "in metres": (units,),
        "an array": (array, TURNED),
        "with an axis of channels": (array[..., None], TURNED.tolist()),
        "several files": ([file],),
    }
    for name, source in sources.items():
        result = segmenter.segment(*source)
        assert np.array_equal(labels_of(result), labels_of(expected)), name
        if name != "in metres":
            assert np.allclose(result.affine, TURNED), name
            assert result.header.get_zooms() == pytest.approx((1.5, 1.0, 2.0)), name
    assert np.allclose(segmenter.segment(units).affine, units.affine, rtol=0, atol=1e-8)
    nib.save(result, tmp_path / "again.nii.gz")
    assert np.array_equal(labels_of(nib.load(tmp_path / "again.nii.gz")), labels_of(expected))


def test_an_array_is_seen_as_it_is_by_a_network_for_stored_axes(checkpoint, file, tmp_path):
    network = load_checkpoint(checkpoint)
    preprocessing = replace(network.preprocessing, orientation="stored")
    save_checkpoint(replace(network, preprocessing=preprocessing), tmp_path / "stored.pt")
    stored = unet3d.load(tmp_path / "stored.pt", devices="cpu")
    array = np.asarray(nib.load(file).dataobj)
    found = labels_of(stored.segment(array, TURNED))
    assert np.array_equal(labels_of(stored.segment(file)), found)
    straight = unet3d.load(checkpoint, devices="cpu").segment(array, np.diag([1.5, 1, 2, 1]))
    assert np.array_equal(labels_of(straight), found)
    assert len(np.unique(found)) == 3


def test_settings_are_those_of_training_unless_they_are_named(checkpoint, file, tmp_path):
    changes = ("inference.overlap=0.25", "inference.window=8,8,8")
    trained = write_checkpoint(tmp_path / "trained.pt", patch_size=(8, 8, 8), changes=changes)
    loaded = unet3d.load(trained, devices="cpu").segment(file)
    same = unet3d.load(checkpoint, devices="cpu", overlap=0.25, window=(8, 8, 8)).segment(file)
    other = unet3d.load(trained, devices="cpu", overlap=0.5, window="whole").segment(file)
    assert np.array_equal(labels_of(loaded), labels_of(same))
    assert not np.array_equal(labels_of(loaded), labels_of(other))


def test_several_networks_and_devices_and_threads_do_as_the_command(checkpoint, file, tmp_path):
    other = write_checkpoint(tmp_path / "other.pt", patch_size=(8, 8, 8), seed=3)
    words = ("--checkpoint", checkpoint, "--checkpoint", other, "--devices", "cpu")
    assert run("predict", file, *words) == 0
    expected = labels_of(nib.load(file.with_name("scan_seg.nii.gz")))
    device = torch.device("cpu")
    for devices in ("cpu", "cpu,cpu", ["cpu", device], device):
        segmenter = unet3d.load(checkpoint.parent, other, devices=devices)
        assert np.array_equal(labels_of(segmenter.segment(file)), expected)
    with ThreadPoolExecutor(4) as threads:  # the threads wait for one another
        for found in threads.map(segmenter.segment, [file] * 8):
            assert np.array_equal(labels_of(found), expected)


@pytest.mark.parametrize(
    ("voxels", "affine", "words"),
    [
        (np.zeros((4, 4, 4), complex), TURNED, "the image holds complex voxels"),
        (np.zeros((4, 4)), TURNED, "the image has 2 axes"),
        (np.zeros((4, 4, 4, 2)), TURNED, "the image has 2 channels"),
        (np.full((4, 4, 4), np.nan), TURNED, "the image has"),
        (np.zeros((4, 4, 4)), TURNED[:3], "the affine of the image is invalid"),
        (np.zeros((4, 4, 4)), "no numbers", "the affine of the image is invalid"),
        (np.zeros((4, 4, 4)), np.diag([1.0, 1, 0, 1]), "an impossible affine"),
    ],
)
def test_what_cannot_be_segmented_is_refused_in_words(segmenter, voxels, affine, words):
    with pytest.raises(VolumeError) as refused:
        segmenter.segment(voxels, affine)
    assert words in str(refused.value)


def test_misuse_is_named(segmenter, checkpoint, file):
    with pytest.raises(TypeError, match="give an affine with a NumPy array"):
        segmenter.segment(np.zeros((4, 4, 4)))
    with pytest.raises(TypeError, match="with nothing else"):
        segmenter.segment(file, TURNED)
    for nothing in ([], [1], 3, torch.zeros(4, 4, 4)):
        with pytest.raises(TypeError, match="cannot segment a "):
            segmenter.segment(nothing)
    with pytest.raises(TypeError, match="missing 1 required .*checkpoint"):
        unet3d.load()
    with pytest.raises(CheckpointError, match="absent.pt"):
        unet3d.load(file.with_name("absent.pt"))
    with pytest.raises(DeviceError, match="device '97' does not exist"):
        unet3d.load(checkpoint, devices=97)
    with pytest.raises(ConfigError, match="overlap"):
        unet3d.load(checkpoint, devices="cpu", overlap=2.0)
    with pytest.raises(VolumeError, match=r"absent\.nii"):
        segmenter.segment(file.with_name("absent.nii"))
    with pytest.raises(AttributeError, match="no attribute 'segment'"):
        _ = unet3d.segment
    assert {"load", "Segmenter", "__version__"} <= set(dir(unet3d))


def test_an_image_that_cannot_be_read_or_understood_is_refused(segmenter, file):
    image = nib.load(file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(VolumeError, match="cannot read the image: "):
        segmenter.segment(image)
    file.unlink()
    with pytest.raises(VolumeError, match="cannot read the image: No such file"):
        segmenter.segment(image)
    turned = nib.AnalyzeImage(np.zeros((4, 4, 4), np.float32), TURNED)
    with pytest.raises(VolumeError, match="the image is a nibabel AnalyzeImage, which may not"):
        segmenter.segment(turned)  # left and right are swapped


def test_an_archive_is_there_as_long_as_the_segmenter(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    archive = archive_of(write_model(tmp_path / "model", 0, 1), tmp_path / "model.zip")
    segmenter = unet3d.load(archive, folds=[1], devices="cpu")
    assert list(temporary.rglob("checkpoint_final.pth"))
    assert len(segmenter._predictor._networks) == 1
    del segmenter
    gc.collect()
    assert not list(temporary.glob(".unfinished-*"))
    for folds in ("all", "0,1"):
        assert len(unet3d.load(archive, folds=folds, devices="cpu")._predictor._networks) == 2
    with pytest.raises(ConfigError, match="'one' names no folds; give numbers"):
        unet3d.load(archive, folds="one", devices="cpu")
    with pytest.raises(CheckpointError, match=r"model\.zip/Dataset001_Phantoms/model has no .* 2;"):
        unet3d.load(archive, folds=[2], devices="cpu")


@pytest.mark.parametrize(
    ("devices", "parallel"), [("cpu", None), *by_night((["cpu", "cpu"], "spatial"))]
)
def test_files_are_segmented_as_the_command_does(
    devices, parallel, checkpoint, file, tmp_path, caplog
):
    """With all results, in this process or in ranks, and with errors listed at the end."""
    bad, output = tmp_path / "bad.nii.gz", tmp_path / "output"
    bad.write_bytes(b"nothing")
    words = ("--checkpoint", checkpoint, "--devices", "cpu", "--overlap", 0.25, "--statistics")
    assert run("predict", file, "-o", tmp_path / "command", *words) == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "command").iterdir()}
    asked = {"overlap": 0.25, "statistics": True, "output": output, "devices": devices}
    with (
        caplog.at_level("INFO", logger="unet3d"),
        pytest.raises(DatasetError, match="1 of 2 scans could not be segmented: .*bad.nii"),
    ):
        unet3d.predict([file, bad], [checkpoint], parallel=parallel, **asked)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == expected
    assert "computing on cpu" in caplog.text
    assert caplog.text.count(f"{file} -> {output / 'scan.nii.gz'} (") == 1
    assert f"Skipped: cannot read {bad}: " in caplog.text
    found = unet3d.predict(file, checkpoint, parallel=parallel, overwrite=True, **asked)
    assert found == (output / "scan.nii.gz",)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == expected


def test_files_that_cannot_be_segmented_are_refused(checkpoint, file, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "scan.nii.gz").touch()
    with pytest.raises(ResultExistsError, match=r"scan\.nii\.gz exists"):
        unet3d.predict(file, checkpoint, output=output)
    with pytest.raises(TypeError, match="has no option sharpen"):
        unet3d.predict(file, checkpoint, sharpen=True)
    with pytest.raises(ConfigError, match="no checkpoint is named"):
        unet3d.predict(file, [])
    with pytest.raises(ConfigError, match="drop one"):
        unet3d.predict(file, checkpoint, goes_on=True, overwrite=True)
    with pytest.raises(ConfigError, match="inference.overlap is 2"):
        unet3d.predict(file, checkpoint, overlap=2.0)
