"""Time of a training step against its peak memory, for every setting of what is kept and where.

    python benchmarks/frontier.py --shape 256,256,256 --shape 512,512,512 --json a.json --png a.png
    python benchmarks/frontier.py --device cpu --shape 32,32,32 --channels 4,8,8 --png a.png

The settings are those of ``memory``: what is recomputed, and whether skips are offloaded, where the
device has memory of its own. They are measured one after the other, each with all memory freed
before; one that does not fit has a row that says so. Steps are launched, not replayed, because one
with offload cannot be captured. Times are medians, from an idle device to an idle device, forward,
backward and optimizer included. The peak is what the allocator of a GPU measures; on a CPU, which
has none that does, it is the predicted one.

A setting is beaten where another of the same size takes neither more time nor more memory.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from common import parse_shape, synchronize, tuning_key
from peers import Problem, Trainee, Variant
from step import clear

from unet3d.config import Offload, Recompute, TrainingSettings
from unet3d.memory.host import is_out_of_memory
from unet3d.parallel import Layout, resolve_precision
from unet3d.parallel.offload import supports_offload
from unet3d.parallel.precision import autocast_dtype
from unet3d.planning.memory_estimate import Step, predict_memory
from unet3d.reports.palette import BLUE, GREY

SETTINGS: tuple[tuple[Recompute, Offload], ...] = (
    ("norm", "none"),
    ("norm", "skips"),
    ("level", "none"),  # of its skips nothing is kept that could be offloaded
    ("off", "none"),
    ("off", "skips"),
)

OUT_OF_MEMORY = "out of memory"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", action="append", help="may be repeated; default: 256,256,256")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    return parser.parse_args()


def settings_for(device: torch.device) -> list[tuple[Recompute, Offload]]:
    """Return the settings that differ on a device."""
    return [one for one in SETTINGS if one[1] == "none" or supports_offload(device)]


def measure(
    variant: Variant, problem: Problem, device: torch.device, num_warm_up: int, num_steps: int
) -> dict[str, Any]:
    """Train a few steps with one setting, or note that it does not fit."""
    row: dict[str, Any] = {
        "key": variant.key,
        "recompute": variant.recompute,
        "offload": variant.offload,
        "predicted_peak_bytes": predicted_peak(variant, problem, device),
    }
    try:
        row |= _timed(Trainee(variant, problem, [device]), device, num_warm_up, num_steps)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        row["reason"] = OUT_OF_MEMORY
    clear()
    if "seconds" in row:
        row.setdefault("peak_bytes", row["predicted_peak_bytes"])
    print(row, file=sys.stderr)
    return row


def _timed(
    trainee: Trainee, device: torch.device, num_warm_up: int, num_steps: int
) -> dict[str, Any]:
    seconds = []
    for number in range(num_warm_up + num_steps):
        if number == num_warm_up and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize()
        began = time.perf_counter()
        loss = trainee.step()
        synchronize()
        if number >= num_warm_up:
            seconds.append(time.perf_counter() - began)
    row = {"seconds": statistics.median(seconds), "all_seconds": seconds, "loss": loss.item()}
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return row


def predicted_peak(variant: Variant, problem: Problem, device: torch.device) -> int:
    """Return the bytes that a step is predicted to take."""
    precision = resolve_precision("auto", [device])
    layout = Layout(
        devices=(device,),
        autocast=autocast_dtype(precision),
        recompute=variant.recompute,
        offload=variant.offload,
        cuda_graphs="off",
    )
    step = Step(
        topology=problem.topology,
        layout=layout,
        size=problem.size,
        batch_size=problem.batch_size,
        settings=TrainingSettings(),
        precision=precision,
    )
    return predict_memory(step, counts_reserved=False).memory[0].peak_bytes


def mark_beaten(rows: Sequence[dict[str, Any]]) -> None:
    """Note in each row which others take neither more time nor more memory, one of them less."""
    measured = [row for row in rows if "seconds" in row]
    costs = {row["key"]: (row["seconds"], row["peak_bytes"]) for row in measured}
    for row in measured:
        time_and_peak = costs[row["key"]]
        row["beaten_by"] = [
            key
            for key, other in costs.items()
            if other != time_and_peak
            and all(a <= b for a, b in zip(other, time_and_peak, strict=True))
        ]


def draw(record: dict[str, Any], path: Path) -> None:
    """Write a panel for each size as a PNG: time against peak, the frontier as a line."""
    panels = record["sizes"]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        places = {
            row["key"]: (row["peak_bytes"] / 2**30, 1000 * row["seconds"])
            for row in panel["rows"]
            if "seconds" in row
        }
        beaten = {row["key"] for row in panel["rows"] if row.get("beaten_by")}
        frontier = sorted(place for key, place in places.items() if key not in beaten)
        axis.plot([x for x, _ in frontier], [y for _, y in frontier], color=BLUE, linewidth=1)
        for key, place in places.items():
            axis.plot(*place, marker="o", color=GREY if key in beaten else BLUE)
            above = "offload" not in key  # beside the same setting without it
            axis.annotate(key, place, (6, 5 if above else -12), textcoords="offset points", size=9)
        missing = [f"{row['key']}: {row['reason']}" for row in panel["rows"] if "reason" in row]
        axis.text(0.98, 0.02, "\n".join(missing), transform=axis.transAxes, ha="right", size=9)
        shape = "×".join(map(str, panel["size"]))
        axis.set_title(f"{shape}, batch {record['batch_size']}", loc="left", size=10)
        axis.set_xlabel("peak memory, GiB (grey: another setting beats it in both)", size=9)
        axis.set_ylabel("training step, ms", size=9)
        axis.locator_params(axis="x", nbins=6)
        axis.set_xlim(0, 1.3 * max((x for x, _ in places.values()), default=1))
        axis.set_ylim(0, 1.1 * max((y for _, y in places.values()), default=1))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(", ".join(sorted(set(record["devices"]))), size=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(record: dict[str, Any]) -> None:
    """Print a line for each size and setting."""
    heads = ("ms", "peak GiB", "predicted")
    print(f"{'':34}" + "".join(f"{head:>11}" for head in heads) + "  beaten by")
    for panel in record["sizes"]:
        size = "x".join(map(str, panel["size"]))
        for row in panel["rows"]:
            line = f"{size:16}{row['key']:18}"
            predicted = f"{row['predicted_peak_bytes'] / 2**30:11.2f}"
            if "seconds" in row:
                line += f"{1000 * row['seconds']:11.1f}{row['peak_bytes'] / 2**30:11.2f}{predicted}"
                print(f"{line}  {', '.join(row['beaten_by'])}".rstrip())
            else:
                print(f"{line}{row['reason']:>22}{predicted}")


def main() -> None:
    """Measure every setting at every size, print the table, write the record and the picture."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    channels = tuple(int(number) for number in arguments.channels.split(","))
    sizes = []
    for shape in arguments.shape or ["256,256,256"]:
        problem = Problem(
            size=parse_shape(shape), batch_size=arguments.batch_size, channels=channels
        )
        rows = []
        for recompute, offload in settings_for(device):
            variant = Variant(
                key=recompute + (" + offload" if offload == "skips" else ""),
                network="ours",
                cpu_precision="auto",
                recompute=recompute,
                offload=offload,
                recorded=False,
            )
            rows.append(measure(variant, problem, device, arguments.warmup, arguments.steps))
        mark_beaten(rows)
        sizes.append({"size": problem.size, "rows": rows})
    record = {
        **tuning_key([device], resolve_precision("auto", [device])),
        "batch_size": arguments.batch_size,
        "channels": channels,
        "num_warm_up_steps": arguments.warmup,
        "num_steps": arguments.steps,
        "sizes": sizes,
    }
    print_table(record)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.png:
        draw(record, arguments.png)


if __name__ == "__main__":
    main()
