"""Prediction with random weights or a checkpoint: from file to file, and windows against MONAI's.

    python benchmarks/prediction.py --shape 512,512,824 --repeats 4 --json scan.json
    python benchmarks/prediction.py --devices 0,1 --against 0 --scans 8 --repeats 4 --json two.json
    python benchmarks/prediction.py --shape 301,370,316 --classes 117 --repeats 4
    python benchmarks/prediction.py --checkpoint MODEL --devices 0,1 --against 0 --repeats 3
    python benchmarks/prediction.py --inferer --windows-at-once 1,2,4 --json inferer.json
    python benchmarks/prediction.py --devices cpu --shape 40,32,32 --channels 4,8 --window 16,16,16

The scan is a compressed phantom head in int16 with voxels of 1 mm; ``unet3d predict`` runs in a
separate process. The network has random weights, or is named by ``--checkpoint``, such as a model
of nnU-Net with its folds. ``--finer 2`` halves the spacing at which a random network works;
``--scans 8`` segments a folder with eight copies of the scan; ``--predict=--tta`` passes an option
on. Host memory is the peak of the command, GPU memory nvidia-smi's value for the fullest GPU. The
first of several runs may compile kernels and is not counted; the seconds are the median of the
others. With ``--against`` runs alternate with runs on other devices, and the speed of ``--devices``
relative to those is printed.

``--inferer`` measures windows per second on a random prepared volume of that shape. Our network and
MONAI's ``SlidingWindowInferer`` with nnU-Net's compiled network run in turn. Both blend windows of
the same size and overlap with a Gaussian, and return the class of each voxel on the host. MONAI's
inferer keeps volume and logits on the device, its fastest mode; ours keeps a slab of them there.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from common import (
    CHANNELS,
    GIB,
    devices_named,
    forget_peaks,
    new_parser,
    numbers,
    one_device,
    peaks,
    reason_of,
    run_watched,
    shape,
    timed,
    words,
    write_record,
)
from trainees import NUM_CLASSES, Problem, make_network, variants_named

from unet3d.config import Shape, load_config
from unet3d.datasets.phantom import head_phantom
from unet3d.images.nifti import write_nifti
from unet3d.inference.image_slab import ImageSlab, Planes
from unet3d.inference.sliding_window import logit_slabs
from unet3d.inference.window_network import Replayed, WindowNetwork
from unet3d.inference.windows import Windows
from unet3d.kernels import strongest_class
from unet3d.model import Topology, UNet3d
from unet3d.parallel import Layout, autocast_dtype, parallelize, resolve_precision
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import Checkpoint, save_checkpoint

LARGEST_PHANTOM = 320
"""Most voxels of a generated head along an axis: more would take longer than the measurement."""

OVERLAP = 0.5


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", type=shape, default="512,512,824", help="of the scan")
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights")
    parser.add_argument("--classes", type=int, default=NUM_CLASSES)
    parser.add_argument("--channels", type=numbers, default=CHANNELS)
    parser.add_argument("--window", type=shape, default="128,128,128")
    parser.add_argument("--finer", type=float, default=1.0)
    parser.add_argument("--devices", default=one_device())
    parser.add_argument("--against", metavar="DEVICES", help="other devices to compare with")
    parser.add_argument("--scans", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--predict", action="append", default=[], help="an option of predict")
    parser.add_argument("--inferer", action="store_true", help="measure windows per second instead")
    parser.add_argument("--windows-at-once", type=numbers, default="4", help="with --inferer")
    return parser


# From file to file


def write_network(arguments: argparse.Namespace, path: Path) -> None:
    """Write a checkpoint of random weights, in which no class is favoured."""
    channels = arguments.channels
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
        patch_size=arguments.window,
        config=load_config(None, []),
        model=model.state_dict(),
        training={},
    )
    save_checkpoint(checkpoint, path)


def write_scan(path: Path, size: Shape, spacing_mm: float = 1.0) -> None:
    """Write a phantom head; a large one is a smaller one beside its mirror images."""
    pieces = [max(1, math.ceil(voxels / LARGEST_PHANTOM)) for voxels in size]
    x, y, z = (math.ceil(voxels / count) for voxels, count in zip(size, pieces, strict=True))
    image, _ = head_phantom(0, (x, y, z), (spacing_mm, spacing_mm, spacing_mm))
    voxels = image[0].astype(np.int16)
    beyond = [(0, wanted - have) for wanted, have in zip(size, voxels.shape, strict=True)]
    voxels = np.pad(voxels, beyond, mode="symmetric")
    write_nifti(path, nib.Nifti1Image(voxels, np.diag([spacing_mm] * 3 + [1.0])))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median time of the warm runs, and the peak memory of all runs."""
    failed = [run["reason"] for run in runs if "reason" in run]
    if failed:
        return {"reason": failed[0], "runs": runs}
    return {
        "seconds": statistics.median(run["seconds"] for run in runs[1:] or runs),
        "first_seconds": runs[0]["seconds"],
        "host_bytes": max(run["host_bytes"] for run in runs),
        "gpu_bytes": max(run["gpu_bytes"] for run in runs),
        "runs": runs,
    }


def from_file_to_file(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure times and memory of the command on each set of devices, and print them."""
    wanted = dict.fromkeys([arguments.devices, arguments.against or arguments.devices])
    runs: dict[str, list[dict[str, Any]]] = {devices: [] for devices in wanted}
    with tempfile.TemporaryDirectory() as name:
        folder, network = Path(name) / "scans", Path(name) / "network.pt"
        folder.mkdir()
        scan = folder / "scan.nii.gz"
        if arguments.checkpoint is None:
            write_network(arguments, network)
        else:
            network = arguments.checkpoint
        write_scan(scan, arguments.shape)
        for number in range(1, arguments.scans):
            os.link(scan, folder / f"{number}-{scan.name}")
        said = [sys.executable, "-m", "unet3d", "predict", folder, "--checkpoint", network]
        said += ["--output", Path(name) / "found", "--overwrite", *arguments.predict, "--devices"]
        for _ in range(arguments.repeats):
            for devices, of_devices in runs.items():
                of_devices.append(run_watched([*said, devices], {}))
    rows = {devices: summary(of_devices) for devices, of_devices in runs.items()}
    for devices, row in rows.items():
        if "reason" in row:
            sys.exit(f"unet3d predict on {devices}: {row['reason']}")
        each = ", ".join(f"{run['seconds']:.1f}" for run in row["runs"])
        print(
            f"{'x'.join(map(str, arguments.shape))} voxels, {arguments.classes} classes, devices "
            f"{devices}: {row['seconds']:.1f} s ({each}), host {row['host_bytes'] / GIB:.2f} GiB, "
            f"GPU {row['gpu_bytes'] / GIB:.2f} GiB"
        )
    if arguments.against is not None:
        first, second = (rows[of]["seconds"] for of in (arguments.devices, arguments.against))
        print(f"{arguments.devices}: {second / first:.2f} times as fast as {arguments.against}")
        rows[arguments.devices]["times_as_fast"] = second / first
    return rows


# Windows against MONAI's inferer


def ours(problem: Problem, device: torch.device) -> Any:
    """Return our network on a device."""
    torch.manual_seed(0)
    precision = resolve_precision("auto", [device])
    layout = Layout(devices=(device,), autocast=autocast_dtype(precision))
    executor = parallelize(UNet3d(problem.topology), layout)
    executor.module.eval()
    return executor


def segment_ours(executor: Any, image: torch.Tensor, window: Shape, at_once: int) -> None:
    """Segment a volume slab by slab."""
    x, y, z = image.shape[1:]
    topology, device = executor.module.topology, executor.input_device
    windows = Windows.of((x, y, z), topology, window, OVERLAP, at_once, [device])
    slab = ImageSlab(Planes.of(image), windows, torch.float32, device)
    replayed = Replayed(executor) if device.type == "cuda" else None
    predicting = WindowNetwork.of(executor, replayed)
    for logits in logit_slabs([predicting], slab, windows, NUM_CLASSES):
        strongest_class(logits).to(torch.uint8).cpu()


def nnunet(problem: Problem, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return nnU-Net's network as nnU-Net predicts with it: compiled, float16 on a GPU."""
    (variant,) = variants_named("nnunet-compiled")
    torch.manual_seed(0)
    network = torch.compile(make_network(variant, problem).to(device).eval())
    on_gpu = device.type == "cuda"

    def predict(image: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.float16, enabled=on_gpu):
            logits: torch.Tensor = network(image)
        return logits

    return predict


def segment_monai(
    predict: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    image: torch.Tensor,
    window: Shape,
    at_once: int,
) -> None:
    """Segment a volume with MONAI's inferer."""
    from monai.inferers import SlidingWindowInferer

    inferer = SlidingWindowInferer(
        roi_size=window,
        sw_batch_size=at_once,
        overlap=OVERLAP,
        mode="gaussian",
        sw_device=device,
        device=device,
    )
    with torch.inference_mode():
        logits = inferer(image[None].to(device), predict)
        logits.argmax(1).to(torch.uint8).cpu()


def windows_a_second(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure how many windows per second ours and MONAI do on one volume, warm, in turn."""
    (device,) = devices_named((arguments.devices,))
    problem = Problem(size=arguments.window, batch_size=1, channels=arguments.channels)
    image = torch.randn(1, *arguments.shape)
    windows = Windows.of(arguments.shape, problem.topology, arguments.window, OVERLAP, 1, [device])
    count = len(windows.starts)
    rows: dict[str, dict[str, Any]] = {}
    ways: dict[str, Callable[[], None]] = {}
    makers: dict[str, Callable[[], Callable[..., None]]] = {
        "ours": lambda: partial(segment_ours, ours(problem, device)),
        "MONAI, nnU-Net": lambda: partial(segment_monai, nnunet(problem, device), device),
    }
    for name, make in makers.items():
        try:
            segment = make()
            segment(image, arguments.window, 1)
        except Exception as error:  # a peer, or a compiler, can raise anything
            rows[name] = {"reason": reason_of(error)}
            continue
        for at_once in arguments.windows_at_once:
            key = f"{name}, {at_once}"
            ways[key] = partial(segment, image, arguments.window, at_once)
            rows[key] = {"num_windows": count, "all_seconds": []}
    torch.backends.cudnn.benchmark = True  # as nnU-Net sets it; ours is not affected
    for repeat in range(arguments.repeats + 1):
        for name, way in ways.items():
            torch.cuda.empty_cache()
            forget_peaks()
            seconds = timed(way)
            rows[name] |= peaks()
            rows[name]["all_seconds"] += seconds if repeat else []
    best: dict[str, float] = {}
    for name, row in rows.items():
        if "reason" in row:
            print(f"{name}: {row['reason']}")
            continue
        row["seconds"] = statistics.median(row["all_seconds"])
        row["windows_a_second"] = count / row["seconds"]
        held = "".join(f", {peak / GIB:.1f} GiB" for peak in row["peak_bytes"])
        print(f"{name} at a time: {row['windows_a_second']:.1f} windows/s{held}")
        kind = name.partition(",")[0]
        best[kind] = max(best.get(kind, 0.0), row["windows_a_second"])
    if len(best) == 2:
        print(f"ours does {best['ours'] / best['MONAI']:.2f} times as many a second")
    return rows


def main() -> None:
    """Measure, print the lines, write the record."""
    arguments = make_parser().parse_args()
    rows = windows_a_second(arguments) if arguments.inferer else from_file_to_file(arguments)
    names = ("shape", "classes", "channels", "window", "finer", "scans", "predict")
    write_record(
        arguments.json,
        devices_named(words(arguments.devices)),
        request={name: getattr(arguments, name) for name in names},
        rows=rows,
    )


if __name__ == "__main__":
    main()
