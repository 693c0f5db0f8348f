"""One training step of the same network and batch, spread in different ways, in one process.

    python benchmarks/parallel.py --devices 0,1 --shape 192,192,192 --batch-size 8 --json out.json
    python benchmarks/parallel.py --devices cpu,cpu --shape 32,32,32 --batch-size 2 --channels 4,8

Times are medians of steps after a warm-up, each from an idle machine to an idle machine, forward,
backward and optimizer included. ``limit`` is the time that the pipeline would take if each stage
were always busy but for filling and draining: with a and b the measured times of one micro-batch
through each of two stages, launched without CUDA graphs, (a + b) + (m - 1) max(a, b).

``forward-only pipeline`` is the one of PyTorch's model-parallel tutorial: micro-batches overlap in
forward only; their logits are gathered, and one backward of one loss goes through all of them.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from common import devices_named, parse_shape, synchronize, tuning_key
from torch import Tensor

from unet3d.config import Balance, ModelSettings
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology, run_blocks
from unet3d.parallel import Layout, Loss, Slot, choose_cuts, parallelize, resolve_precision
from unet3d.parallel.executor import LossFunction, NoObserver, as_loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--shape", default="192,192,192")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cuts", action="append", default=[], help="a cut to try besides")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class ForwardOnlyPipeline:
    """The tutorial's pipeline over the stages of another executor, with its kernels."""

    def __init__(self, placed: Any, num_micro_batches: int, autocast: torch.dtype | None) -> None:
        self.placed = placed
        self.autocast = autocast
        self.num_micro_batches = num_micro_batches
        self.module, self.slots = placed.module, placed.slots
        self.input_device, self.output_device = placed.input_device, placed.output_device

    def forward_backward(self, image: Tensor, target: Tensor, loss_fn: LossFunction) -> Loss:
        """Add one batch's gradients to the module's."""
        stages = self.placed.stages
        alive = [{"image": portion} for portion in image.tensor_split(self.num_micro_batches)]
        for step in range(len(alive) + len(stages) - 1):
            # The later stage is queued first: it works while the earlier takes the next one.
            for number in reversed(range(len(stages))):
                if 0 <= step - number < len(alive):
                    alive[step - number] = self._forward(number, alive[step - number])
        terms = as_loss(loss_fn(torch.cat([made["head"] for made in alive]), target))
        torch.autograd.backward(terms.total)
        return terms.detached()

    def _forward(self, number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stage, later = self.placed.stages[number], self.placed.stages[number + 1 :]
        device = stage.slot.device
        lowered = self.autocast if device.type == "cuda" else None
        dtype = None if lowered else torch.float32
        received = {name: tensors[name].to(device, dtype) for name in stage.inputs}
        with torch.autocast(device.type, lowered) if lowered else nullcontext():
            made = run_blocks(stage.blocks, received, stage.outputs)
        wanted = {name for other in later for name in other.inputs} | {"head"}
        return {name: value for name, value in (tensors | made).items() if name in wanted}


class StageClock(NoObserver):
    """Adds up the seconds of each stage's actions in one step, with nothing else running."""

    def __init__(self, num_stages: int) -> None:
        self.seconds = [0.0] * num_stages

    @contextmanager
    def during(self, slot: Slot, kind: str, micro_batch: int) -> Iterator[None]:
        """Time one action."""
        synchronize()
        began = time.perf_counter()
        yield
        synchronize()
        self.seconds[slot.index] += time.perf_counter() - began


class Bench:
    """One network, one batch, and ways to train on it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.devices = devices_named(arguments.devices.split(","))
        x, y, z = parse_shape(arguments.shape)
        channels = tuple(int(count) for count in arguments.channels.split(","))
        settings = ModelSettings(channels=channels, deep_supervision=False)
        self.topology = plan_topology(settings, (x, y, z), (1.0, 1.0, 1.0), 1, 3)
        torch.manual_seed(0)
        self.image = torch.randn(arguments.batch_size, 1, x, y, z)
        self.target = torch.randint(3, (arguments.batch_size, x, y, z), dtype=torch.uint8)
        self.precision = resolve_precision("auto", self.devices)
        self.autocast = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.precision)
        self.rows: list[dict[str, Any]] = []

    def measure(
        self,
        name: str,
        devices: tuple[torch.device, ...],
        *,
        num_micro_batches: int,
        cuts: tuple[int, ...] | None = None,
        schedule: Any = "1f1b",
        forward_only: bool = False,
        observer: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Time one way, or note that it does not fit."""
        row: dict[str, Any] = {"name": name, "cuts": cuts, "num_micro_batches": num_micro_batches}
        self.rows.append(row)
        try:
            torch.manual_seed(0)
            layout = Layout(
                devices=devices,
                cuts=cuts,
                num_micro_batches=num_micro_batches,
                autocast=self.autocast,
                schedule=schedule,
                **options,
            )
            executor: Any = parallelize(UNet3d(self.topology), layout)
            executor.observer = observer or executor.observer
            if forward_only:
                executor = ForwardOnlyPipeline(executor, num_micro_batches, self.autocast)
            row.update(self._timed(executor))
        except torch.OutOfMemoryError:
            row["seconds"] = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(row, file=sys.stderr)
        return row

    def _timed(self, executor: Any) -> dict[str, Any]:
        optimizer = torch.optim.SGD(executor.module.parameters(), lr=1e-3, momentum=0.9)
        image = self.image.to(executor.input_device)
        target = self.target.to(executor.output_device)
        gpus = {slot.device for slot in executor.slots if slot.device.type == "cuda"}
        seconds = []
        for step in range(self.arguments.warmup + self.arguments.steps):
            if step == self.arguments.warmup:
                for gpu in gpus:
                    torch.cuda.reset_peak_memory_stats(gpu)
            synchronize()
            began = time.perf_counter()
            executor.forward_backward(image, target, dice_cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            synchronize()
            if step >= self.arguments.warmup:
                seconds.append(time.perf_counter() - began)
        in_order = sorted(gpus, key=str)
        return {
            "seconds": statistics.median(seconds),
            "all_seconds": seconds,
            # Reserved, for what recorded steps use belongs to their graphs.
            "peak_gib": [torch.cuda.max_memory_reserved(gpu) / 2**30 for gpu in in_order],
            "allocated_gib": [torch.cuda.max_memory_allocated(gpu) / 2**30 for gpu in in_order],
        }

    def write(self, devices: tuple[torch.device, ...], path: Path) -> None:
        """Write the rows, and what they were measured with."""
        record = {**tuning_key(devices, self.precision), "rows": self.rows}
        path.write_text(json.dumps(record, indent=2) + "\n")

    def balanced(self, balance: Balance) -> tuple[int, ...]:
        """Return the cut that training would choose, from fresh measurements."""
        batch = self.arguments.batch_size
        layout = Layout(
            devices=self.devices, cuts=None, num_micro_batches=batch, autocast=self.autocast
        )
        x, y, z = self.image.shape[2:]
        with tempfile.TemporaryDirectory() as folder:
            return choose_cuts(
                UNet3d(self.topology),
                layout=layout,
                balance=balance,
                size=(x, y, z),
                batch_size=batch,
                num_states=1,
                folder=Path(folder),
            )

    def stage_seconds(self, cuts: tuple[int, ...] | None) -> list[float]:
        """Time one micro-batch through each stage, forward and backward, nothing else running."""
        layout = Layout(devices=self.devices, cuts=cuts, autocast=self.autocast, cuda_graphs="off")
        executor = parallelize(UNet3d(self.topology), layout)
        image = self.image[:1].to(executor.input_device)
        target = self.target[:1].to(executor.output_device)
        steps = []
        for _ in range(8):
            clock = StageClock(len(self.devices))
            executor.observer = clock
            executor.forward_backward(image, target, dice_cross_entropy)
            steps.append(clock.seconds)
        return [statistics.median(times) for times in zip(*steps[3:], strict=True)]


def main() -> None:
    """Run every way and print the table."""
    arguments = parse_arguments()
    bench = Bench(arguments)
    batch, devices = arguments.batch_size, bench.devices
    one = devices[:1]
    whole = bench.measure("one device, whole batch", one, num_micro_batches=1)
    accumulated = bench.measure("one device, accumulated", one, num_micro_batches=batch)
    bench.measure("stages in turn (naive)", devices, num_micro_batches=1)
    bench.measure(
        "forward-only pipeline (tutorial)", devices, num_micro_batches=batch, forward_only=True
    )
    tried: list[tuple[str, tuple[int, ...] | None]] = [("encoder | decoder", None)]
    balances: tuple[Balance, ...] = ("time", "memory")
    for balance in balances:
        cuts = bench.balanced(balance)
        tried.append((f"--balance {balance} {cuts}", cuts))
    tried += [(f"cut {cut}", tuple(map(int, cut.split(",")))) for cut in arguments.cuts]
    for name, tried_cuts in tried:
        row = bench.measure(f"1F1B, {name}", devices, num_micro_batches=batch, cuts=tried_cuts)
        stages = bench.stage_seconds(tried_cuts)
        row["stage_seconds"] = stages
        row["limit_seconds"] = sum(stages) + (batch - 1) * max(stages)
    bench.measure(
        "all forward, all backward", devices, num_micro_batches=batch, schedule="all-forward"
    )
    best = min(row["seconds"] for row in (whole, accumulated) if row["seconds"])
    print(f"{'':44} {'ms':>8} {'best 1':>7} {'accum.':>7} {'limit':>6}  peak GiB")
    for row in bench.rows:
        if row["seconds"] is None:
            print(f"{row['name']:44} does not fit")
            continue
        limit = f"{row['limit_seconds'] / row['seconds']:.2f}" if "limit_seconds" in row else ""
        peaks = " ".join(f"{peak:.1f}" for peak in row["peak_gib"])
        print(
            f"{row['name']:44} {1000 * row['seconds']:8.1f} {best / row['seconds']:6.2f}x "
            f"{accumulated['seconds'] / row['seconds']:6.2f}x {limit:>6}  {peaks}"
        )
    if arguments.json:
        bench.write(devices, arguments.json)


if __name__ == "__main__":
    main()
