"""Predictions of volumes that are larger than the memory for them, from zarr to OME-Zarr."""

import subprocess
import sys

import numpy as np
import pytest

from tests.networks import random_checkpoint
from unet3d.images.labels import read_label
from unet3d.runs.checkpoint import save_checkpoint

CHILD = """
import sys
from pathlib import Path

from unet3d.cli.app import main
from unet3d.images import chunked
from unet3d.inference import job, postprocessing

job.LARGE_BYTES = postprocessing.MOST_VOXELS = chunked.KEPT_BYTES = 2**20
try:
    main(sys.argv[1:])
finally:
    lines = Path("/proc/self/status").read_text().splitlines()
    print(*(line.split()[1] for line in lines if line.startswith("VmHWM:")))
"""
"""Runs the command line as if volumes of a MiB were large, and prints its peak memory in KiB."""


FULL = 500
"""Planes in which the scan is not constant; windows elsewhere are skipped, which saves time."""


def write_scan(path, size):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(path, shape=size, chunks=(64, 64, 64), dtype="u1")
    voxels = np.full(size, 7, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (size[0], FULL, size[2]), np.uint8)
    voxels[:, :FULL] = noise
    array[...] = voxels
    return path


def peak_bytes(folder, name, size):
    """Return the peak memory of the command for a scan (Z, Y, X), and the segmentation."""
    scan, network = write_scan(folder / f"{name}.zarr", size), folder / "network.pt"
    if not network.exists():
        save_checkpoint(random_checkpoint(postprocessing=((1,),)), network)
    result = folder / f"{name}.ome.zarr"
    said = ["predict", scan, "-c", network, "-o", result, "--devices", "cpu", "--overlap", "0"]
    said += ["--spacing", "1,1,1", "--window", "64,64,64", "--statistics", "--skip-background"]
    child = [sys.executable, "-c", CHILD, *map(str, said)]
    ended = subprocess.run(child, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout.split()[-1]) * 1024, result


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_does_not_grow_with_the_size_of_a_label_map(tmp_path):
    (short, _), (long, result) = (
        peak_bytes(tmp_path, name, (64, length, 128))
        for name, length in (("short", 1000), ("long", 17_000))
    )
    more = 64 * 128 * 16_000
    assert long - short < more / 2  # threads take some megabytes now and then
    labels = read_label(result).array
    assert labels.shape == (128, 17_000, 64) and set(np.unique(labels)) == {0, 1, 2}
