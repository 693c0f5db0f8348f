"""The predicted memory of a prediction, against the memory that it takes."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.command_line import in_a_process
from tests.images.samples import write_volume
from tests.networks import random_checkpoint, set_to
from unet3d.config import InferenceSettings
from unet3d.images.image import open_image
from unet3d.images.source import Reading
from unet3d.inference.networks import Networks
from unet3d.inference.prediction_memory import prediction_memory
from unet3d.reports.plan import prediction_lines
from unet3d.runs.checkpoint import save_checkpoint

AUTO = InferenceSettings()
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def planned(path, network, device=CPU, gpu_bytes=0, settings=AUTO, count=1):
    networks = Networks.of(*[set_to(network, settings)] * count)
    return prediction_memory(open_image(path), networks, device, gpu_bytes)


def scan_of(folder, shape, name="scan.nii.gz"):
    rng = np.random.default_rng(0)
    return write_volume(folder / name, rng.integers(0, 900, shape).astype(np.int16))


def test_host_memory_does_not_grow_with_the_length_of_a_scan(tmp_path, monkeypatch):
    network, one = random_checkpoint(), InferenceSettings(batch_size=1)
    short, long = (
        planned(scan_of(tmp_path, (24, 24, length), f"{length}.nii.gz"), network, settings=one)
        for length in (60, 600)
    )
    assert long["slab_bytes"] <= 1.01 * short["slab_bytes"]
    assert long["voxel_bytes"] == 10 * short["voxel_bytes"] == 24 * 24 * 600 * 2
    assert long["label_bytes"] == 10 * short["label_bytes"] == 24 * 24 * 600
    assert long["scratch_bytes"] == long["voxel_bytes"] + long["label_bytes"]
    assert long["num_windows"] > 5 * short["num_windows"]
    mapped = planned(scan_of(tmp_path, (24, 24, 60), "plain.nii"), network)
    assert mapped["voxel_bytes"] == 0
    monkeypatch.setattr("unet3d.inference.prediction_memory.LARGE_BYTES", 24 * 24 * 60 - 1)
    in_file = planned(scan_of(tmp_path, (24, 24, 60), "plain.nii"), network)
    assert (in_file["label_bytes"], in_file["label_file_bytes"]) == (0, 24 * 24 * 60)
    assert in_file["host_bytes"] == pytest.approx(mapped["host_bytes"] - 24 * 24 * 60, rel=0.01)
    assert any("disk beside the segmentation" in one for one in lines_of(in_file))
    assert not any("disk beside the segmentation" in one for one in lines_of(mapped))


def lines_of(found):
    about = {"device": "cpu", "device_has_bytes": 0, "host_available_bytes": 2**40}
    return prediction_lines({**about, **found}, "plain.nii")


def test_a_layer_of_chunks_is_counted(tmp_path):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(100, 64, 64), chunks=(32, 32, 32), dtype="u1"
    )
    array[...] = 1
    image = open_image(tmp_path / "a.zarr", reading=Reading(spacing_mm=(1, 1, 1), axes="zyx"))
    assert [image.layer_bytes(axis) for axis in range(3)] == [32 * 64 * 100] * 2 + [32 * 64 * 64]
    assert open_image(scan_of(tmp_path, (24, 24, 60), "plain.nii")).layer_bytes(2) == 0


def test_windows_are_those_that_settings_ask_for(tmp_path):
    path = scan_of(tmp_path, (64, 24, 24))
    few, many, large, whole = (
        planned(path, random_checkpoint(patch_size=patch), settings=InferenceSettings(**own))
        for patch, own in (
            ((16, 16, 16), {"overlap": 0.0}),
            ((16, 16, 16), {"overlap": 0.75}),
            ((16, 16, 16), {"window": (32, 24, 24)}),
            (None, {"window": (32, 24, 24), "batch_size": 3}),
        )
    )
    assert few["num_windows"] == 16 and many["num_windows"] == 13 * 3 * 3
    assert (large["window"], large["num_windows"]) == ([32, 24, 24], 3)
    assert (whole["window"], whole["windows_at_a_time"]) == ([32, 24, 24], 3)


def test_a_gpu_has_the_windows_and_a_small_one_fewer_at_a_time(tmp_path):
    network = random_checkpoint(patch_size=(64, 64, 64))
    path = scan_of(tmp_path, (64, 64, 400))
    large, small = (planned(path, network, GPU, mib * 2**20) for mib in (24_000, 1200))
    assert large["windows_at_a_time"] > small["windows_at_a_time"] >= 1
    sums = 64 * 64 * 64 * (network.topology.num_classes + 1) * 4  # logits of at least one window
    assert sums < large["device_bytes"] - 1024**3 < 2**32
    assert small["device_bytes"] < large["device_bytes"]
    assert large["slab_bytes"] < planned(path, network)["slab_bytes"]


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_logits_of_folds_are_added_up_once_and_their_probabilities_each(tmp_path, device):
    path = scan_of(tmp_path, (40, 40, 80))

    def bytes_of(averaging, count):
        settings = InferenceSettings(batch_size=1, averaging=averaging)
        found = planned(path, random_checkpoint(), device, 24 * 2**30, settings, count)
        return found["slab_bytes"] + found["device_bytes"]

    sums_and_image = 40 * 40 * 16 * (3 + 1) * 4
    assert bytes_of("logits", 3) == bytes_of("logits", 1)
    more = bytes_of("probabilities", 3) - bytes_of("probabilities", 1)
    assert 2 * sums_and_image < more


def test_networks_that_compute_in_different_precisions_have_a_place_each(tmp_path):
    image = open_image(scan_of(tmp_path, (40, 40, 80)))

    def bytes_of(*precisions):
        settings = [InferenceSettings(batch_size=1, precision=one) for one in precisions]
        networks = Networks.of(*(set_to(random_checkpoint(), one) for one in settings))
        return prediction_memory(image, networks, GPU, 24 * 2**30)["device_bytes"]

    assert bytes_of("float32", "bfloat16") > bytes_of("float32", "float32")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("shape", "spacing"), [((200, 180, 160), 1.0), ((120, 100, 140), 0.5)])
def test_it_is_near_what_the_command_takes(tmp_path, shape, spacing):
    network = random_checkpoint(spacing_mm=(spacing,) * 3, patch_size=(64, 64, 64))
    save_checkpoint(network, tmp_path / "network.pt")
    words = [str(scan_of(tmp_path, shape)), "--checkpoint", str(tmp_path / "network.pt")]
    child = subprocess.Popen(
        [sys.executable, "-m", "unet3d", "predict", *words, "--devices", "cpu"],
        stdout=subprocess.DEVNULL,
    )
    # The system's figure for a child process that has ended includes this process's memory.
    peak_bytes = 0
    while child.poll() is None:
        with suppress(OSError):
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
            peak_bytes = max([peak_bytes, *peaks])
        time.sleep(0.02)
    assert child.returncode == 0
    # The command counts its own process's memory, so it needs a new process.
    asked = in_a_process("plan", "--predict", *words, "--json", tmp_path / "m.json")
    assert "windows of 64x64x64 voxels" in asked.stdout
    predicted = json.loads((tmp_path / "m.json").read_text())["host_bytes"]
    assert predicted == pytest.approx(peak_bytes, rel=0.25)
