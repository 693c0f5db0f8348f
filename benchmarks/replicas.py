"""Training steps of replicas against those of one, in one run on one machine.

    python benchmarks/replicas.py --json out.json
    python benchmarks/replicas.py --devices cpu,cpu,cpu,cpu --shape 16,16,16 \
        --pipeline-shape 16,16,16 --channels 4,8 --warmup 1 --steps 2 --repeats 1

What is measured follows from the number of devices: one; DistributedDataParallel on 2 and on 4 with
as many samples on each; ``nn.DataParallel`` on 2 GPUs with the batch of one; 2 replicas of 2 stages
on 4 against 2 stages on 2, with twice the batch. Each way runs in processes of its own.

A time is that of a few steps in a row, as in training, from an idle machine to an idle machine,
divided by their number: forward, backward, exchange of gradients, clipping, optimizer, and the
messages that ranks send one another at every step. The median of several such times is shown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import devices_named, parse_shape, synchronize, tuning_key

from unet3d.config import ModelSettings, Shape, TrainingSettings
from unet3d.distributed.group import Group
from unet3d.distributed.launched import MEETING_FOLDER
from unet3d.distributed.processes import die_with_parent
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
from unet3d.model.optimizer import (
    Optimization,
)
from unet3d.parallel import (
    DataParallelExecutor,
    Executor,
    Layout,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.precision import (
    autocast_dtype,
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way of training."""

    name: str
    """For the table."""
    devices: tuple[tuple[str, ...], ...]
    """Of each rank."""
    batch_size: int
    """Samples of all ranks together."""
    shape: Shape
    """Voxels of each."""
    num_micro_batches: int = 1
    """Portions of a rank's samples."""
    engine: str = "ddp"
    """``ddp`` or ``dataparallel``."""
    against: str | None = None
    """Name of the way that it is compared with, in samples a second."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", help="default: all GPUs, up to 4, or cpu,cpu")
    parser.add_argument("--shape", default="128,128,128")
    parser.add_argument("--batch-size", type=int, default=2, help="of each DDP replica")
    parser.add_argument("--threads-batch-size", type=int, default=8, help="of nn.DataParallel")
    parser.add_argument("--pipeline-shape", default="192,192,192")
    parser.add_argument("--pipeline-batch-size", type=int, default=8, help="of 2 stages")
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="in a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def ways(arguments: argparse.Namespace, devices: tuple[str, ...]) -> list[Setup]:
    """Return what so many devices can show."""
    shape, size = parse_shape(arguments.shape), arguments.batch_size
    one = Setup(name="one device", devices=(devices[:1],), batch_size=size, shape=shape)
    found = [one]
    for count in (2, 4):
        if len(devices) >= count:
            replicas = tuple((device,) for device in devices[:count])
            name = f"DDP, {count} devices"
            found.append(
                Setup(
                    name=name,
                    devices=replicas,
                    batch_size=count * size,
                    shape=shape,
                    against=one.name,
                )
            )
    threads_size = arguments.threads_batch_size
    large = Setup(
        name="one device, the batch of DataParallel",
        devices=(devices[:1],),
        batch_size=threads_size,
        shape=shape,
    )
    gpus = "cpu" not in devices
    if gpus:
        found.append(large)
    if gpus and len(devices) >= 2:
        both = (devices[:2],)
        found.append(
            Setup(
                name="nn.DataParallel, 2 devices",
                devices=both,
                batch_size=threads_size,
                shape=shape,
                engine="dataparallel",
                against=large.name,
            )
        )
        ddp = tuple((device,) for device in devices[:2])
        found.append(
            Setup(
                name="DDP, 2 devices, that batch",
                devices=ddp,
                batch_size=threads_size,
                shape=shape,
                against=large.name,
            )
        )
    shape, size = parse_shape(arguments.pipeline_shape), arguments.pipeline_batch_size
    stages = Setup(
        name="1 replica of 2 stages",
        devices=(devices[:2],),
        batch_size=size,
        shape=shape,
        num_micro_batches=size,
    )
    if len(devices) >= 2:
        found.append(stages)
    if len(devices) >= 4:
        groups = (devices[:2], devices[2:4])
        name = "2 replicas of 2 stages"
        found.append(
            Setup(
                name=name,
                devices=groups,
                batch_size=2 * size,
                shape=shape,
                num_micro_batches=size,
                against=stages.name,
            )
        )
    return found


def place(model: UNet3d, way: Setup, devices: tuple[torch.device, ...], group: Group) -> Executor:
    """Return the executor of one rank."""
    autocast = autocast_dtype(resolve_precision("auto", devices))
    if way.engine == "dataparallel":
        return DataParallelExecutor(model, devices, None, autocast)
    return parallelize(
        model,
        Layout(
            devices=devices, cuts=None, num_micro_batches=way.num_micro_batches, autocast=autocast
        ),
        group,
    )


def run_rank(way: Setup, arguments: argparse.Namespace) -> None:
    """Measure one way, in one of its ranks; the first one writes the result."""
    die_with_parent()
    with joined(Ranks.from_environment()) as group:
        group.open(300)
        names = way.devices[group.ranks.rank]
        devices = devices_named(names)
        channels = tuple(int(count) for count in arguments.channels.split(","))
        topology = plan_topology(
            ModelSettings(channels=channels, deep_supervision=False),
            way.shape,
            (1.0, 1.0, 1.0),
            1,
            3,
        )
        torch.manual_seed(0)
        executor = place(UNet3d(topology), way, devices, group)
        optimization = Optimization(
            executor.module,
            TrainingSettings(),
            resolve_precision("auto", devices),
            keep_gradients=group.size > 1,
        )
        num_samples = way.batch_size // group.size
        image = torch.randn(num_samples, 1, *way.shape).to(executor.input_device)
        target = torch.randint(3, (num_samples, *way.shape), dtype=torch.uint8)
        target = target.to(executor.output_device)
        num_done = 0

        def steps(count: int) -> None:
            nonlocal num_done
            for _ in range(count):
                group.note(num_done, f"step {num_done}")
                executor.forward_backward(image, target, dice_cross_entropy, optimization.scale)
                optimization.step(1e-4)
                group.all_reduce_flags(0, False)
                num_done += 1

        gpus = {slot.device for slot in executor.slots if slot.device.type == "cuda"}
        steps(arguments.warmup)
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        seconds = []
        for _ in range(arguments.repeats):
            synchronize()
            group.exchange(None)
            began = time.perf_counter()
            steps(arguments.steps)
            synchronize()
            seconds.append((time.perf_counter() - began) / arguments.steps)
        peaks = [torch.cuda.max_memory_allocated(gpu) / 2**30 for gpu in sorted(gpus, key=str)]
        slowest = [max(of_repeat) for of_repeat in zip(*group.exchange(seconds), strict=True)]
        all_peaks = [peak for of_rank in group.exchange(peaks) for peak in of_rank]
        if group.is_first:
            step_seconds = statistics.median(slowest)
            result = {
                "step_seconds": step_seconds,
                "all_step_seconds": slowest,
                "samples_per_second": way.batch_size / step_seconds,
                "peak_gib": all_peaks,
            }
            arguments.result.write_text(json.dumps(result))


def measure(way: Setup) -> dict[str, Any]:
    """Run one way in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, *sys.argv, "--way", json.dumps(asdict(way))]
        common = {
            "WORLD_SIZE": str(len(way.devices)),
            "LOCAL_WORLD_SIZE": str(len(way.devices)),
            MEETING_FOLDER: folder,
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
        }
        ranks = [
            subprocess.Popen(
                [*command, "--result", str(result)],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(len(way.devices))
        ]
        try:
            statuses = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(statuses):
            return {"error": f"the ranks ended with {statuses}"}
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured


def main() -> None:
    """Measure every way and print the table."""
    arguments = parse_arguments()
    if arguments.way is not None:
        fields = json.loads(arguments.way)
        fields["devices"] = tuple(map(tuple, fields["devices"]))
        run_rank(Setup(**fields | {"shape": tuple(fields["shape"])}), arguments)
        return
    count = min(4, torch.cuda.device_count())
    default = ",".join(map(str, range(count))) if count else "cpu,cpu"
    names = tuple((arguments.devices or default).split(","))
    rows: list[dict[str, Any]] = []
    for way in ways(arguments, names):
        began = time.perf_counter()
        rows.append({**asdict(way), **measure(way)})
        print(f"{rows[-1]} ({time.perf_counter() - began:.0f} s)", file=sys.stderr)
    rates = {row["name"]: row.get("samples_per_second") for row in rows}
    print(f"{'':40} {'batch':>5} {'ms/step':>9} {'samples/s':>10} {'ratio':>6}  peak GiB")
    for row in rows:
        if "error" in row:
            print(f"{row['name']:40} {row['batch_size']:5} {row['error']}")
            continue
        base = rates.get(row["against"])
        row["ratio"] = row["samples_per_second"] / base if base else None
        ratio = f"{row['ratio']:.2f}x" if row["ratio"] else ""
        peaks = " ".join(f"{peak:.1f}" for peak in row["peak_gib"])
        print(
            f"{row['name']:40} {row['batch_size']:5} {1000 * row['step_seconds']:9.1f} "
            f"{row['samples_per_second']:10.2f} {ratio:>6}  {peaks}"
        )
    devices = devices_named(names)
    if arguments.json:
        record = {**tuning_key(devices, resolve_precision("auto", devices)), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
