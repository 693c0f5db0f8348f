"""One training step on one device: ours, nnU-Net's and MONAI's networks, and the floor.

    python benchmarks/step.py --shape 256,256,256 --batch-size 1 --json step-256.json
    python benchmarks/step.py --device cpu --shape 16,16,16 --channels 4,8,8 --warmup 1 --steps 2

What is compared, and how each is trained, is in ``peers.py``; how the floor is counted, in
``floor.py``. Steps follow one another as in training, nothing waits between them; a time is the
median over the steps after the warm-up, each from the end of the step before to its own (CUDA
events; on a CPU, the clock). The first step is timed by itself: it compiles kernels and chooses
algorithms, from whatever the caches on disk hold. The peak is that of CUDA's allocator over all
steps but the first (the record has that one's too), so also over the one that is recorded, and the
ones before it, where later steps replay a CUDA graph. A variant that cannot be built, compiled or
run is a row with the reason.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import parse_shape, synchronize, tuning_key
from floor import count_passes, floor_seconds, measure_rates
from peers import VARIANTS, Problem, Trainee, Variant, count, find_variants

from unet3d.parallel import resolve_precision
from unet3d.parallel.precision import (
    autocast_dtype,
)

DEFAULT = [variant.key for variant in VARIANTS if variant.offload == "none"]

BESIDE = ("ours", "nnunet-compiled", "nnunet-eager", "dynunet-eager")
"""Whose times others are divided by."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="256,256,256")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--variants", default=",".join(DEFAULT))
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warmup", type=int, default=6, help="the first step is one of them")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(
    variant: Variant, problem: Problem, device: torch.device, num_warm_up: int, num_steps: int
) -> dict[str, Any]:
    """Train a few steps and return times and memory."""
    on_gpu = device.type == "cuda"
    trainee = Trainee(variant, problem, [device])
    row: dict[str, Any] = {"precision": trainee.precision}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    synchronize()
    began = time.perf_counter()
    trainee.step()
    synchronize()
    row["first_step_seconds"] = time.perf_counter() - began
    if on_gpu:
        row["first_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()  # of what choosing algorithms took
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(num_warm_up - 1):
        trainee.step()
    synchronize()
    marks = [_mark(on_gpu)]
    for _ in range(num_steps):
        loss = trainee.step()
        marks.append(_mark(on_gpu))
    synchronize()
    seconds = [_between(*pair) for pair in zip(marks, marks[1:], strict=False)]
    row |= {"seconds": statistics.median(seconds), "all_seconds": seconds, "loss": loss.item()}
    if on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return row


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(earlier: Any, later: Any) -> float:
    """Return the seconds between two marks."""
    if isinstance(earlier, float):
        return float(later - earlier)
    return float(earlier.elapsed_time(later)) / 1000


def clear() -> None:
    """Free what a variant leaves."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def print_table(record: dict[str, Any]) -> None:
    """Print a line for each variant; ratios are its time over that of another."""
    floor = record["floor"]["floor"]
    seconds = {row["key"]: row["seconds"] for row in record["rows"] if "seconds" in row}
    beside = [key for key in BESIDE if key in seconds]
    columns = ["params M", "Tera-op", "first s", "ms", "peak GiB", "reserved", "/ floor"]
    heads = [*columns, *(f"/ {key}" for key in beside)]
    print(f"{'':20}" + "".join(f"{head:>{max(10, len(head) + 2)}}" for head in heads))
    for row in record["rows"]:
        line = f"{row['key']:20}"
        if "num_parameters" in row:
            line += f"{row['num_parameters'] / 1e6:10.2f}{row['num_operations'] / 1e12:10.3f}"
        if "seconds" not in row:
            print(f"{line}  {row['reason']}")
            continue
        peaks = [row.get(name, 0) / 2**30 for name in ("peak_bytes", "reserved_bytes")]
        line += f"{row['first_step_seconds']:10.1f}{1000 * row['seconds']:10.2f}"
        line += "".join(f"{peak:10.2f}" if peak else f"{'':10}" for peak in peaks)
        line += f"{row['seconds'] / floor:10.2f}"
        for key in beside:
            line += f"{row['seconds'] / seconds[key]:{max(10, len(key) + 4)}.3f}"
        print(line)
    rates = record["rates"]
    print(
        f"floor {1000 * floor:.2f} ms: {rates['operations_per_second'] / 1e12:.2f} Tera-op/s, "
        f"{rates['bytes_per_second'] / 1e12:.3f} TB/s"
    )


def main() -> None:
    """Measure every variant, print the table, write the record."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    channels = tuple(int(number) for number in arguments.channels.split(","))
    problem = Problem(
        size=parse_shape(arguments.shape), batch_size=arguments.batch_size, channels=channels
    )
    precision = resolve_precision("auto", [device])
    dtype = autocast_dtype(precision) or torch.float32
    rates = measure_rates(device, dtype)
    passes = count_passes(problem, dtype.itemsize)
    rows = []
    for variant in find_variants(arguments.variants):
        row: dict[str, Any] = {"key": variant.key, "compiled": variant.compiled}
        rows.append(row)
        try:
            row |= count(variant, problem)
            row |= measure(variant, problem, device, arguments.warmup, arguments.steps)
        except Exception as error:  # a peer, or a compiler, can raise anything
            row["reason"] = reason_of(error)
        clear()
        print(row, file=sys.stderr)
    record = {
        **tuning_key([device], precision),
        "size": problem.size,
        "batch_size": problem.batch_size,
        "channels": channels,
        "rates": asdict(rates),
        "floor": floor_seconds(passes, rates),
        "passes": [asdict(one) for one in passes],
        "rows": rows,
    }
    print_table(record)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
