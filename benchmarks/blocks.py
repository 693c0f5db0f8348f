"""Prediction in blocks: speed against a volume in memory and on two devices, and host memory.

    python benchmarks/blocks.py --shape 1024,1024,1024 --devices 0 --json blocks.json
    python benchmarks/blocks.py --shape 2048,1024,1024 --devices 0,1 --predict=--tta --repeats 2
    python benchmarks/blocks.py --shape 256,256,256 --devices cpu --window 32,32,32 --channels 4,8
    python benchmarks/blocks.py --shape 384,256,256 --block 128 --window 64,64,64 \
        --channels 8,16,32 --workers 2

On one device, the first line is the rate of windows from OME-Zarr to OME-Zarr in blocks, without
the first block, against the same network on a volume in memory. Then ``unet3d predict --block``
runs in a process of its own. Last, it segments 20 blocks of a volume of 10^12 voxels, whose chunks
are all missing, so that they are zero. On several devices, only the command runs, on the first
device and on all, ``--repeats`` times each in turn; the shortest time counts. The network has
random weights. ``--predict=--tta`` passes an option on. Needs the extra ``microscopy``.

With ``--workers``, only the command runs, on a CPU: alone on one core, then that many times at
once, on a core each.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zarr
from common import (
    CHANNELS,
    GIB,
    devices_named,
    new_parser,
    numbers,
    one_device,
    run_watched,
    shape,
    timed,
    words,
    write_record,
)
from large_predict import Pattern, write_scan
from prediction import OVERLAP, ours, segment_ours, write_network
from trainees import Problem

from unet3d.config import ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.images.image import open_image
from unet3d.images.label_store import LabelStore
from unet3d.images.source import AS_STATED
from unet3d.inference.block_prediction import segment_in_blocks
from unet3d.inference.networks import Networks
from unet3d.inference.predictor import Predictor
from unet3d.inference.region import Region
from unet3d.inference.request import PredictionRequest
from unet3d.inference.windows import Windows

HUGE = 10_000
"""Voxels along each axis of the largest volume."""

IN_MEMORY = 5
"""Windows along each axis of the volume in memory."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", type=shape, default="1024,1024,1024", help="of the scan")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--window", type=shape, default="128,128,128")
    parser.add_argument("--channels", type=numbers, default=CHANNELS)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--devices", default=one_device(), help="such as 0,1")
    parser.add_argument("--predict", action="append", default=[], help="an option of predict")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each command")
    parser.add_argument("--workers", type=int, help="processes on a core each")
    parser.add_argument("--huge-parts", type=int, default=400, help="parts of the 8,000 blocks")
    parser.set_defaults(finer=1000)  # the network works at the spacing of the scan, 1 µm
    return parser


def rate_in_memory(arguments: argparse.Namespace, device: torch.device, at_once: int) -> float:
    """Return windows a second of a volume in memory."""
    problem = Problem(size=arguments.window, batch_size=1, channels=arguments.channels)
    x, y, z = ((IN_MEMORY + 1) * n // 2 for n in arguments.window)
    image = torch.randn(1, x, y, z)
    executor = ours(problem, device)
    windows = Windows.of((x, y, z), problem.topology, arguments.window, OVERLAP, at_once, [device])
    segment_ours(executor, image, arguments.window, at_once)
    seconds = timed(lambda: segment_ours(executor, image, arguments.window, at_once))
    return len(windows.starts) / statistics.median(seconds)


def rate_in_blocks(
    arguments: argparse.Namespace, scan: Path, network: Path, output: Path, device: str
) -> float:
    """Return windows a second from store to store."""
    changes = {} if device != "cpu" else {"inference.precision": "float32"}
    networks = Networks.read([network], Group(Ranks()), changes)
    predictor = Predictor(networks, ParallelSettings(mode="none", devices=(device,)))
    ends: list[float] = []
    image = open_image([scan])
    request = PredictionRequest(block=arguments.block)
    segment_in_blocks(
        *(image, Region(image, request, AS_STATED), output, predictor, request),
        lambda done, total: ends.append(time.perf_counter()),
    )
    topology = networks.described[0].topology
    boxes = LabelStore(output).blocks(0)
    place = [torch.device("cuda" if device != "cpu" else "cpu")]
    made = [
        Windows.of(arguments.shape, topology, arguments.window, OVERLAP, 1, place, block=box)
        for box in boxes
    ]
    # A call comes before each block, which begins anywhere, so all count alike.
    counts = [len(windows.starts) for windows in made]
    alike = Windows.of(arguments.shape, topology, arguments.window, OVERLAP, 1, place)
    mean = sum(counts) / len(counts)
    print(
        f"{len(boxes)} blocks of {arguments.block}: {sum(counts)} windows, "
        f"{sum(counts) / len(alike.starts):.2f} times those of the whole"
    )
    return mean * (len(boxes) - 1) / (ends[len(boxes)] - ends[1])


def command(arguments: argparse.Namespace, scan: Path, network: Path, output: Path) -> list[Any]:
    """Return the command for any number of processes, without devices."""
    said: list[Any] = [sys.executable, "-m", "unet3d", "predict", scan, "-c", network]
    return [*said, "-o", output, "--block", arguments.block, *arguments.predict, "--continue"]


def commands(
    arguments: argparse.Namespace, scan: Path, network: Path, folder: Path
) -> dict[str, dict[str, Any]]:
    """Run the command on the first device and on all."""
    rows: dict[str, dict[str, Any]] = {}
    for repeat in range(arguments.repeats):
        for devices in dict.fromkeys([arguments.devices.split(",")[0], arguments.devices]):
            output = folder / f"{repeat}-on-{devices.replace(',', '-')}.ome.zarr"
            said = command(arguments, scan, network, output)
            row = run_watched([*said, "--devices", devices], {})
            if "reason" in row:
                sys.exit(f"unet3d predict on {devices}: {row['reason']}")
            print(f"on {devices}: {row['seconds']:.1f} s, host {row['host_bytes'] / GIB:.2f} GiB")
            if repeat == 0 or row["seconds"] < rows[devices]["seconds"]:
                rows[devices] = row
    return rows


def on_cores(
    arguments: argparse.Namespace, scan: Path, network: Path, folder: Path
) -> dict[str, dict[str, Any]]:
    """Run the command on one core, then once on each of several cores at the same time."""
    rows = {}
    one_thread = {"OMP_NUM_THREADS": "1"}
    for number in (1, arguments.workers):
        said = command(arguments, scan, network, folder / f"by-{number}.ome.zarr")
        said += ["--devices", "cpu"]
        cores = sorted(os.sched_getaffinity(0))[:number]
        began = time.perf_counter()
        with ThreadPoolExecutor(number) as threads:
            on_core = [["taskset", "-c", core, *said] for core in cores]
            ended = list(threads.map(partial(run_watched, environment=one_thread), on_core))
        seconds = time.perf_counter() - began
        for row in ended:
            if "reason" in row:
                sys.exit(f"unet3d predict: {row['reason']}")
        rows[f"{number} on cores"] = {"seconds": seconds, "processes": ended}
        print(f"{number} at once, on a core each: {seconds:.1f} s")
    return rows


def huge(arguments: argparse.Namespace, network: Path, folder: Path) -> dict[str, Any]:
    """Segment a part of a volume of 10^12 voxels."""
    scan = folder / "huge.ome.zarr"
    write_scan(scan, (1, 1, 1), Pattern((1, 1, 1), None), 1)
    group = zarr.open_group(scan, mode="r+")
    del group["0"]
    group.create_array("0", shape=(HUGE,) * 3, chunks=(128,) * 3, dtype="uint8")
    said: list[Any] = [sys.executable, "-m", "unet3d", "predict", scan, "-c", network]
    said += ["-o", folder / "of-huge.ome.zarr", "--part", f"1/{arguments.huge_parts}"]
    said += ["--overlap", "0", "--devices", arguments.devices]
    row = run_watched(said, {})
    if "reason" in row:
        sys.exit(f"unet3d predict: {row['reason']}")
    blocks = -((-HUGE // 512) ** 3) // arguments.huge_parts
    print(
        f"{blocks} blocks of 512^3 of 10^12 voxels: {row['seconds']:.1f} s, host "
        f"{row['host_bytes'] / GIB:.2f} GiB"
    )
    return row


def on_one_device(
    arguments: argparse.Namespace, scan: Path, network: Path, folder: Path
) -> dict[str, dict[str, Any]]:
    """Measure rates, the command, and memory."""
    if max(arguments.shape) <= arguments.block:
        sys.exit("--shape is a single block; name more, because the rate leaves out the first")
    (device,) = devices_named(words(arguments.devices))
    output = folder / "rate.ome.zarr"
    in_blocks = rate_in_blocks(arguments, scan, network, output, arguments.devices)
    in_memory = max(rate_in_memory(arguments, device, at_once) for at_once in (1, 4))
    print(
        f"windows a second: {in_blocks:.1f} from store to store, {in_memory:.1f} in memory, "
        f"{in_blocks / in_memory:.3f}"
    )
    rows = commands(arguments, scan, network, folder)
    rows["huge"] = huge(arguments, network, folder)
    rows["windows_a_second"] = {"in_blocks": in_blocks, "in_memory": in_memory}
    return rows


def main() -> None:
    """Measure, print the lines, write the record."""
    arguments = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scan, network = folder / "scan.ome.zarr", folder / "network.pt"
        write_scan(scan, arguments.shape, Pattern(arguments.shape, None), 1)
        write_network(arguments, network)
        measure = on_one_device
        if arguments.workers is not None:
            measure = on_cores
        elif len(words(arguments.devices)) > 1:
            measure = commands
        rows = measure(arguments, scan, network, folder)
    if measure is not on_one_device:
        (_, one), (name, several) = rows.items()
        ratio = one["seconds"] / several["seconds"]
        print(f"{name}: {ratio:.2f} times as fast as one")
    names = ("shape", "block", "window", "channels", "classes", "predict", "repeats", "huge_parts")
    write_record(
        arguments.json,
        devices_named(words(arguments.devices)),
        request={name: getattr(arguments, name) for name in names},
        rows=rows,
    )


if __name__ == "__main__":
    main()
