"""Models of nnU-Net segment as nnU-Net did; ``tests/recorded/nnunet`` says what was recorded."""

import shutil

import nibabel as nib
import numpy as np
import pytest
import torch

import unet3d
from tests.command_line import run
from tests.nnunet.models import archive_of
from tests.nnunet.recordings import (
    FOLDER,
    KINDS,
    all_recorded,
    assert_agree,
    files_of,
    labels_of,
    model_of,
    plans_of,
    recorded,
    scans_of,
)
from unet3d.model import UNet3d
from unet3d.nnunet.reading import load_network

pytestmark = pytest.mark.usefixtures("float32")


def assert_scan(found: nib.Nifti1Image, expected: nib.Nifti1Image) -> None:
    assert_agree({"": found}, {"": expected})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_can_tell_mistakes(kind):
    """All labels are there, and mirror images change more than may differ."""
    plain, mirrored = all_recorded(kind, "plain"), all_recorded(kind, "mirrored")
    for image in (plain["small"], mirrored["small"], plain["plain"]):
        assert list(np.unique(labels_of(image))) == list(range(3 if kind == "thick_slices" else 4))
    with pytest.raises(AssertionError):
        assert_agree(plain, mirrored)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_segments_as_nnunet_does(kind):
    segmenter = unet3d.load(model_of(kind), devices="cpu", tta=False)
    found = {scan: segmenter.segment(files_of(kind, scan)) for scan in scans_of(kind)}
    assert_agree(found, all_recorded(kind, "plain"))


@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
def test_mirror_images_are_averaged_unless_that_is_refused(kind, is_small):
    segmenter = unet3d.load(model_of(kind), devices="cpu")
    for scan in scans_of(kind):
        if is_small == (scan == "small"):
            found = segmenter.segment(files_of(kind, scan))
            assert_scan(found, recorded(kind, scan, "mirrored"))


def test_names_of_channels_and_labels_are_those_of_the_model():
    segmenter = unet3d.load(model_of("isotropic"), devices="cpu")
    assert segmenter.label_names == {1: "ball", 2: "cube", 3: "rod"}
    assert segmenter.channel_names == ("MRI",)
    segmenter = unet3d.load(model_of("regions"), devices="cpu")
    assert segmenter.channel_names == ("T1", "T1ce", "T2", "FLAIR")
    assert sorted(segmenter.label_names) == [1, 2, 3]


def test_a_fold_alone_segments_as_nnunet_does_with_it():
    model = model_of("isotropic")
    checkpoint = model / "fold_1" / "checkpoint_final.pth"
    for fold, segmenter in (
        (0, unet3d.load(model, folds=[0], devices="cpu", tta=False)),
        (1, unet3d.load(checkpoint, devices="cpu", tta=False)),
    ):
        found = segmenter.segment(files_of("isotropic", "plain"))
        assert_scan(found, recorded("isotropic", "plain", f"fold_{fold}"))


def test_an_exported_model_segments_as_nnunet_does(tmp_path):
    archive = archive_of(model_of("isotropic"), tmp_path / "model.zip", "Dataset991_isotropic/")
    (scan,) = files_of("isotropic", "plain")
    segmenter = unet3d.load(archive, devices="cpu", tta=False)
    assert_scan(segmenter.segment(scan), recorded("isotropic", "plain", "plain"))
    output = tmp_path / "seg.nii.gz"
    options = ("--no-tta", "--folds", "1", "--devices", "cpu", "-o", output)
    assert run("predict", scan, "--checkpoint", archive, *options) == 0
    assert_scan(nib.load(output), recorded("isotropic", "plain", "fold_1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.zip", "seg.nii.gz"]


@pytest.mark.parametrize("kind", ["thick_slices", "regions"])
def test_a_converted_model_segments_as_nnunet_does(kind, tmp_path):
    ours = tmp_path / "model.pt"
    assert run("convert", model_of(kind), "-o", ours) == 0
    found = unet3d.load(ours, devices="cpu").segment(files_of(kind, "small"))
    assert_scan(found, recorded(kind, "small", "mirrored"))


def test_a_model_without_the_files_above_it_is_read_from_its_checkpoint(tmp_path):
    model = model_of("thick_slices")
    alone = shutil.copy(model / "fold_0" / "checkpoint_final.pth", tmp_path / "model.pth")
    found = unet3d.load(alone, devices="cpu", tta=False).segment(files_of("thick_slices", "plain"))
    assert_scan(found, recorded("thick_slices", "plain", "plain"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_gives_the_logits_of_nnunets(kind):
    model = model_of(kind)
    plans = plans_of(model)
    patch = plans["configurations"]["3d_fullres"]["patch_size"]
    arrays = np.load(FOLDER / kind / "arrays.npz")
    (path, *_) = sorted(model.glob("fold_*/checkpoint_final.pth"))
    checkpoint = load_network(path)
    network = UNet3d(checkpoint.topology)
    network.load_state_dict(checkpoint.model)
    # Axis a of nnU-Net's network is the transposed one of the axes of the file in reverse.
    of_file = [2 - axis for axis in plans["transpose_forward"]]
    to_ours = (0, 1, *(2 + of_file.index(axis) for axis in range(3)))
    to_theirs = (0, 1, *(2 + axis for axis in of_file))
    num_channels = checkpoint.topology.in_channels
    window = np.random.RandomState(0).standard_normal((1, num_channels, *patch))
    with torch.inference_mode():
        image = torch.from_numpy(window).permute(to_ours).contiguous()
        output = network.double().eval()(image)
        logits = output if isinstance(output, torch.Tensor) else output[0]
    found = logits.permute(to_theirs)[0, :, ::5, ::5, ::5].numpy()
    expected = arrays["logits"]
    assert expected.dtype == np.float64
    assert np.abs(found - expected).max() <= 1e-10 * np.abs(expected).max()
