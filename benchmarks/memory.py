"""Predicted against measured memory of training steps, and the largest cube that trains.

    python benchmarks/memory.py --devices 0,1 --json memory.json
    python benchmarks/memory.py --largest ours,ours-level,nnunet-compiled --json largest.json
    python benchmarks/memory.py --largest ours --devices 0,1 --kind slabs --json largest-2.json
    python benchmarks/memory.py --devices cpu,cpu --unit 8 --channels 4,8,8
    python benchmarks/memory.py --devices cpu --largest ours --memory-gib 0.02 --channels 4,8,8

Without ``--largest`` each way of training takes steps of the real executor on random data, in
separate processes. Two steps are measured. After further steps, which are captured and replayed if
volumes are small, the reserved memory of CUDA's allocator is recorded. Edges are multiples of
``--unit``. Ways that need more than the named devices are left out. On a CPU, whose allocator
reports no peak, the peak is the sum of the counted parts.

``--largest`` searches the largest cube at batch 1, in steps of ``--unit`` voxels, for variants of
``step.py`` (ours also over several devices). A cube trains if two steps run: the optimizer's state
exists only from the second. Each attempt has separate processes and a time limit. The search starts
at the expected largest cube: from the planner for ours, from the bytes per voxel of a small attempt
for others. It goes up or down until a cube trains and the next larger one does not; ``complete`` is
false if ``--attempts`` ran out before. On a CPU ``--memory-gib`` sets the available memory.
"""

import argparse
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    CHANNELS,
    GIB,
    all_devices,
    devices_named,
    forget_peaks,
    in_ranks,
    new_parser,
    numbers,
    peaks,
    say,
    timed,
    words,
    write_record,
)
from trainees import OurTrainee, PeerTrainee, Problem, Trainee, Variant, Way, variants_named

from unet3d.distributed.group import Group
from unet3d.memory.allocations import UNCOUNTED_BYTES
from unet3d.memory.meter import measured_steps
from unet3d.planning.memory_estimate import predict_memory
from unet3d.planning.step_size import largest_size

NUM_LATER_STEPS = 5

WAYS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    # edge in units, batch size, other options
    (2, 2, {}),
    (2, 2, {"precision": "float32"}),
    (2, 2, {"recompute": "off"}),
    (2, 2, {"recompute": "level"}),
    (2, 2, {"model": {"norm": "group"}}),
    (2, 2, {"model": {"encoder": "residual"}}),
    (2, 2, {"optimizer": "adamw"}),
    (3, 8, {"num_micro_batches": 8}),
    (4, 1, {}),
    (3, 8, {"num_devices": 2, "num_micro_batches": 8}),
    (2, 4, {"num_devices": 2, "num_replicas": 2}),
    (4, 1, {"num_devices": 2, "kind": "slabs"}),
)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--devices", type=words, default=all_devices())
    parser.add_argument("--unit", type=int, help="voxels; default: 64, or 32 with --largest")
    parser.add_argument("--channels", type=numbers, default=CHANNELS)
    parser.add_argument("--only", type=numbers, help="numbers of ways, from 0; default: all")
    parser.add_argument("--largest", type=variants_named, metavar="VARIANTS", help="search a cube")
    parser.add_argument("--kind", default="slabs", choices=("slabs", "stages"))
    parser.add_argument("--probe", type=int, default=6, help="units of the peers' first attempt")
    parser.add_argument("--memory-gib", type=float, help="use no more of each device")
    parser.add_argument("--attempts", type=int, default=4, help="most attempts for a variant")
    parser.add_argument("--seconds", type=float, default=180, help="limit of an attempt")
    return parser


# Predicted and measured


def ways(arguments: argparse.Namespace, unit: int) -> list[tuple[str, Way]]:
    """Return name and way of each measurement for which there are enough devices."""
    found = []
    for number, (units, batch_size, given) in enumerate(WAYS):
        options = dict(given)
        count = options.pop("num_devices", 1)
        if count > len(arguments.devices) or number not in (arguments.only or range(len(WAYS))):
            continue
        edge = units * unit
        problem = Problem(
            size=(edge, edge, edge),
            batch_size=batch_size,
            channels=arguments.channels,
            model=options.pop("model", {}),
        )
        name = ", ".join(
            [f"{edge}^3", f"batch {batch_size}", *(f"{k} {v}" for k, v in given.items())]
        )
        found.append((name, Way(problem=problem, devices=arguments.devices[:count], **options)))
    return found


def measure_rank(group: Group, way: Way) -> dict[str, Any]:
    """Measure two steps of one rank, and the reserved memory after more."""
    trainee = OurTrainee(way, group)
    executor, optimizer = trainee.executor, trainee.optimization.optimizer
    with measured_steps(executor, optimizer) as meter:
        timed(trainee.step, in_a_row=2)
    measured = meter.read(optimizer)
    timed(trainee.step, in_a_row=NUM_LATER_STEPS)
    rows = []
    for slot in executor.slots:
        row: dict[str, Any] = {"device": str(slot.device), **measured[slot.index].to_dict()}
        if slot.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(slot.device)
            row["beside_allocator_bytes"] = total - free - torch.cuda.memory_reserved(slot.device)
            row["later_reserved_bytes"] = torch.cuda.max_memory_reserved(slot.device)
        rows.append(row)
    return {"slots": [row for of_rank in group.exchange(rows) for row in of_rank]}


def compare(way: Way) -> list[dict[str, Any]]:
    """Return a row for each slot: predicted and measured, or why nothing was measured."""
    found = in_ranks(measure_rank, way.num_ranks, way)
    if "reason" in found:
        return [found]
    rows = []
    for rank in range(way.num_ranks):
        memory = predict_memory(way.planned(rank)).memory
        rows += [memory[index].to_dict() for index in sorted(memory)]
    return [
        {"predicted": expected, "measured": measured}
        for expected, measured in zip(rows, found["slots"], strict=True)
    ]


def compare_all(arguments: argparse.Namespace) -> None:
    """Measure every way, print a line for each slot, write the record after each way."""
    rows: list[dict[str, Any]] = []
    heads = ("peak GiB", "planned", "ratio", "reserved", "beside")
    print(f"{'':66}" + "".join(f"{head:>10}" for head in heads))
    for name, way in ways(arguments, arguments.unit or 64):
        for row in compare(way):
            rows.append({"way": name, **row})
            print(line_of(rows[-1]), flush=True)
        write_record(
            arguments.json,
            devices_named(arguments.devices),
            channels=arguments.channels,
            rows=rows,
        )


def line_of(row: dict[str, Any]) -> str:
    """Return the line of a slot in the table."""
    if "reason" in row:
        return f"{row['way']:66} {row['reason']}"
    found, expected = row["measured"], row["predicted"]
    line = f"{row['way']:57}{found['device']:>9}"
    peak, planned = found["peak_bytes"], expected["peak_bytes"]
    line += f"{peak / GIB:10.3f}{planned / GIB:10.3f}{planned / peak:10.3f}"
    for name in ("later_reserved_bytes", "beside_allocator_bytes"):
        if name in found:
            line += f"{found[name] / GIB:10.3f}"
    return line


# The largest cube


def search(
    attempt: Callable[[int], dict[str, Any]], start: int, unit: int, num_attempts: int
) -> dict[str, Any]:
    """Return the largest edge that trains, searched in steps of a unit.

    Args:
        attempt: Tries an edge; ``trains`` in its answer says whether that edge trains.
        start: The first edge, in voxels.
        unit: Voxels between two edges.
        num_attempts: Most attempts.
    """
    tried: dict[int, dict[str, Any]] = {}
    edge = max(unit, start)
    while len(tried) < num_attempts and edge not in tried and edge > 0:
        tried[edge] = {"edge": edge, **attempt(edge)}
        say(tried[edge])
        edge += unit if tried[edge]["trains"] else -unit
    largest = max((edge for edge, one in tried.items() if one["trains"]), default=0)
    is_known = largest + unit in tried
    return {"edge": largest, "complete": is_known, "attempts": list(tried.values())}


def try_rank(
    group: Group, variant: Variant, problem: Problem, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train two steps in one rank, with no more memory than is allowed."""
    own = devices_named(arguments.devices)
    if arguments.memory_gib is not None:
        for device in set(own):
            limit_memory(device, int(arguments.memory_gib * GIB))
    way = variant.way(problem, arguments.devices, arguments.kind)
    trainee: Trainee = (
        OurTrainee(way, group)
        if variant.network == "ours"
        else PeerTrainee(variant, problem, own[0])
    )
    timed(trainee.step)
    forget_peaks()
    (seconds,) = timed(trainee.step)
    taken = group.exchange(peaks())
    return {
        "trains": True,
        "second_step_seconds": max(group.exchange(seconds)),
        **{name: [peak for one in taken for peak in one[name]] for name in taken[0]},
    }


def limit_memory(device: torch.device, limit: int) -> None:
    """Limit this process's memory on a GPU, or its host memory for the CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit += pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def largest_of(variant: Variant, arguments: argparse.Namespace, unit: int) -> dict[str, Any]:
    """Search the largest cube of one variant."""

    def problem(edge: int) -> Problem:
        return Problem(size=(edge, edge, edge), batch_size=1, channels=arguments.channels)

    is_ours = variant.network == "ours"
    num_ranks = (
        variant.way(problem(unit), arguments.devices, arguments.kind).num_ranks if is_ours else 1
    )
    room = {
        device: device_bytes(device, arguments.memory_gib)
        for device in devices_named(arguments.devices)
    }

    def attempt(edge: int) -> dict[str, Any]:
        given = (variant, problem(edge), arguments)
        found = in_ranks(try_rank, num_ranks, *given, seconds=arguments.seconds)
        return {"trains": False, **found}

    if is_ours:
        edge = 4 * 2 ** (len(arguments.channels) - 1)
        step = variant.way(problem(edge), arguments.devices, arguments.kind).planned().fullest()
        size = largest_size(step, room)
        row: dict[str, Any] = {"planned_edge": size[0] if size else 0}
        start = row["planned_edge"] // unit * unit
    else:
        row = {"probe": attempt(arguments.probe * unit)}
        taken = row["probe"].get("peak_bytes")
        # Weights, gradients and momentum do not grow; as they are counted, the start is too small.
        growth = (min(room.values()) - UNCOUNTED_BYTES) / max(taken) if taken else 1
        start = int(arguments.probe * unit * growth ** (1 / 3)) // unit * unit
    found = search(attempt, start, unit, arguments.attempts)
    return {"key": variant.key, **row, **found}


def device_bytes(device: torch.device, limit_gib: float | None) -> int:
    """Return the memory that a training run may use on a device."""
    limit = None if limit_gib is None else int(limit_gib * GIB)
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
        return total if limit is None else min(limit, total)
    if limit is None:
        raise SystemExit("on a CPU, name the memory that it shall have with --memory-gib")
    return limit


def search_all(arguments: argparse.Namespace) -> None:
    """Search for every variant, print a line for each, write the record after each."""
    devices, variants = devices_named(arguments.devices), arguments.largest
    if len(devices) > 1 and any(variant.network != "ours" for variant in variants):
        raise SystemExit("the peers run on one device: name one with --devices")
    rows: list[dict[str, Any]] = []
    print(f"{'':20}{'cube':>7}{'Mvoxels':>9}  why no larger")
    for variant in variants:
        rows.append(largest_of(variant, arguments, arguments.unit or 32))
        row = rows[-1]
        failed = [one for one in row["attempts"] if not one["trains"]]
        why = min(failed, key=lambda one: one["edge"])["reason"] if failed else "none was tried"
        why += "" if row["complete"] else " (not all sizes were tried)"
        print(f"{row['key']:20}{row['edge']:7}{row['edge'] ** 3 / 1e6:9.2f}  {why}", flush=True)
        write_record(
            arguments.json,
            devices,
            channels=arguments.channels,
            memory_gib=arguments.memory_gib,
            rows=rows,
        )


def main() -> None:
    """Compare predicted with measured memory, or search the largest cubes."""
    arguments = make_parser().parse_args()
    if arguments.largest:
        search_all(arguments)
    else:
        compare_all(arguments)


if __name__ == "__main__":
    main()
