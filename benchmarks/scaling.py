"""Training steps of every mode on several devices, relative to one device, in one run.

    python benchmarks/scaling.py --modes replicas,threads --shape 128,128,128 --batch-size 2
    python benchmarks/scaling.py --modes stages --shape 192,192,192 --batch-size 8 --cuts 18,22
    python benchmarks/scaling.py --modes slabs --shape 256,256,256 --predict --json slabs.json
    python benchmarks/scaling.py --devices 0,1,2,3 --json all.json
    python benchmarks/scaling.py --devices cpu,cpu --shape 16,16,16 --channels 4,8,8 --steps 1

The modes, ``one`` always first; by default all that the devices can run:

one              the batch of ``--batch-size`` on the first device
accumulated      like one, in micro-batches of one sample
replicas         a replica on each device, each with a batch of ``--batch-size``
threads          like replicas, but threads of one process, by ``nn.DataParallel``; GPUs only
turns            a stage of the network on each device, which take turns with the whole batch; two
                 stages are encoder and decoder
stages           like turns, but a pipeline of micro-batches of one sample
balanced         like stages, cut where stages take the same time (``parallel.cuts=time``)
cut N            like stages, cut before block N, for each N of ``--cuts``
slabs            a slab of each volume on each device
stage-replicas   replicas of two stages, each with a batch of ``--batch-size``; four devices or more
slab-replicas    replicas of two slabs, each with a batch of ``--batch-size``; four devices or more

Each mode runs in separate processes, a rank for each replica or slab. A time covers ``--steps``
steps in a row, from an idle machine to an idle machine, divided by their number: forward, backward,
exchange of gradients, clipping, optimizer, and messages between ranks. It is the time of the
slowest rank, and the median of ``--repeats`` measurements. The ratio compares samples per second
with mode ``one``. The loss of the first step must be the same for modes with the same batch. The
planner's prediction is listed, too, and ``--predict`` adds the time of predicting the batch.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

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
    reason_of,
    say,
    shape,
    timed,
    words,
    write_record,
)
from trainees import OurTrainee, Problem, Way

from unet3d.distributed.group import Group
from unet3d.errors import Unet3dError
from unet3d.planning.memory_estimate import predict_memory
from unet3d.planning.step_time import step_seconds

MODES = (
    "one",
    "accumulated",
    "replicas",
    "threads",
    "turns",
    "stages",
    "balanced",
    "slabs",
    "stage-replicas",
    "slab-replicas",
)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--devices", type=words, default=all_devices())
    parser.add_argument("--modes", type=words, help=f"default: all of {','.join(MODES)}")
    parser.add_argument("--cuts", type=numbers, default="", help="cuts of two stages to compare")
    parser.add_argument("--shape", type=shape, default="128,128,128")
    parser.add_argument("--batch-size", type=int, default=2, help="of a replica")
    parser.add_argument("--channels", type=numbers, default=CHANNELS)
    parser.add_argument("--recompute", default="norm", choices=("norm", "level", "off"))
    parser.add_argument("--predict", action="store_true", help="also time predicting the batch")
    parser.add_argument("--warmup", type=int, default=6, help="steps after the first")
    parser.add_argument("--steps", type=int, default=10, help="in a row")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def ways(arguments: argparse.Namespace) -> dict[str, Way]:
    """Return the requested modes that these devices can run."""
    devices, size = arguments.devices, arguments.batch_size
    pairs = len(devices) // 2

    def way(where: Sequence[str], num_replicas: int = 1, **options: Any) -> Way:
        problem = Problem(
            size=arguments.shape, batch_size=size * num_replicas, channels=arguments.channels
        )
        return Way(
            problem=problem,
            devices=tuple(where),
            num_replicas=num_replicas,
            recompute=arguments.recompute,
            **options,
        )

    def threads() -> Way:
        problem = way(devices, len(devices)).problem  # to the planner it is one replica
        return Way(problem=problem, devices=devices, kind="threads", recompute=arguments.recompute)

    found = {
        "one": way(devices[:1]),
        "accumulated": way(devices[:1], num_micro_batches=size),
    }
    if len(devices) > 1:
        found |= {
            "replicas": way(devices, len(devices)),
            "turns": way(devices),
            "stages": way(devices, num_micro_batches=size),
            "balanced": way(devices, num_micro_batches=size, balances_time=True),
            "slabs": way(devices, kind="slabs"),
        }
        if "cpu" not in devices:
            found["threads"] = threads()
    if pairs > 1:
        found |= {
            "stage-replicas": way(devices[: 2 * pairs], pairs, num_micro_batches=size),
            "slab-replicas": way(devices[: 2 * pairs], pairs, kind="slabs"),
        }
    wanted = arguments.modes or MODES
    unknown = set(wanted) - set(MODES)
    if unknown:
        raise SystemExit(f"no mode {', '.join(unknown)}; choose from {', '.join(MODES)}")
    cuts = {
        f"cut {cut}": way(devices, num_micro_batches=size, cuts=(cut,)) for cut in arguments.cuts
    }
    chosen = {name: found[name] for name in MODES if name in found and name in ("one", *wanted)}
    return chosen | cuts


def predicted(way: Way) -> dict[str, Any]:
    """Return the planner's prediction for a step: its seconds, and the fullest device's bytes."""
    if way.kind == "threads":  # whose copies and gathering the planner does not model
        return {}
    step = way.planned().fullest()
    memory = predict_memory(step).memory.values()
    return {
        "predicted_seconds": step_seconds(step),
        "predicted_bytes": max(slot.peak_bytes for slot in memory),
    }


def run_rank(group: Group, way: Way, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one mode in one rank."""
    trainee = OurTrainee(way, group)
    first_loss = trainee.step().item()
    forget_peaks()
    timed(trainee.step, arguments.warmup)
    seconds = timed_together(group, trainee, arguments)
    taken = group.exchange(peaks())
    row = {
        "loss": statistics.mean(group.exchange(first_loss)),
        "cuts": trainee.cuts,
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "samples_per_second": way.problem.batch_size / statistics.median(seconds),
        **{name: [peak for one in taken for peak in one[name]] for name in taken[0]},
    }
    if arguments.predict:
        timed(trainee.window)
        windows = timed_together(group, trainee, arguments, predicts=True)
        row |= {"window_seconds": statistics.median(windows), "all_window_seconds": windows}
    return row


def timed_together(
    group: Group, trainee: OurTrainee, arguments: argparse.Namespace, predicts: bool = False
) -> list[float]:
    """Return the seconds of a step in the slowest rank, for each repeat."""
    found = []
    for _ in range(arguments.repeats):
        group.exchange(None)
        (own,) = timed(trainee.window if predicts else trainee.step, arguments.steps)
        found.append(max(group.exchange(own)))
    return found


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each mode."""
    print(
        f"{'':16}{'ranks':>6}{'batch':>6}{'ms':>10}{'plan':>10}{'samples/s':>10}{'ratio':>7}"
        f"{'predict':>10}{'loss':>10}  peaks GiB (planned)"
    )
    for row in rows:
        line = f"{row['mode']:16}{row['num_ranks']:6}{row['batch_size']:6}"
        if "reason" in row:
            print(f"{line}  {row['reason']}")
            continue
        plan, ratio = row.get("predicted_seconds"), row.get("ratio")
        line += f"{1000 * row['seconds']:10.2f}" + (f"{1000 * plan:10.2f}" if plan else f"{'':10}")
        line += f"{row['samples_per_second']:10.2f}" + (f"{ratio:6.2f}x" if ratio else f"{'':7}")
        window = row.get("window_seconds")
        line += (f"{1000 * window:10.2f}" if window else f"{'':10}") + f"{row['loss']:10.5f}  "
        line += " ".join(f"{peak / GIB:.2f}" for peak in row["peak_bytes"])
        planned = row.get("predicted_bytes")
        print(line + (f" ({planned / GIB:.2f})" if planned else ""))


def main() -> None:
    """Measure every mode, print the table, write the record after each."""
    arguments = make_parser().parse_args()
    devices = devices_named(arguments.devices)
    rows: list[dict[str, Any]] = []
    for mode, way in ways(arguments).items():
        row: dict[str, Any] = {
            "mode": mode,
            "num_ranks": way.num_ranks,
            "batch_size": way.problem.batch_size,
        }
        try:
            row |= predicted(way)
            row |= in_ranks(run_rank, way.num_ranks, way, arguments)
        except Unet3dError as error:  # this shape cannot be divided in this mode
            row["reason"] = reason_of(error)
        first = rows[0] if rows else row
        if "seconds" in row and "seconds" in first:
            row["ratio"] = row["samples_per_second"] / first["samples_per_second"]
        rows.append(row)
        say(row)
        write_record(
            arguments.json,
            devices,
            size=arguments.shape,
            channels=arguments.channels,
            recompute=arguments.recompute,
            rows=rows,
        )
    print_table(rows)


if __name__ == "__main__":
    main()
