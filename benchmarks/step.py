"""One training step on one device: ours, nnU-Net's and MONAI's networks, and the floor.

    python benchmarks/step.py --shape 256,256,256 --batch-size 1 --json step-256.json
    python benchmarks/step.py --device cpu --shape 64,64,64 --channels 32,64,128,256,320

What is compared, and how each is trained, is in ``peers.py``; how the floor is counted, in
``floor.py``. On a GPU steps follow one another as in training, nothing waits between them; a time
is the median over the steps after the warm-up, each from the end of the step before to its own
(CUDA events). The first step is timed by itself: it compiles kernels and chooses algorithms, from
whatever the caches on disk hold. The peak is that of CUDA's allocator over all steps but the first
(the record has that one's too), so also over the one that is recorded, and the ones before it,
where later steps replay a CUDA graph.

On a CPU each variant has a process, set up as its own command line sets it up, and they take their
steps by turns, because the speed of a CPU changes with what else runs. Each also predicts a window:
the logits of the same batch. Times are medians of the clock.

A variant that cannot be built, compiled or run is a row with the reason.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import parse_shape, reason_of, synchronize, tuning_key
from floor import count_passes, floor_seconds, measure_rates
from peers import VARIANTS, Problem, Trainee, Variant, count, find_variants

from unet3d.distributed.processes import die_with_parent
from unet3d.errors import Unet3dError
from unet3d.memory.allocator import keep_host_memory
from unet3d.model import UNet3d
from unet3d.parallel import autocast_dtype, resolve_precision

ON_CPU_ONLY = (
    "ours-float32",
    "ours-first",
    "ours-float32-first",
    "ours-returning",
    "nnunet-keeping",
    "nnunet-bfloat16",
)
GPU_DEFAULT = [
    variant.key
    for variant in VARIANTS
    if variant.offload == "none" and variant.key not in ON_CPU_ONLY
]
CPU_DEFAULT = ["ours", "ours-float32", "nnunet-eager", "nnunet-bfloat16"]

BESIDE = ("ours", "nnunet-compiled", "nnunet-eager", "dynunet-eager")
"""Whose times others are divided by."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="256,256,256")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument(
        "--variants",
        help=f"default: {','.join(GPU_DEFAULT)}; on a CPU {','.join(CPU_DEFAULT)}",
    )
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warmup", type=int, default=6, help="the first step is one of them")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(
    variant: Variant, problem: Problem, device: torch.device, num_warm_up: int, num_steps: int
) -> dict[str, Any]:
    """Train a few steps on a GPU and return times and memory."""
    trainee = Trainee(variant, problem, [device])
    row: dict[str, Any] = {"precision": trainee.precision}
    torch.cuda.reset_peak_memory_stats(device)
    synchronize()
    began = time.perf_counter()
    trainee.step()
    synchronize()
    row["first_step_seconds"] = time.perf_counter() - began
    row["first_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()  # of what choosing algorithms took
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(num_warm_up - 1):
        trainee.step()
    synchronize()
    marks = [_mark()]
    for _ in range(num_steps):
        loss = trainee.step()
        marks.append(_mark())
    synchronize()
    seconds = [earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(marks)]
    row |= {"seconds": statistics.median(seconds), "all_seconds": seconds, "loss": loss.item()}
    row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return row


def measure_alone(
    variant: Variant, problem: Problem, device: torch.device, num_warm_up: int, num_steps: int
) -> dict[str, Any]:
    """Return the row of one variant on a GPU, which it has to itself."""
    row: dict[str, Any] = {"key": variant.key, "compiled": variant.compiled}
    try:
        row |= count(variant, problem)
        row |= measure(variant, problem, device, num_warm_up, num_steps)
    except Exception as error:  # a peer, or a compiler, can raise anything
        row["reason"] = reason_of(error)
    clear()
    print(row, file=sys.stderr)
    return row


def measure_by_turns(
    variants: Sequence[Variant], problem: Problem, num_warm_up: int, num_steps: int
) -> list[dict[str, Any]]:
    """Train a few steps and predict a few windows with each variant in turn, on this CPU."""
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], Connection]] = []
    for variant in variants:
        here, there = context.Pipe()
        context.Process(target=_serve, args=(variant, problem, there), daemon=True).start()
        row: dict[str, Any] = {"key": variant.key, "compiled": variant.compiled} | here.recv()
        rows.append(row)
        if "reason" not in row:
            row |= {"all_seconds": [], "all_window_seconds": []}
            running.append((row, here))
    for turn in range(1, num_warm_up + num_steps):
        for row, here in running:
            here.send(True)
            step_seconds, window_seconds, loss = here.recv()
            if turn >= num_warm_up:
                row["all_seconds"].append(step_seconds)
                row["all_window_seconds"].append(window_seconds)
                row["loss"] = loss
    for row, here in running:
        here.send(False)
        row["seconds"] = statistics.median(row["all_seconds"])
        row["window_seconds"] = statistics.median(row["all_window_seconds"])
    return rows


def _serve(variant: Variant, problem: Problem, asked: Connection) -> None:
    """Take a step and predict a window of one variant whenever it is asked, in a process."""
    die_with_parent()
    keeps = variant.keeps_host_memory
    if keeps or (keeps is None and variant.network == "ours"):
        keep_host_memory()
    try:
        row: dict[str, Any] = dict(count(variant, problem))
        trainee = Trainee(variant, problem, [torch.device("cpu")])
        row["first_step_seconds"], _ = _timed(trainee.step)
        row["precision"] = trainee.precision
    except Exception as error:  # a peer can raise anything
        asked.send({"reason": reason_of(error)})
        return
    asked.send(row)
    while asked.recv():
        step_seconds, loss = _timed(trainee.step)
        window_seconds, _ = _timed(trainee.window)
        asked.send((step_seconds, window_seconds, loss.item()))


def _timed(action: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the seconds that an action takes on this CPU, and its result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def clear() -> None:
    """Free what a variant leaves."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_table(record: dict[str, Any]) -> None:
    """Print a line for each variant; ratios are its time over that of another."""
    if "window_seconds" in next((row for row in record["rows"] if "seconds" in row), {}):
        print_cpu_table(record)
        return
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
    print_floor(record)


def print_cpu_table(record: dict[str, Any]) -> None:
    """Print a line for each variant: step and window, and both over those of nnU-Net."""
    peer: dict[str, Any] = next((row for row in record["rows"] if row["key"] == "nnunet-eager"), {})
    beside = "seconds" in peer
    heads = ["precision", "step ms", "window ms"]
    heads += ["step / nnU-Net", "window / nnU-Net"] if beside else []
    print(f"{'':20}" + "".join(f"{head:>{max(10, len(head) + 2)}}" for head in heads))
    for row in record["rows"]:
        if "seconds" not in row:
            print(f"{row['key']:20}  {row['reason']}")
            continue
        values = [row["seconds"], row["window_seconds"]]
        line = f"{row['key']:20}{row['precision']:>11}"
        line += f"{1000 * values[0]:10.1f}{1000 * values[1]:11.1f}"
        if beside:
            line += f"{values[0] / peer['seconds']:16.3f}"
            line += f"{values[1] / peer['window_seconds']:18.3f}"
        print(line)
    print_floor(record)


def print_floor(record: dict[str, Any]) -> None:
    """Print the floor of a step, and the rates that it follows from."""
    floor, rates = record["floor"]["floor"], record["rates"]
    print(
        f"floor {1000 * floor:.2f} ms: {rates['operations_per_second'] / 1e12:.2f} Tera-op/s, "
        f"{rates['bytes_per_second'] / 1e12:.3f} TB/s"
    )


def find_problem(arguments: argparse.Namespace) -> Problem:
    """Return what is trained on.

    Raises:
        SystemExit: The shape does not suit the levels.
    """
    channels = tuple(int(number) for number in arguments.channels.split(","))
    problem = Problem(
        size=parse_shape(arguments.shape), batch_size=arguments.batch_size, channels=channels
    )
    try:
        with torch.device("meta"):
            network = UNet3d(problem.topology)
            network.check_shape(torch.empty(1, 1, *problem.size))
    except Unet3dError as error:
        raise SystemExit(
            f"--shape {arguments.shape} does not suit {len(channels)} levels: {error}"
        ) from error
    return problem


def main() -> None:
    """Measure every variant, print the table, write the record."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    problem = find_problem(arguments)
    precision = resolve_precision("auto", [device])
    dtype = autocast_dtype(precision) or torch.float32
    rates = measure_rates(device, dtype)
    passes = count_passes(problem, dtype.itemsize)
    variants = find_variants(arguments.variants or ",".join(GPU_DEFAULT if on_gpu else CPU_DEFAULT))
    if on_gpu:
        rows = [
            measure_alone(variant, problem, device, arguments.warmup, arguments.steps)
            for variant in variants
        ]
    else:
        rows = measure_by_turns(variants, problem, arguments.warmup, arguments.steps)
    record = {
        **tuning_key([device], precision),
        "threads": torch.get_num_threads(),
        "size": problem.size,
        "batch_size": problem.batch_size,
        "channels": problem.channels,
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
