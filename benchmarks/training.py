"""Whole trainings: samples a second, how long devices wait for data, and nnU-Net's trainer beside.

    python benchmarks/training.py --cache volumes --workers 16,8,2 --nnunet --json training.json \
        --and "--batch-size 7 --augmentation mlperf --workers 16"
    python benchmarks/training.py --workers '' --runs 0 0,1 --json ranks.json
    python benchmarks/training.py --device cpu --shape 32,32,32 --volume 48,48,48 --channels 4,8 \
        --workers 1 --turns 1 --steps 8 --patches

The volumes are phantoms, prepared as for any training. A row is a training with so many loading
processes, made of the parts of ``unet3d train``: its loop's loader, executor, optimizer and step.
In turns of a few dozen steps it trains on what the loader yields, and on one batch that is on the
device already, on which no step ever waits; the loading processes rest meanwhile. Their first
batches, one for each process, are not counted, and what they prepare ahead is none at the start of
a turn, so a queue that runs empty is not taken for a loader that is fast enough.

``--nnunet`` adds rows of nnU-Net's own trainer (``nnunet_peer.py``), ``--patches`` what a patch
costs one core and, on a GPU, the GPU (``patch_costs.py``), and ``--runs`` the later epochs of real
``unet3d train`` commands on these devices, with a replica on each, or with ``--parallel spatial`` a
slab of each patch. Several settings are measured in one call with ``--and``: the same options, with
those of the command line as defaults.
"""

import argparse
import copy
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import nnunet_peer
import patch_costs
import torch
from common import parse_shape, reason_of, tuning_key
from step import clear
from turns import measure

from unet3d.config import AugmentationSettings, Config
from unet3d.distributed.ranks import num_cores
from unet3d.parallel import resolve_precision
from unet3d.planning.experiment import Experiment, plan_experiment

MLPERF = {"noise_probability": 0.1, "brightness_probability": 0.1, "mirror_axes": ("x", "y", "z")}
"""What the reference of MLPerf's 3D U-Net changes; 40 % of its patches are on foreground."""
MLPERF_FOREGROUND = 0.4
MLPERF_NOTE = (
    "NVIDIA's MLPerf Training v4.0 submission on eight H200 logs 76 samples a second a GPU at "
    "128^3, batch 7: another machine, with loading on 14 cores a GPU, augmentation and the "
    "exchange of gradients."
)
NUM_PATCHES = 100
"""Whose mean time is taken: enough for every change to be drawn about as often as it should."""
MEMORY = ("peak_bytes", "reserved_bytes")
"""What a run predicts of its first device, and measures."""
RUN_STEPS_OF_TURN = 4
"""An epoch of a whole run has as many times the steps of a turn: its first ones wait."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="128,128,128", help="of a patch")
    parser.add_argument("--batch-size", type=int, default=2, help="of each replica")
    parser.add_argument("--augmentation", choices=("default", "mlperf", "none"), default="default")
    parser.add_argument("--augmentation-device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--workers", default="16,8,2", help="numbers of processes to try")
    parser.add_argument("--volume", default="256,256,256", help="of a case")
    parser.add_argument("--num-cases", type=int, default=4)
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=48, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--nnunet", action="store_true", help="its trainer too")
    parser.add_argument("--patches", action="store_true", help="what one costs")
    parser.add_argument("--runs", nargs="*", default=[], help="devices of runs, such as 0 0,1")
    parser.add_argument(
        "--parallel", choices=("data", "spatial"), default="data", help="of runs on several devices"
    )
    parser.add_argument("--and", action="append", default=[], help="options of another setting")
    parser.add_argument("--cache", type=Path, help="keep the volumes there")
    parser.add_argument("--json", type=Path)
    return parser


def settings_of(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Yield the options of each setting."""
    yield arguments
    for more in getattr(arguments, "and"):
        # What the others measure beside, this one does where it says so itself.
        first = copy.copy(arguments)
        first.nnunet, first.patches, first.runs = False, False, []
        yield parser.parse_args(shlex.split(more), first)


def values_of(arguments: argparse.Namespace, cache: Path, num_replicas: int = 1) -> dict[str, Any]:
    """Return what differs from the default settings."""
    values: dict[str, Any] = {
        "data.cache": str(cache.absolute()),
        "data.phantom.num_cases": arguments.num_cases,
        "data.phantom.shape": parse_shape(arguments.volume),
        "data.num_folds": arguments.num_cases,
        "patches.size": parse_shape(arguments.shape),
        "model.channels": tuple(int(number) for number in arguments.channels.split(",")),
        "model.deep_supervision": False,  # the peers have none
        "training.batch_size": arguments.batch_size * num_replicas,
    }
    augmentation: dict[str, Any] = {"device": arguments.augmentation_device}
    if arguments.augmentation == "none":
        augmentation["enabled"] = False
    if arguments.augmentation == "mlperf":
        names = AugmentationSettings.model_fields
        augmentation |= {name: 0 for name in names if name.endswith("_probability")} | MLPERF
        values["patches.foreground_fraction"] = MLPERF_FOREGROUND
    return values | {f"patches.augmentation.{name}": one for name, one in augmentation.items()}


class Record:
    """The rows that were measured so far, on the disk too: a long call may be ended."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        device = torch.device(arguments.device)
        self._path: Path | None = arguments.json
        self._about = {
            **tuning_key([device], resolve_precision("auto", [device])),
            "num_cores": num_cores(),
            "mlperf": MLPERF_NOTE,
        }
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        setting: argparse.Namespace,
        way: str,
        num_workers: int | str,
        measured: dict[str, Any],
    ) -> None:
        """Add a row of a setting."""
        about = ("shape", "batch_size", "augmentation", "volume", "channels")
        row = {"way": way, **{name: getattr(setting, name) for name in about}}
        self.rows.append(row | {"num_workers": num_workers, **measured})
        print(self.rows[-1], file=sys.stderr)
        if self._path is not None:
            self._path.write_text(json.dumps({**self._about, "rows": self.rows}, indent=2) + "\n")


def measure_setting(setting: argparse.Namespace, cache: Path, record: Record) -> None:
    """Measure one setting in all the ways that are asked for."""
    config = Config().with_values(
        values_of(setting, cache) | {"parallel.devices": (setting.device,)}
    )
    experiment = plan_experiment(config, num_workers=min(4, num_cores() - 1))
    if setting.patches:
        ours = patch_costs.measure(experiment, NUM_PATCHES, torch.device(setting.device))
        record.add(setting, "a patch", 1, ours)
        num_batches = -(-NUM_PATCHES // setting.batch_size)
        theirs = ask_nnunet(experiment, "patches", cache, 0, num_batches)
        record.add(setting, "a patch, nnU-Net", 1, theirs)
    workers = [int(number) for number in setting.workers.split(",") if number]
    speeds: dict[int, float] = {}
    for number in workers:
        ours = attempt(experiment, number, setting)
        speeds[number] = ours.get("samples_per_second", 0.0)
        record.add(setting, "ours", number, ours)
        clear()
    for number in workers if setting.nnunet else []:
        num_steps = setting.steps * setting.turns
        theirs = ask_nnunet(experiment, "train", cache, number, num_steps)
        if "reason" not in theirs:
            theirs["ours_times_as_fast"] = speeds[number] / theirs["samples_per_second"]
        record.add(setting, "nnU-Net", number, theirs)
    one: float | None = None
    for devices in setting.runs:
        run = run_training(setting, cache, devices)
        speed = run.get("samples_per_second")
        if speed is not None and run["num_devices"] == 1:
            one = speed
        elif speed is not None and one is not None:
            run["ratio"] = speed / (one * run["num_devices"])
        record.add(setting, f"run on {devices}", "auto", run)


def attempt(experiment: Experiment, num_workers: int, arguments: Any) -> dict[str, Any]:
    """Return the row of a training of ours, or the reason why there is none."""
    try:
        return measure(experiment, num_workers, arguments.steps, arguments.turns)
    except Exception as error:  # the other rows shall be measured
        return {"reason": reason_of(error)}


def ask_nnunet(
    experiment: Experiment,
    task: Literal["train", "patches"],
    cache: Path,
    num_workers: int,
    num_steps: int,
) -> dict[str, Any]:
    """Return what nnU-Net measures, on data that it has prepared itself."""
    ask, make_request = nnunet_peer.ask, nnunet_peer.make_request
    prepared = ask(make_request(experiment, "prepare", cache, min(4, num_cores()), 0))
    if "reason" in prepared:
        return prepared
    return ask(make_request(experiment, task, cache, num_workers, num_steps))


def run_training(arguments: argparse.Namespace, cache: Path, devices: str) -> dict[str, Any]:
    """Return the speed of ``unet3d train`` on these devices, after its first epoch."""
    num_devices = len(devices.split(","))
    num_replicas = num_devices if arguments.parallel == "data" else 1
    values = values_of(arguments, cache, num_replicas)
    batch_size = values["training.batch_size"]
    values["training.steps_per_epoch"] = RUN_STEPS_OF_TURN * arguments.steps
    num_epochs = arguments.turns + 1
    values["training.epochs"] = values["training.validate_every"] = num_epochs
    with tempfile.TemporaryDirectory() as folder:
        settings, output = Path(folder) / "settings.yaml", Path(folder) / "run"
        settings.write_text(Config().with_values(values).to_yaml())
        mode = arguments.parallel if num_devices > 1 else "none"
        done = subprocess.run(
            [sys.executable, "-m", "unet3d", "train", "--quiet", "--config", str(settings),
             "--parallel", mode, "--devices", devices, "--output", str(output)],
            stdout=sys.stderr.fileno(), check=False,
        )  # fmt: skip
        if done.returncode:
            return {"reason": f"unet3d train ended with {done.returncode}"}
        lines = (output / "metrics.jsonl").read_text().splitlines()
        slot = json.loads((output / "memory.json").read_text())["slots"][0]
    epochs = [json.loads(line) for line in lines]
    num_steps = epochs[0]["step"]
    later = epochs[1:]
    seconds = [epoch["seconds"] / num_steps for epoch in later]
    return {
        "num_devices": num_devices,
        "samples_per_second": batch_size / statistics.median(seconds),
        "waiting_share": statistics.median(
            epoch["waited_seconds"] / epoch["seconds"] for epoch in later
        ),
        "all_seconds": seconds,
        "steps_of_epoch": num_steps,
        **{f"predicted_{name}": slot["predicted"].get(name) for name in MEMORY},
        **{name: slot["measured"][name] for name in MEMORY},
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each row: trainings in samples a second, patches in milliseconds."""
    columns = (
        ("samples/s", "samples_per_second", "10.2f", 1),
        ("alone", "alone_samples_per_second", "10.2f", 1),
        ("ratio", "ratio", "8.3f", 1),
        ("waited", "waiting_share", "8.1%", 1),
        ("peak GiB", "peak_bytes", "10.2f", 2**30),
        ("alone", "alone_peak_bytes", "8.2f", 2**30),
        ("reserved", "reserved_bytes", "10.2f", 2**30),
        ("alone", "alone_reserved_bytes", "8.2f", 2**30),
    )
    widths = [int(form.split(".")[0]) for _, _, form, _ in columns]
    heads = (f"{head:>{width}}" for (head, *_), width in zip(columns, widths, strict=True))
    print(f"{'':20}{'size':16}{'augmentation':14}workers{''.join(heads)}")
    for row in rows:
        size = "x".join([*row["shape"].split(","), str(row["batch_size"])])
        line = f"{row['way']:20}{size:16}{row['augmentation']:14}{row['num_workers']:>7}"
        if "reason" in row:
            print(f"{line}  {row['reason']}")
        elif row["way"].startswith("a patch"):
            costs = (
                f"{name.removesuffix('_seconds').replace('_', ' ')} {1000 * row[name]:.2f} ms"
                for name in row
                if name.endswith("_seconds")
            )
            print(f"{line}  {', '.join(costs)}")
        else:
            for (_, name, form, unit), width in zip(columns, widths, strict=True):
                known = row.get(name) is not None
                line += f"{row[name] / unit:{form}}" if known else " " * width
            if "ours_times_as_fast" in row:
                line += f"  ours is {row['ours_times_as_fast']:.2f} times as fast"
            print(line)
    if any(row["augmentation"] == "mlperf" for row in rows):
        print(f"{MLPERF_NOTE} Here are {num_cores()} cores.")


def main() -> None:
    """Measure every setting, print the table, write the record."""
    parser = make_parser()
    arguments = parser.parse_args()
    record = Record(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings_of(arguments, parser):
            measure_setting(setting, arguments.cache or Path(folder), record)
    print_table(record.rows)


if __name__ == "__main__":
    main()
