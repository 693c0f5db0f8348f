"""Models of nnU-Net segment like nnU-Net did; see README.md in ``tests/recorded/nnunet``."""

import json
import shutil

import numpy as np
import pytest
import torch

import unet3d
from tests.command_line import run
from tests.nnunet.recordings import (
    FOLDER,
    KINDS,
    all_recorded,
    assert_agree,
    files_of,
    model_of,
    plans_of,
    recorded,
    scans_of,
)
from tests.products import by_night
from unet3d.model import UNet3d
from unet3d.nnunet.loading import load_network

pytestmark = pytest.mark.usefixtures("float32")


def assert_scan(found, expected):
    assert_agree({"": found}, {"": expected})


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_segments_as_nnunet_does(kind):
    segmenter = unet3d.load(model_of(kind), devices="cpu", tta=False)
    found = {scan: segmenter.segment(files_of(kind, scan)) for scan in scans_of(kind)}
    assert_agree(found, all_recorded(kind, "plain"))
    with pytest.raises(AssertionError):  # such a small error is detected
        assert_agree(found, all_recorded(kind, "mirrored"))
    said = json.loads((model_of(kind) / "dataset.json").read_text())
    assert segmenter.channel_names == tuple(said["channel_names"].values())
    assert sorted(segmenter.label_names) == list(range(1, len(said["labels"])))
    if kind != "regions":
        assert ["background", *segmenter.label_names.values()] == list(said["labels"])


@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [KINDS[0], *by_night(*KINDS[1:])])
def test_mirror_images_are_averaged_unless_that_is_refused(kind, is_small):
    segmenter = unet3d.load(model_of(kind), devices="cpu")
    for scan in scans_of(kind):
        if is_small == (scan == "small"):
            found = segmenter.segment(files_of(kind, scan))
            assert_scan(found, recorded(kind, scan, "mirrored"))


def test_a_fold_alone_segments_as_nnunet_does_with_it(tmp_path):
    model, (scan,) = model_of("isotropic"), files_of("isotropic", "plain")
    checkpoint = model / "fold_1" / "checkpoint_final.pth"
    for fold, given, folds in (
        (0, model, [0]),
        (1, checkpoint, None),
        (1, shutil.copy(checkpoint, tmp_path / "model.pth"), None),  # which has copies of its files
    ):
        segmenter = unet3d.load(given, folds=folds, devices="cpu", tta=False)
        assert_scan(segmenter.segment(scan), recorded("isotropic", "plain", f"fold_{fold}"))


@pytest.mark.parametrize("kind", ["thick_slices", "regions"])
def test_a_converted_model_segments_as_nnunet_does(kind, tmp_path):
    ours = tmp_path / "model.pt"
    assert run("convert", model_of(kind), "-o", ours) == 0
    found = unet3d.load(ours, devices="cpu").segment(files_of(kind, "small"))
    assert_scan(found, recorded(kind, "small", "mirrored"))


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
    # Axis a of nnU-Net's network is axis transpose_forward[a] of the file's axes in reverse order.
    of_file = [2 - axis for axis in plans["transpose_forward"]]
    to_ours = (0, 1, *(2 + of_file.index(axis) for axis in range(3)))
    to_theirs = (0, 1, *(2 + axis for axis in of_file))
    num_channels = checkpoint.topology.in_channels
    window = np.random.RandomState(0).standard_normal((1, num_channels, *patch))
    with torch.inference_mode():
        logits = network.double().eval()(torch.from_numpy(window).permute(to_ours).contiguous())
    found = logits.permute(to_theirs)[0, :, ::5, ::5, ::5].numpy()
    expected = arrays["logits"]
    assert expected.dtype == np.float64
    assert np.abs(found - expected).max() <= 1e-10 * np.abs(expected).max()
