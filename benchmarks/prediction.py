"""Time and memory of ``unet3d predict`` from file to file, with a network of random weights.

    python benchmarks/prediction.py --shape 301,370,316 --classes 117 --channels 4,8
        [--window 64,64,64] [--finer 2] [--devices cpu] [--plain] [--repeats 3] [--scans 8]
        [--predict=--tta] [--json FILE]
    python benchmarks/prediction.py --devices 0,1 --against 0 --scans 8 --repeats 3 --json FILE

The scan is a phantom head in int16, compressed unless it is ``--plain``, and the command a process
of its own. ``--finer 2`` gives the network half the scan's spacing; with ``--scans`` a folder of
copies is segmented. Host memory is the most that the process had resident, GPU memory what
nvidia-smi says of the whole GPU at most. The first run may compile kernels, so of several the first
is not counted, and the seconds are the median of the others. ``--against`` measures the same on
other devices as well, in turn, and says how many times as fast the first ones are.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from common import parse_shape, tuning_key

from unet3d.config import load_config
from unet3d.model import Topology, UNet3d
from unet3d.runs.checkpoint import Checkpoint, save_checkpoint
from unet3d.volumes.files import write_nifti
from unet3d.volumes.normalization import ChannelNormalization
from unet3d.volumes.phantom_anatomy import head_phantom
from unet3d.volumes.transform import Preprocessing

SECONDS_BETWEEN_LOOKS = 0.2

LARGEST_PHANTOM = 320
"""Voxels along an axis; making more of them takes longer than what is measured."""


def write_network(arguments: argparse.Namespace, path: Path) -> None:
    """Write a checkpoint of random weights, in which no class is favoured."""
    channels = tuple(int(number) for number in arguments.channels.split(","))
    topology = Topology(
        in_channels=1,
        num_classes=arguments.classes,
        channels=channels,
        strides=((1, 1, 1), *[(2, 2, 2)] * (len(channels) - 1)),
    )
    torch.manual_seed(0)
    model = UNet3d(topology)
    spacing = 1 / arguments.finer
    labels = range(arguments.classes)
    checkpoint = Checkpoint(
        topology=topology,
        preprocessing=Preprocessing(
            spacing_mm=(spacing, spacing, spacing),
            channels=(ChannelNormalization(kind="z-score"),),
            channel_names=("MRI",),
            label_names=tuple(f"label {value}" for value in labels),
            label_values=tuple(labels),
        ),
        patch_size=parse_shape(arguments.window),
        config=load_config(None, []),
        model=model.state_dict(),
        training={},
    )
    save_checkpoint(checkpoint, path)


def write_scan(arguments: argparse.Namespace, path: Path) -> None:
    """Write a phantom head of 1 mm; a large one is a smaller one beside its mirror images."""
    shape = parse_shape(arguments.shape)
    pieces = [max(1, math.ceil(size / LARGEST_PHANTOM)) for size in shape]
    x, y, z = (math.ceil(size / count) for size, count in zip(shape, pieces, strict=True))
    image, _ = head_phantom(0, (x, y, z))
    voxels = np.round(1000 * image[0]).astype(np.int16)
    beyond = [(0, size - have) for size, have in zip(shape, voxels.shape, strict=True)]
    voxels = np.pad(voxels, beyond, mode="symmetric")
    write_nifti(path, nib.Nifti1Image(voxels, np.eye(4)))


def watch_host(pid: int, stop: threading.Event, peaks: list[int]) -> None:
    """Note the most that a process had resident, until told to stop.

    What the system tells of a child that has ended counts its parent's memory, too.
    """
    while not stop.wait(SECONDS_BETWEEN_LOOKS):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:  # it has ended
            return
        peaks += [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]


def watch_gpu(stop: threading.Event, peaks: list[int]) -> None:
    """Note the most that the first GPU holds, until told to stop."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    while not stop.wait(SECONDS_BETWEEN_LOOKS):
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        peaks.append(int(said) * 2**20)


def main() -> None:
    """Predict, print a line, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="512,512,824")
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--window", default="128,128,128")
    parser.add_argument("--finer", type=float, default=1.0)
    parser.add_argument("--devices", default="0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--against", metavar="DEVICES", help="compare with these")
    parser.add_argument("--plain", action="store_true", help="do not compress the scan")
    parser.add_argument("--scans", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--predict", action="append", default=[], help="an option of predict")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    against = [] if arguments.against is None else [arguments.against]
    rows: dict[str, list[dict[str, float]]] = {of: [] for of in (arguments.devices, *against)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "scans"
        folder.mkdir()
        network = Path(name) / "network.pt"
        scan = folder / f"scan.nii{'' if arguments.plain else '.gz'}"
        write_network(arguments, network)
        write_scan(arguments, scan)
        for number in range(1, arguments.scans):
            os.link(scan, folder / f"{number}-{scan.name}")
        words = ["predict", folder, "--checkpoint", network, *arguments.predict]
        words += ["--output", Path(name) / "found", "--overwrite", "--devices"]
        for _ in range(arguments.repeats):
            for of, runs in rows.items():
                runs.append(predict([*map(str, words), of], not of.startswith("cpu")))
    found = {of: summary(runs) for of, runs in rows.items()}
    row = {
        **found[arguments.devices],
        "against": {of: found[of] for of in against},
        "request": {
            "devices": arguments.devices,
            "shape": arguments.shape,
            "classes": arguments.classes,
            "channels": arguments.channels,
            "window": arguments.window,
            "finer": arguments.finer,
            "plain": arguments.plain,
            "scans": arguments.scans,
            "predict": arguments.predict,
        },
    }
    gib = 2**30
    for of, one in found.items():
        each = ", ".join(format(run["seconds"], ".1f") for run in rows[of])
        print(
            f"{arguments.shape} voxels, {arguments.classes} classes, devices {of}: "
            f"{one['seconds']:.1f} s ({each}), "
            f"host {one['host_bytes'] / gib:.2f} GiB, GPU {one['gpu_bytes'] / gib:.2f} GiB"
        )
    for of in against:
        times = found[of]["seconds"] / found[arguments.devices]["seconds"]
        print(f"devices {arguments.devices} are {times:.2f} times as fast as {of}")
    if arguments.json is not None:
        devices = [torch.device("cpu" if arguments.devices.startswith("cpu") else "cuda:0")]
        record = {**tuning_key(devices, "as unet3d predict takes it"), **row}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median time of runs on the same devices, and the most memory."""
    return {
        "seconds": statistics.median(one["seconds"] for one in runs[1:] or runs),
        "host_bytes": max(one["host_bytes"] for one in runs),
        "gpu_bytes": max(one["gpu_bytes"] for one in runs),
        "runs": runs,
    }


def predict(words: list[str], on_gpu: bool) -> dict[str, float]:
    """Run the command once."""
    stop, peaks, resident = threading.Event(), [0], [0]
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "unet3d", *words], stdout=sys.stderr.fileno())
    looking = [threading.Thread(target=watch_host, args=(child.pid, stop, resident))]
    if on_gpu and shutil.which("nvidia-smi"):
        looking.append(threading.Thread(target=watch_gpu, args=(stop, peaks)))
    for thread in looking:
        thread.start()
    status = child.wait()
    seconds = time.perf_counter() - began
    stop.set()
    for thread in looking:
        thread.join()
    if status:
        sys.exit("unet3d predict failed")
    return {"seconds": seconds, "host_bytes": max(resident), "gpu_bytes": max(peaks)}


if __name__ == "__main__":
    main()
