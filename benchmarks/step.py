"""One training step on one device: our network, nnU-Net's and MONAI's.

    python benchmarks/step.py --shape 256,256,256 --batch-size 1 --json step-256.json
    python benchmarks/step.py --variants ours,ours-unrecorded,ours-off,ours-level,ours-offload
    python benchmarks/step.py --device cpu --shape 16,16,16 --channels 4,8,8 --steps 2 --repeats 1

``trainees.py`` describes the networks and how they are trained. On a GPU the variants are measured
one after the other, with all memory freed between. A time is the median of ``--repeats``
measurements, each of ``--steps`` steps in a row from an idle GPU to an idle GPU, after ``--warmup``
steps. The first step is timed separately: it compiles kernels and chooses algorithms, using the
caches on disk. The peak is that of CUDA's allocator over all steps but the first, including the
steps that are launched and captured before a CUDA graph is replayed.

Each variant also predicts a window: the logits of the same batch. On a GPU ours replays it from a
CUDA graph, like ``unet3d predict``. Windows are timed like steps.

On a CPU each variant has a process, set up as by its own command line. The processes take single
steps and windows in turn, because other load changes the speed of a CPU.

A variant that cannot be built, compiled or run is a row with the reason.
"""

import argparse
import gc
import multiprocessing
import statistics
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

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
    say,
    shape,
    timed,
    write_record,
)
from trainees import VARIANTS, Problem, Variant, make_trainee, variants_named

from unet3d.distributed.processes import die_with_parent
from unet3d.memory.allocator import keep_host_memory

GPU_DEFAULT = ",".join(
    variant.key
    for variant in VARIANTS
    if variant.key not in ("ours-float32", "ours-offload", "nnunet-bfloat16")
)
CPU_DEFAULT = "ours,ours-float32,nnunet-eager,nnunet-bfloat16"

BESIDE = ("nnunet-compiled", "nnunet-eager", "dynunet-eager")
"""Variants by whose times the other times are divided."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", type=shape, default="256,256,256")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels", type=numbers, default=CHANNELS)
    parser.add_argument(
        "--variants",
        type=variants_named,
        help=f"default: {GPU_DEFAULT}; on a CPU {CPU_DEFAULT}",
    )
    parser.add_argument("--device", default=one_device())
    parser.add_argument("--warmup", type=int, default=5, help="steps after the first")
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a row")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def measure_alone(
    variant: Variant, problem: Problem, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of one variant on an otherwise idle GPU."""
    row: dict[str, Any] = {"key": variant.key, "compiled": variant.compiled}
    try:
        trainee = make_trainee(variant, problem, arguments.device)
        row["precision"] = trainee.precision
        (row["first_step_seconds"],) = timed(trainee.step)
        torch.cuda.empty_cache()  # frees the memory in which algorithms were tried
        forget_peaks()
        timed(trainee.step, arguments.warmup)
        row["all_seconds"] = timed(trainee.step, arguments.steps, arguments.repeats)
        row["seconds"] = statistics.median(row["all_seconds"])
        row |= {"loss": trainee.step().item(), **peaks()}
        timed(trainee.window, arguments.warmup)  # compiles or captures
        row["all_window_seconds"] = timed(trainee.window, arguments.steps, arguments.repeats)
        row["window_seconds"] = statistics.median(row["all_window_seconds"])
    except Exception as error:  # a peer, or a compiler, can raise anything
        row["reason"] = reason_of(error)
    return row


def clear() -> None:
    """Free the memory of a variant."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


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
    for turn in range(num_warm_up + num_steps):
        for row, here in running:
            here.send(True)
            step_seconds, window_seconds, row["loss"] = here.recv()
            if turn >= num_warm_up:
                row["all_seconds"].append(step_seconds)
                row["all_window_seconds"].append(window_seconds)
    for row, here in running:
        here.send(False)
        row["seconds"] = statistics.median(row["all_seconds"])
        row["window_seconds"] = statistics.median(row["all_window_seconds"])
    return rows


def _serve(variant: Variant, problem: Problem, asked: Connection) -> None:
    """In its own process, take a step and predict a window of one variant on each request."""
    die_with_parent()
    if variant.network == "ours":
        keep_host_memory()
    try:
        trainee = make_trainee(variant, problem, "cpu")
        (first,) = timed(trainee.step)
    except Exception as error:  # a peer can raise anything
        asked.send({"reason": reason_of(error)})
        return
    asked.send({"precision": trainee.precision, "first_step_seconds": first})
    losses: list[float] = []
    while asked.recv():
        (step_seconds,) = timed(lambda: losses.append(trainee.step().item()))
        (window_seconds,) = timed(trainee.window)
        asked.send((step_seconds, window_seconds, losses[-1]))


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each variant; ratios are its time over the times of :data:`BESIDE`."""
    measured = {row["key"]: row for row in rows if "seconds" in row}
    beside = [key for key in BESIDE if key in measured]
    heads = ["precision", "first s", "ms", "window ms", "peak GiB", "reserved"]
    heads += [f"/ {key}" for key in beside]
    print(f"{'':20}" + "".join(f"{head:>{max(10, len(head) + 2)}}" for head in heads))
    for row in rows:
        if "reason" in row:
            print(f"{row['key']:20}  {row['reason']}")
            continue
        line = f"{row['key']:20}{row['precision']:>11}{row['first_step_seconds']:10.1f}"
        line += f"{1000 * row['seconds']:10.2f}"
        window, held = row.get("window_seconds"), row.get("peak_bytes")
        line += f"{1000 * window:11.2f}" if window else f"{'':11}"
        taken = [*(held or ()), *row.get("reserved_bytes", ())]
        line += "".join(f"{number / GIB:10.2f}" for number in taken) or f"{'':20}"
        for key in beside:
            ratio = row["seconds"] / measured[key]["seconds"]
            line += f"{ratio:{max(10, len(key) + 4)}.3f}"
        print(line)


def main() -> None:
    """Measure every variant, print the table, write the record."""
    arguments = make_parser().parse_args()
    (device,) = devices_named((arguments.device,))
    problem = Problem(
        size=arguments.shape, batch_size=arguments.batch_size, channels=arguments.channels
    )
    on_gpu = device.type == "cuda"
    variants = arguments.variants or variants_named(GPU_DEFAULT if on_gpu else CPU_DEFAULT)
    rows = []
    if on_gpu:
        torch.cuda.set_device(device)
        for variant in variants:
            rows.append(measure_alone(variant, problem, arguments))
            clear()
            say(rows[-1])
    else:
        rows = measure_by_turns(variants, problem, arguments.warmup, arguments.steps)
    print_table(rows)
    write_record(
        arguments.json,
        [device],
        threads=torch.get_num_threads(),
        size=problem.size,
        batch_size=problem.batch_size,
        channels=problem.channels,
        rows=rows,
    )


if __name__ == "__main__":
    main()
