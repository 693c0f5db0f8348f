"""What a training step takes with 1 to 64 GPUs, on paper: seconds and memory of ``spatial``.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --against benchmarks/results/spatial-2026-11-23.json

Nothing is measured and no GPU is needed: seconds are those of :mod:`unet3d.planning.step_time`,
peaks those of :mod:`unet3d.planning.memory_estimate`, which ``--parallel auto`` chooses by. GPUs
are taken for H200s, and all of them for those of one host, however many. Below are the largest
cubes that train on GPUs of ``--memory`` GiB. ``--against`` compares with what
``benchmarks/spatial.py`` measured.
"""

import argparse
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from unet3d.config import ModelSettings, Recompute, TrainingSettings
from unet3d.model import plan_topology
from unet3d.parallel import Layout
from unet3d.planning.largest import largest_size
from unet3d.planning.memory_estimate import Step, predict_memory
from unet3d.planning.step_time import step_seconds

GIB = 1024**3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", default="256,384,512,1024,2048", help="voxels along an axis")
    parser.add_argument("--counts", default="1,2,4,8,64", help="GPUs")
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--recompute", default="norm", choices=("norm", "level", "off"))
    parser.add_argument("--memory", default="24,80,139.8", help="GiB; 139.8 is an H200")
    parser.add_argument("--against", type=Path, help="a record of benchmarks/spatial.py")
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of ``1,2,3``."""
    return tuple(map(int, text.split(",")))


def step_of(edge: int, count: int, channels: tuple[int, ...], recompute: Recompute) -> Step:
    """Return the step of a cube over GPUs, at batch 1 in bfloat16."""
    size = (edge, edge, edge)
    return Step(
        topology=plan_topology(
            ModelSettings(channels=channels, deep_supervision=False), size, (1.0, 1.0, 1.0), 1, 3
        ),
        layout=Layout(
            devices=(torch.device("cuda", 0),),
            autocast=torch.bfloat16,
            recompute=recompute,
            num_shards=count,
        ),
        size=size,
        batch_size=1,
        settings=TrainingSettings(),
        precision="bfloat16",
    ).fullest()


def predicted(step: Step) -> tuple[float, float]:
    """Return milliseconds of a step, and the GiB of its fullest GPU."""
    peak = predict_memory(step, counts_reserved=False).memory[0].peak_bytes
    return 1000 * (step_seconds(step) or 0.0), peak / GIB


def rows(
    sizes: Iterable[int], counts: Iterable[int], channels: tuple[int, ...], recompute: Recompute
) -> Iterable[str]:
    """Yield a line of the table for each cube and number of GPUs."""
    yield f"{'cube':>6} {'GPUs':>5} {'ms':>9} {'ratio':>7} {'GiB each':>9}"
    for edge in sizes:
        one = 1000 * (step_seconds(step_of(edge, 1, channels, recompute)) or 0.0)
        for count in counts:
            milliseconds, gib = predicted(step_of(edge, count, channels, recompute))
            yield (f"{edge:6} {count:5} {milliseconds:9.1f} {one / milliseconds:6.2f}x {gib:9.2f}")


def largest(
    memory: Iterable[float], counts: Iterable[int], channels: tuple[int, ...], recompute: Recompute
) -> Iterable[str]:
    """Yield a line with the edge of the largest cube for each memory, for each number of GPUs."""
    counts = tuple(counts)
    yield f"{'GiB':>6}" + "".join(f"{count:6}" for count in counts)
    for gib in memory:
        edges = []
        for count in counts:
            step = step_of(256, count, channels, recompute)
            found = largest_size(step, {step.layout.devices[0]: int(gib * GIB)})
            edges.append(found[0] if found else 0)
        yield f"{gib:6}" + "".join(f"{edge:6}" for edge in edges)


def comparison(
    record: dict[str, Any], channels: tuple[int, ...], recompute: Recompute
) -> Iterable[str]:
    """Yield a line for each cube that was measured, on one GPU and on all."""
    yield f"{'cube':>6} {'GPUs':>5} {'measured':>9} {'ms':>9} {'off':>7} {'GiB':>7} {'off':>7}"
    for row in record["step"]:
        edge = row["size"][0]
        for count in (1, len(record["devices"])):
            found = row["one"] if count == 1 else row
            peak = found["peak_bytes"] if count == 1 else max(found["peak_bytes"])
            ms, gib = predicted(step_of(edge, count, channels, recompute))
            was, was_gib = 1000 * found["seconds"], peak / GIB
            yield (
                f"{edge:6} {count:5} {was:9.2f} {ms:9.2f} {ms / was - 1:+7.1%} "
                f"{was_gib:7.2f} {gib / was_gib - 1:+7.1%}"
            )


def main() -> None:
    """Print the table, or the comparison."""
    arguments = parse_arguments()
    channels, recompute = numbers(arguments.channels), arguments.recompute
    if arguments.against:
        record = json.loads(arguments.against.read_text())
        lines = comparison(record, channels, recompute)
    else:
        counts, memory = numbers(arguments.counts), map(float, arguments.memory.split(","))
        lines = itertools.chain(
            rows(numbers(arguments.sizes), counts, channels, recompute),
            largest(memory, counts, channels, recompute),
        )
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
