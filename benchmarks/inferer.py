"""Windows a second of a whole volume: ours, and MONAI's inferer with nnU-Net's network compiled.

    python benchmarks/inferer.py --shape 512,512,824 --window 128,128,128 [--batch 1,2,4,8]
        [--repeats 3] [--json FILE]

Both blend windows of the same size and overlap with a Gaussian, and give the class of each voxel.
The volume is random and prepared already. MONAI's inferer has the volume, its logits and its
weights on the device, which is the fastest way to use it; ours keeps a slab of them there. Those
that are compared take turns, and times are medians after a first round that is not counted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import parse_shape, peaks_of, synchronize, tuning_key
from monai.inferers import SlidingWindowInferer
from peers import Problem, find_variants, make_network

from unet3d.config import Shape
from unet3d.inference.image_slab import ImageSlab, WholeImage
from unet3d.inference.replaying import ReplayedNetwork
from unet3d.inference.sliding_window import logit_slabs
from unet3d.inference.windows import Windows
from unet3d.kernels import strongest_class
from unet3d.model import UNet3d
from unet3d.parallel import Layout, autocast_dtype, parallelize, resolve_precision

NUM_CLASSES = 3


def ours(problem: Problem, device: torch.device) -> Any:
    """Return our network on a device, and how the device computes it."""
    torch.manual_seed(0)
    precision = resolve_precision("auto", [device])
    network = UNet3d(problem.topology)
    executor = parallelize(network, Layout(devices=(device,), autocast=autocast_dtype(precision)))
    executor.module.eval()
    return executor


def segment_ours(
    executor: Any, image: torch.Tensor, window: Shape, overlap: float, batch_size: int
) -> None:
    """Segment a volume slab by slab."""
    x, y, z = image.shape[1:]
    topology, device = executor.module.topology, executor.input_device
    windows = Windows.of((x, y, z), topology, window, overlap, batch_size, [device])
    slab = ImageSlab(WholeImage(image), windows, torch.float32, device)
    predicting = ReplayedNetwork(executor) if device.type == "cuda" else executor
    for logits in logit_slabs([predicting], slab, windows, NUM_CLASSES):
        strongest_class(logits).to(torch.uint8).cpu()


def nnunet(problem: Problem, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return nnU-Net's network as nnU-Net predicts with it: compiled, float16 on a GPU."""
    (variant,) = find_variants("nnunet-compiled")
    torch.manual_seed(0)
    network = torch.compile(make_network(variant, problem).to(device).eval())
    is_gpu = device.type == "cuda"

    def predict(image: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.float16, enabled=is_gpu):
            logits: torch.Tensor = network(image)
        return logits

    return predict


def segment_monai(
    predict: Callable[[torch.Tensor], torch.Tensor],
    image: torch.Tensor,
    window: Shape,
    overlap: float,
    batch_size: int,
    device: torch.device,
) -> None:
    """Segment a volume with MONAI's inferer."""
    inferer = SlidingWindowInferer(
        roi_size=window,
        sw_batch_size=batch_size,
        overlap=overlap,
        mode="gaussian",
        sw_device=device,
        device=device,
    )
    with torch.inference_mode():
        logits = inferer(image[None].to(device), predict)
        logits.argmax(1).to(torch.uint8).cpu()


def main() -> None:
    """Measure, print a line for each, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="512,512,824")
    parser.add_argument("--window", default="128,128,128")
    parser.add_argument("--overlap", type=float, default=0.5)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--batch", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, window = torch.device(arguments.device), parse_shape(arguments.window)
    channels = tuple(int(number) for number in arguments.channels.split(","))
    problem = Problem(size=window, batch_size=1, channels=channels)
    image = torch.randn(1, *parse_shape(arguments.shape))
    count = Windows.count(image.shape[1:], problem.topology, window, arguments.overlap)
    executor, predict = ours(problem, device), nnunet(problem, device)
    torch.backends.cudnn.benchmark = True  # as nnU-Net has it; ours does not care
    ways: dict[str, Callable[[], None]] = {}
    for batch_size in map(int, arguments.batch.split(",")):
        request = (image, window, arguments.overlap, batch_size)
        ways[f"ours, {batch_size}"] = partial(segment_ours, executor, *request)
        ways[f"MONAI, nnU-Net, {batch_size}"] = partial(segment_monai, predict, *request, device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    for repeat in range(arguments.repeats + 1):
        for name, way in ways.items():
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            synchronize()
            began = time.perf_counter()
            way()
            synchronize()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
            peaks[name] = peaks_of(device).get("peak_bytes", 0)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(
            f"{name} at a time: {median:.2f} s, {count / median:.1f} windows/s, "
            f"{peaks[name] / 2**30:.1f} GiB"
        )
    best = {
        kind: min(median for name, median in medians.items() if name.startswith(kind))
        for kind in ("ours", "MONAI")
    }
    print(f"{count} windows; ours does {best['MONAI'] / best['ours']:.2f} times as many a second")
    if arguments.json is not None:
        record = tuning_key([device], "as each takes it") | {
            "shape": arguments.shape,
            "window": arguments.window,
            "overlap": arguments.overlap,
            "num_windows": count,
            "seconds": seconds,
            "peak_bytes": peaks,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
