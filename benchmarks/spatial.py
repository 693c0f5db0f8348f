"""One volume over several devices (``--parallel spatial``) against one device, in one run.

    python benchmarks/spatial.py --json spatial.json
    python benchmarks/spatial.py --parts largest --sizes 864 --json largest.json
    taskset -c 0-7 python benchmarks/spatial.py --parts waiting --sizes 256 --json waiting.json
    python benchmarks/spatial.py --devices cpu,cpu --sizes 16,32 --channels 4,8,8 --steps 2

The parts; the first three are measured in the same processes, one for each device:

messages   what the messages of a step take, launched and replayed from a CUDA graph
step       a training step at batch 1 on the first device and on all, with the peak of each device
           and what the planner predicts; the loss of both is compared
predict    the logits of a whole cube on the first device and on all
largest    whether two steps of a cube run on all devices, in processes of its own for each cube
waiting    a whole ``unet3d train --parallel spatial``, on patches of the first size: how long it
           waits for data (``taskset`` gives it fewer cores)

A time is that of a few steps in a row, as in training, from an idle machine to an idle machine,
divided by their number: forward, backward, exchange of gradients, clipping, optimizer, and the
messages that ranks send one another at every step. The median of several such times is shown.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training
from common import devices_named, reason_of, synchronize, tuning_key

from unet3d.config import ModelSettings, Shape, TrainingSettings
from unet3d.distributed.group import Group
from unet3d.distributed.launched import MEETING_FOLDER
from unet3d.distributed.processes import die_with_parent
from unet3d.distributed.ranks import Ranks, num_cores
from unet3d.distributed.rendezvous import joined
from unet3d.model import Topology, UNet3d, dice_cross_entropy, plan_topology
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Executor, Layout, parallelize, resolve_precision
from unet3d.parallel.precision import autocast_dtype, image_dtype, to_parameter_dtype
from unet3d.parallel.spatial.division import SlabRule
from unet3d.planning.memory_estimate import Step, predict_memory

SECONDS_IN_A_ROW = 2.0
"""Steps in a row take about so long."""
WARM_UP_STEPS = 5
"""After the first; in the last of them small steps are captured."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", help="default: all GPUs, or cpu,cpu")
    parser.add_argument("--parts", default="messages,step,predict")
    parser.add_argument("--sizes", default="256,384,512", help="voxels of cubes along an axis")
    parser.add_argument("--predict-size", type=int, help="default: the last of the sizes")
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--recompute", default="norm", choices=("norm", "level", "off"))
    parser.add_argument("--cuda-graphs", default="auto", choices=("auto", "off"))
    parser.add_argument("--steps", type=int, help="in a row; default: what takes 2 seconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Bench:
    """What one rank measures together with the others."""

    def __init__(self, arguments: argparse.Namespace, names: tuple[str, ...], group: Group) -> None:
        self.arguments = arguments
        self.group = group
        self.count = len(names)
        (self.device,) = devices_named((names[group.ranks.rank],))
        self.devices = devices_named(names)
        self.precision = resolve_precision("auto", self.devices)
        self.num_done = 0

    def topology(self, size: Shape) -> Topology:
        """Return the network for cubes of a size."""
        channels = tuple(int(count) for count in self.arguments.channels.split(","))
        return plan_topology(
            ModelSettings(channels=channels, deep_supervision=False), size, (1.0, 1.0, 1.0), 1, 3
        )

    def layout(self, num_shards: int) -> Layout:
        """Return the place of this rank, alone or among all."""
        return Layout(
            devices=(self.device,),
            autocast=autocast_dtype(self.precision),
            recompute=self.arguments.recompute,
            cuda_graphs=self.arguments.cuda_graphs,
            num_shards=num_shards,
            shard=self.group.ranks.rank if num_shards > 1 else 0,
        )

    def executor(self, size: Shape, num_shards: int) -> Executor:
        """Return the same network on this device, alone or with all others."""
        torch.manual_seed(0)
        model = UNet3d(self.topology(size))
        to_parameter_dtype(model, self.precision)
        return parallelize(model, self.layout(num_shards), self.group if num_shards > 1 else None)

    def step_of(self, size: Shape, num_shards: int) -> Callable[[], torch.Tensor]:
        """Return what takes a training step and returns the loss."""
        executor = self.executor(size, num_shards)
        several = num_shards > 1
        optimization = Optimization(executor.module, TrainingSettings(), self.precision)
        generator = torch.Generator().manual_seed(0)
        image = torch.randn((1, 1, *size), generator=generator).to(image_dtype(executor.module))
        target = torch.randint(3, (1, *size), generator=generator, dtype=torch.uint8)
        rule = SlabRule(topology=self.topology(size), num_shards=num_shards)
        slab = rule.slab(self.group.ranks.rank if several else 0, size)
        image = image[:, :, slab.start : slab.stop].to(self.device)
        target = target[:, slab.start : slab.stop].to(self.device)
        planes = size[0] if several else None

        def step() -> torch.Tensor:
            if several:
                self.group.note(self.num_done, f"step {self.num_done}")
            loss = executor.forward_backward(
                image, target, dice_cross_entropy, optimization.scale, planes=planes
            )
            optimization.step(1e-4)
            if several:
                self.group.all_reduce_flags(0, False)
            self.num_done += 1
            total: torch.Tensor = loss.total
            return total

        return step

    def timed(self, work: Callable[[], Any], steps: int | None = None) -> tuple[float, int]:
        """Return the median seconds of work done several times in a row, and how many times."""
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        once = time.perf_counter() - began
        steps = steps or max(2, min(30, round(SECONDS_IN_A_ROW / once)))
        seconds = []
        for _ in range(self.arguments.repeats):
            synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                work()
            synchronize()
            seconds.append((time.perf_counter() - began) / steps)
        return statistics.median(seconds), steps

    def agreed(self, seconds: Callable[[int | None], tuple[float, int]]) -> float:
        """Return the time of the slowest rank, where all do the same number of steps."""
        steps = self.arguments.steps or max(self.group.exchange(seconds(2)[0]))
        if isinstance(steps, float):
            steps = max(2, min(30, round(SECONDS_IN_A_ROW / steps)))
        return float(max(self.group.exchange(seconds(steps)[0])))

    def measure_step(self, size: Shape) -> dict[str, Any]:
        """Measure a training step on one device and on all."""
        row: dict[str, Any] = {"size": list(size)}
        ones = self.group.exchange(self._one_device(size))
        # Two devices of a kind differ, and all together are as fast as the slowest.
        row |= {"one": ones[0], "one_seconds_of_each": [one.get("seconds") for one in ones]}
        self._clear()
        row |= self._all_devices(size)
        self._clear()
        if self.group.is_first and self.device.type == "cuda":
            row["predicted_bytes"] = self._predicted(size, self.count)
        return row

    def _one_device(self, size: Shape) -> dict[str, Any]:
        """Measure a step on this device; every rank does it, so that all compile the kernels."""
        try:
            step = self.step_of(size, 1)
            row: dict[str, Any] = self._warmed_up(step)
            row["seconds"], _ = self.timed(step, self.arguments.steps)
            return row | {"peak_bytes": self._peak(), "reserved_bytes": self._reserved()}
        except (torch.OutOfMemoryError, RuntimeError) as error:
            return {"reason": reason_of(error)}

    def _all_devices(self, size: Shape) -> dict[str, Any]:
        step = self.step_of(size, self.count)
        row = self._warmed_up(step)
        row["seconds"] = self.agreed(lambda steps: self.timed(step, steps))
        row["peak_bytes"] = self.group.exchange(self._peak())
        row["reserved_bytes"] = self.group.exchange(self._reserved())
        return row

    def _warmed_up(self, step: Callable[[], torch.Tensor]) -> dict[str, Any]:
        """Take the first steps, and return the losses of the first and the last of them."""
        first = step().item()
        self._clear()
        self._reset_peak()  # what is captured later takes the memory of the steps before
        for _ in range(WARM_UP_STEPS):
            later = step()
        return {"loss": first, "later_loss": later.item()}

    def measure_predict(self, size: Shape) -> dict[str, Any]:
        """Measure the logits of a whole cube on one device and on all."""
        image = torch.randn((1, 1, *size), generator=torch.Generator().manual_seed(0))
        image = image.to(self.device, image_dtype(UNet3d(self.topology(size))))
        one_seconds, one = self._predicted_by(size, 1, image)
        self._clear()
        seconds, several = self._predicted_by(size, self.count, image)
        self._clear()
        return {
            "size": list(size),
            "one_seconds": one_seconds,
            "seconds": seconds,
            "largest_difference": (several - one).abs().max().item(),
            "same_label": (several.argmax(1) == one.argmax(1)).float().mean().item(),
        }

    def _predicted_by(
        self, size: Shape, num_shards: int, image: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        executor = self.executor(size, num_shards)
        executor.module.eval()
        logits = executor.predict(image).float().cpu()
        return self.agreed(lambda steps: self.timed(lambda: executor.predict(image), steps)), logits

    def measure_messages(self) -> list[dict[str, Any]]:
        """Measure what goes between the devices, in microseconds.

        Half of the bytes of an exchange go to each neighbour, and as many come from it.
        """
        group = self.group.new_group(self.device)
        rows = []
        kilo = [1, 64, 1024, 4096, 16384]
        work: dict[str, Callable[[], Any]] = {}
        for kib in kilo:
            counts = self._neighbour_counts(kib * 1024)
            sent = torch.zeros(sum(counts), dtype=torch.uint8, device=self.device)
            given = (torch.empty_like(sent), sent, counts, counts)
            work[f"exchange {kib} KiB"] = partial(dist.all_to_all_single, *given, group=group)
        few = torch.zeros(640, device=self.device)
        many = torch.empty(640 * self.count, device=self.device)
        work["gather 640 floats"] = lambda: dist.all_gather(
            list(torch.split(many, 640)), few, group=group
        )
        work["sum 640 floats"] = lambda: dist.all_reduce(few, group=group)
        flat = torch.zeros(31_200_000, device=self.device)
        work["sum 125 MB"] = lambda: dist.all_reduce(flat, group=group)
        for name, message in work.items():
            row: dict[str, Any] = {"message": name}
            for _ in range(3):
                message()
            row["launched_us"] = 1e6 * self._of_many(message)
            if self.device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                synchronize()
                self.group.exchange(None)
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(20):
                        message()
                row["replayed_us"] = 1e6 * self._of_many(graph.replay, 10) / 20
            rows.append(row)
        return rows

    def _of_many(self, work: Callable[[], Any], count: int = 100) -> float:
        count = count if self.device.type == "cuda" else 5
        self.group.exchange(None)
        work()  # the ranks leave an exchange at different times, but this one together
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            work()
        synchronize()
        return float(max(self.group.exchange((time.perf_counter() - began) / count)))

    def _neighbour_counts(self, number: int) -> list[int]:
        counts, rank = [0] * self.count, self.group.ranks.rank
        neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < self.count]
        for other in neighbours:
            counts[other] = number // 2
        return counts

    def measure_largest(self, size: Shape) -> dict[str, Any]:
        """See whether two steps of a cube run on all devices."""
        step = self.step_of(size, self.count)
        step()
        self._reset_peak()
        began = time.perf_counter()
        step()
        synchronize()
        seconds = time.perf_counter() - began
        peaks = self.group.exchange(self._peak())
        return {"size": list(size), "trains": True, "seconds": seconds, "peak_bytes": peaks}

    def _predicted(self, size: Shape, num_shards: int) -> int:
        step = Step(
            topology=self.topology(size),
            layout=replace(self.layout(num_shards), shard=0),
            size=size,
            batch_size=1,
            settings=TrainingSettings(),
            precision=self.precision,
        )
        return predict_memory(step, counts_reserved=False).memory[0].peak_bytes

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def run_rank(arguments: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Measure the parts, in one rank; the first one writes the result."""
    die_with_parent()
    record: dict[str, Any] = {}
    sizes = [int(size) for size in arguments.sizes.split(",")]
    with joined(Ranks.from_environment()) as group:
        group.open(300)
        bench = Bench(arguments, names, group)
        if bench.device.type == "cuda":
            torch.cuda.set_device(bench.device)

        def note(part: str, value: Any) -> None:
            if group.is_first:
                record.setdefault(part, []).append(value)
                arguments.rank_result.write_text(json.dumps(record))
                print(part, value, file=sys.stderr, flush=True)

        for part in arguments.parts.split(","):
            if part == "messages":
                for row in bench.measure_messages():
                    note(part, row)
            elif part == "step":
                for size in sizes:
                    note(part, bench.measure_step((size, size, size)))
            elif part == "predict":
                size = arguments.predict_size or sizes[-1]
                note(part, bench.measure_predict((size, size, size)))
            else:
                note(part, bench.measure_largest((sizes[0], sizes[0], sizes[0])))


def measure(names: tuple[str, ...], changes: list[str]) -> dict[str, Any]:
    """Run the ranks, and return what the first one has measured so far, and why it ended early."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, *sys.argv, *changes, "--rank-result", str(result)]
        common = {
            "WORLD_SIZE": str(len(names)),
            "LOCAL_WORLD_SIZE": str(len(names)),
            MEETING_FOLDER: folder,
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
        }
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(len(names))
        ]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):
                    break  # the others would wait for it
                time.sleep(0.1)
            statuses = [rank.poll() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        record: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if any(statuses):
            record["error"] = f"the ranks ended with {statuses}"
        return record


def measure_waiting(names: Sequence[str], size: int, arguments: argparse.Namespace) -> Any:
    """Measure a whole training on patches of volumes that are a little larger."""
    cube, volume = (",".join([str(voxels)] * 3) for voxels in (size, size + 32))
    devices = ",".join(names)
    given = training.make_parser().parse_args(
        ["--parallel", "spatial", "--runs", devices, "--batch-size", "1", "--shape", cube,
         "--volume", volume, "--channels", arguments.channels,
         "--steps", str(arguments.steps or 24)]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        run = training.run_training(given, Path(cache), devices)
    return {"size": [size] * 3, "num_cores": num_cores(), **run}


def print_table(record: dict[str, Any], count: int) -> None:
    """Print what was measured."""
    for row in record.get("messages", []):
        replayed = f"{row['replayed_us']:8.1f}" if "replayed_us" in row else ""
        print(f"{row['message']:22} launched {row['launched_us']:8.1f} us, replayed {replayed}")
    if "step" in record:
        print(
            f"{'step':>6} {'one ms':>9} {count:>3} ms {'ratio':>6}  peaks GiB, one: all, predicted"
        )
    for row in record.get("step", []):
        one = row.get("one", {})
        ratio = f"{one['seconds'] / row['seconds']:.3f}" if "seconds" in one else "-"
        gib = [f"{peak / 2**30:.2f}" for peak in row["peak_bytes"]]
        print(
            f"{row['size'][0]:6} {1000 * one.get('seconds', 0):9.2f} {1000 * row['seconds']:8.2f} "
            f"{ratio:>6}  {one.get('peak_bytes', 0) / 2**30:.2f}: {' '.join(gib)}, "
            f"{row.get('predicted_bytes', 0) / 2**30:.2f}; loss {row['loss']:.5f} "
            f"({one.get('loss', 0):.5f}), later {row['later_loss']:.5f} "
            f"({one.get('later_loss', 0):.5f})"
        )
        each = [
            f"{1000 * seconds:.2f}" for seconds in row.get("one_seconds_of_each", []) if seconds
        ]
        print(f"       one ms, by device: {' '.join(each)}")
    for row in record.get("predict", []):
        print(
            f"predict {row['size'][0]}: {row['one_seconds']:.4f} s on one, {row['seconds']:.4f} on "
            f"{count}: {row['one_seconds'] / row['seconds']:.3f}; labels alike "
            f"{row['same_label']:.5f}"
        )
    for row in record.get("largest", []) + record.get("waiting", []):
        print(row)
    if "error" in record:
        print(record["error"])


def main() -> None:
    """Measure the parts and print a table."""
    arguments = parse_arguments()
    count = torch.cuda.device_count()
    default = ",".join(map(str, range(count))) if count else "cpu,cpu"
    names = tuple((arguments.devices or default).split(","))
    if arguments.rank_result is not None:
        run_rank(arguments, names)
        return
    parts = arguments.parts.split(",")
    together = [part for part in parts if part not in ("largest", "waiting")]
    record = measure(names, ["--parts", ",".join(together)]) if together else {}
    for size in arguments.sizes.split(",") if "largest" in parts else ():
        attempt = measure(names, ["--parts", "largest", "--sizes", size])
        failed = {"size": [int(size)] * 3, "trains": False, "reason": attempt.get("error")}
        record.setdefault("largest", []).extend(attempt.get("largest", [failed]))
    if "waiting" in parts:
        first = int(arguments.sizes.split(",")[0])
        record["waiting"] = [measure_waiting(names, first, arguments)]
    print_table(record, len(names))
    devices = devices_named(names)
    if arguments.json:
        record = {**tuning_key(devices, resolve_precision("auto", devices)), **record}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
