"""Whole training runs: samples per second, the wait for data, and nnU-Net's trainer.

    python benchmarks/training.py --cache volumes --workers 16,8,2 --nnunet --json training.json
    python benchmarks/training.py --workers '' --runs 0 0,1 --json replicas.json
    python benchmarks/training.py --workers '' --runs 0,1 --parallel spatial --batch-size 1
    python benchmarks/training.py --device cpu --shape 16,16,16 --volume 32,32,32 --channels 4,8 \
        --num-cases 3 --workers 0 --turns 1 --steps 4

The volumes are phantoms, prepared as for any training run. A row is a training run with one of the
numbers of loading processes, and with the loader, executor, optimizer and step of ``unet3d train``.
Turns of ``--steps`` steps on batches of the loader alternate with turns on one batch that is
already on the device, which wait for no data; the loading processes rest meanwhile. The first batch
of each process is not counted. The queue is empty at the start of a turn, so batches prepared ahead
do not hide a slow loader.

``--nnunet`` adds rows of nnU-Net's own trainer (``nnunet_process.py``). ``--runs`` adds real
``unet3d train`` commands, timed after their first epoch: each names devices, which have a replica
each, or with ``--parallel spatial`` a slab of each patch. The ratio compares samples per second
with the run on one device.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nnunet_process
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
    synchronize,
    timed,
    write_record,
)
from step import clear

from unet3d.config import Config, load_config
from unet3d.datasets.phantom import write_phantom_dataset
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks, num_cores
from unet3d.model import UNet3d
from unet3d.parallel import Layout, ParallelDims, parallelize, resolve_precision
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.patches.patches import Batch, CutBatch, PatchSampler
from unet3d.planning.experiment import Experiment, open_dataset, plan_experiment
from unet3d.planning.tuning_cache import resolve_auto
from unet3d.runs.run_folder import RunFolder
from unet3d.training.cases import RunContext
from unet3d.training.cores import DataClock, leave_cores
from unet3d.training.loop import TrainingLoop

NUM_WARM_UP_STEPS = 10
"""Steps after which small volumes are replayed from a CUDA graph."""
RUN_STEPS_OF_TURN = 4
"""Turns in an epoch of a whole run: a long one, because its first steps wait for data."""
MEMORY = ("peak_bytes", "reserved_bytes")
NNUNET_SECONDS = 300
"""Time limit of nnU-Net for a row."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", type=shape, default="128,128,128", help="of a patch")
    parser.add_argument("--batch-size", type=int, default=2, help="of each replica")
    parser.add_argument("--channels", type=numbers, default=CHANNELS)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--volume", type=shape, default="256,256,256", help="of a case")
    parser.add_argument("--num-cases", type=int, default=4)
    parser.add_argument("--workers", type=numbers, default="16,8,2", help="processes to try")
    parser.add_argument("--device", default=one_device())
    parser.add_argument("--steps", type=int, default=48, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--nnunet", action="store_true", help="also measure nnU-Net's trainer")
    parser.add_argument("--runs", nargs="*", default=[], help="devices of runs, such as 0 0,1")
    parser.add_argument(
        "--parallel", choices=("data", "spatial"), default="data", help="of runs on several devices"
    )
    parser.add_argument("--cache", type=Path, help="folder that keeps the volumes")
    return parser


def config_of(arguments: argparse.Namespace, cache: Path, **changes: Any) -> Config:
    """Return the settings of all rows, with changes, whose keys have ``__`` in place of dots."""
    num_cases = arguments.num_cases
    name = f"phantoms-{num_cases}-{'x'.join(map(str, arguments.volume))}"
    values = {
        "data.dataset": write_phantom_dataset(
            cache.absolute() / name, num_cases, arguments.volume, (1.0, 1.0, 1.0), seed=0
        ),
        "data.cache": str(cache.absolute()),
        "data.num_folds": num_cases,
        "patches.size": arguments.shape,
        "model.channels": arguments.channels,
        "model.deep_supervision": False,  # the peers have no such setting
        "training.batch_size": arguments.batch_size,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return load_config(None, arguments.changes).with_values(values)


# Steps on loaded batches and alone


def make_loop(experiment: Experiment, num_workers: int, folder: Path) -> TrainingLoop:
    """Build the training loop for one device, like ``unet3d train``."""
    dims = ParallelDims.resolve(experiment.config.parallel)
    precision = resolve_precision(experiment.config.training.precision, dims.devices)
    config = resolve_auto(experiment.config, experiment.step(dims, precision))
    torch.manual_seed(config.training.seed)
    model = UNet3d(experiment.topology)
    to_parameter_dtype(model, precision)
    leave_cores(num_workers, dims.devices, 1)
    context = RunContext(
        experiment=replace(experiment, config=config),
        executor=parallelize(model, Layout.of(config, dims, precision)),
        folder=RunFolder(folder),
        group=Group(Ranks()),
        dims=dims,
        precision=precision,
    )
    return TrainingLoop(context, num_workers, prediction=None)


def batch_on_host(experiment: Experiment) -> Batch:
    """Return a batch that this process makes."""
    config = experiment.config
    batch_size = config.training.num_patches
    sampler = PatchSampler(
        cases=experiment.training,
        settings=config.patches,
        size=experiment.patch_size,
        stride=experiment.topology.total_stride,
        batch_size=batch_size,
        seed=config.training.seed,
    )
    cuts = (sampler.cut(0, index) for index in range(batch_size))
    return CutBatch(cuts=tuple(cuts), shape=experiment.largest_patch(batch_size)).augmented()


class Measurement:
    """A training run, timed in turns on batches of its loader and on one existing batch."""

    def __init__(self, loop: TrainingLoop, there: Batch, num_workers: int, num_steps: int) -> None:
        """Take the first steps on a batch.

        Args:
            loop: The training loop, whose loader has not started.
            there: The batch for turns without the loader, on the host.
            num_workers: Number of the loader's processes.
            num_steps: Steps of each turn.
        """
        self.loop = loop
        self.there = there
        self.device = loop.executor.input_device
        self.num_steps = num_steps
        self.num_before = max(1, num_workers)
        self.num_epochs = 0
        self.alone(NUM_WARM_UP_STEPS)

    def start_loader(self) -> None:
        """Start the loader's processes; each makes one batch that is not used."""
        for _ in self.epoch(self.loop.loader.num_steps - self.num_before):
            pass

    def epoch(self, first_step: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch for which the loader has prepared nothing ahead.

        Epochs are skipped, because the loader already prepares batches of the next one.
        """
        self.num_epochs += 2
        return self.loop.loader.epoch(self.num_epochs, first_step)

    def alone(self, num_steps: int) -> dict[str, Any]:
        """Take steps on one batch that is on the device.

        Before the loader has started, the measured memory is that of the network alone.
        """
        image, target = self.there.image.to(self.device), self.there.target.to(self.device)
        there = replace(self.there, image=image, target=target)
        forget_peaks()
        (seconds,) = timed(lambda: self.loop._step(there), num_steps)
        return {"seconds": seconds, **peaks()}

    def loaded(self) -> dict[str, Any]:
        """Take the steps of an epoch, and time the middle ones."""
        forget_peaks()
        last = self.num_before + self.num_steps
        clock, ended = DataClock(self.device), 0.0
        for index, batch in enumerate(clock.timed(self.epoch())):
            if index in (self.num_before, last):
                synchronize()
                began, ended = ended, time.perf_counter()
                waited = clock.read()
            if index < last:
                self.loop._step(batch)
        del batch
        return {
            "seconds": (ended - began) / self.num_steps,
            "waiting_share": waited / (ended - began),
            **peaks(),
        }


def measure(
    experiment: Experiment, num_workers: int, num_steps: int, num_turns: int
) -> dict[str, Any]:
    """Return the row of one training run."""
    # All loading processes deliver at about the same time, so whole rounds of them are timed.
    burst = max(1, num_workers)
    num_steps = -(-num_steps // burst) * burst
    batch_size = experiment.config.training.num_patches
    config = experiment.config.with_values({"training.steps_per_epoch": burst + num_steps + 1})
    experiment = replace(experiment, config=config)
    with tempfile.TemporaryDirectory() as folder:
        loop = make_loop(experiment, num_workers, Path(folder) / "run")
        measurement = Measurement(loop, batch_on_host(experiment), num_workers, num_steps)
        alone, loaded = [measurement.alone(num_steps)], []
        measurement.start_loader()
        for _ in range(num_turns):
            loaded.append(measurement.loaded())
            alone.append(measurement.alone(num_steps))
    device = loop.executor.input_device
    is_on_device = device.type == "cuda"
    seconds = statistics.median(turn["seconds"] for turn in loaded)
    alone_seconds = statistics.median(turn["seconds"] for turn in alone)
    return {
        "augmented_on": "gpu" if is_on_device else "cpu",
        "samples_per_second": batch_size / seconds,
        "alone_samples_per_second": batch_size / alone_seconds,
        "ratio": alone_seconds / seconds,
        "waiting_share": statistics.median(turn["waiting_share"] for turn in loaded),
        **{name: loaded[-1][name] for name in MEMORY},
        **{f"alone_{name}": alone[0][name] for name in MEMORY},
        "all_seconds": [turn["seconds"] for turn in loaded],
        "all_alone_seconds": [turn["seconds"] for turn in alone],
    }


def attempt(
    experiment: Experiment, num_workers: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of a training run of ours, or the reason why there is none."""
    try:
        return measure(experiment, num_workers, arguments.steps, arguments.turns)
    except Exception as error:  # continue with the other rows
        return {"reason": reason_of(error)}


def ask_nnunet(
    experiment: Experiment, cache: Path, num_workers: int, num_steps: int, device: str
) -> dict[str, Any]:
    """Return measurements of nnU-Net's trainer on data that it has prepared itself."""
    config, dataset = experiment.config, open_dataset(experiment.config)
    steps = nnunet_process.Steps(
        size=experiment.largest_patch(config.training.num_patches),
        batch_size=config.training.num_patches,
        channels=experiment.topology.channels,
        strides=experiment.topology.strides,
        num_steps=num_steps,
    )
    held_back = {case.name for case in experiment.validation}
    validation = [case for case in dataset.cases if case.name in held_back]
    request = nnunet_process.request_of(dataset, validation, device, num_workers, steps=steps)
    return nnunet_process.ask(request, cache / f"nnunet-{dataset.root.name}", NNUNET_SECONDS)


# Whole runs


def run_training(arguments: argparse.Namespace, cache: Path, devices: str) -> dict[str, Any]:
    """Return the speed of ``unet3d train`` on these devices, after its first epoch."""
    num_devices = len(devices.split(","))
    num_replicas = num_devices if arguments.parallel == "data" else 1
    batch_size = arguments.batch_size * num_replicas
    num_epochs = arguments.turns + 1
    config = config_of(
        arguments,
        cache,
        training__batch_size=batch_size,
        training__steps_per_epoch=RUN_STEPS_OF_TURN * arguments.steps,
        training__epochs=num_epochs,
        training__validate_every=num_epochs,
    )
    with tempfile.TemporaryDirectory() as folder:
        settings, output = Path(folder) / "settings.yaml", Path(folder) / "run"
        settings.write_text(config.to_yaml())
        mode = arguments.parallel if num_devices > 1 else "none"
        command = [sys.executable, "-m", "unet3d", "train", "--quiet", "--config", str(settings)]
        command += ["--parallel", mode, "--devices", devices, "--output", str(output)]
        done = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
        if done.returncode:
            return {"reason": f"unet3d train ended with {done.returncode}"}
        lines = (output / "metrics.jsonl").read_text().splitlines()
        slot = json.loads((output / "memory.json").read_text())["slots"][0]
    epochs = [json.loads(line) for line in lines]
    num_steps, later = epochs[0]["step"], epochs[1:]
    seconds = [epoch["seconds"] / num_steps for epoch in later]
    return {
        "num_devices": num_devices,
        "samples_per_second": batch_size / statistics.median(seconds),
        "waiting_share": statistics.median(
            epoch["waited_seconds"] / epoch["seconds"] for epoch in later
        ),
        "all_seconds": seconds,
        "steps_of_epoch": num_steps,
        "predicted_peak_bytes": [slot["predicted"].get("peak_bytes")],
        **{name: [slot["measured"][name]] for name in MEMORY},
    }


def rows_of(arguments: argparse.Namespace, cache: Path) -> Iterator[dict[str, Any]]:
    """Measure all requested ways, and yield a row for each."""
    config = config_of(arguments, cache, parallel__devices=(arguments.device,))
    experiment = plan_experiment(config, num_workers=max(0, min(4, num_cores() - 1)))
    speeds: dict[int, float] = {}
    for number in arguments.workers:
        ours = attempt(experiment, number, arguments)
        speeds[number] = ours.get("samples_per_second", 0.0)
        yield {"way": "ours", "num_workers": number, **ours}
        clear()
    for number in arguments.workers if arguments.nnunet else ():
        num_steps = arguments.steps * arguments.turns
        theirs = ask_nnunet(experiment, cache, number, num_steps, arguments.device)
        if "reason" not in theirs:
            theirs["ours_times_as_fast"] = speeds[number] / theirs["samples_per_second"]
        yield {"way": "nnU-Net", "num_workers": number, **theirs}
    one: float | None = None
    for devices in arguments.runs:
        run = run_training(arguments, cache, devices)
        speed = run.get("samples_per_second")
        if speed is not None and run["num_devices"] == 1:
            one = speed
        elif speed is not None and one is not None:
            run["ratio"] = speed / one
        yield {"way": f"run on {devices}", "num_workers": "auto", **run}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each row."""
    columns = (
        ("samples/s", "samples_per_second", "10.2f"),
        ("alone", "alone_samples_per_second", "10.2f"),
        ("ratio", "ratio", "8.3f"),
        ("waited", "waiting_share", "8.1%"),
    )
    widths = [int(form.split(".")[0]) for _, _, form in columns]
    heads = (f"{head:>{width}}" for (head, *_), width in zip(columns, widths, strict=True))
    print(f"{'':20}workers{''.join(heads)}  peak GiB, alone; reserved, alone")
    for row in rows:
        line = f"{row['way']:20}{row['num_workers']:>7}"
        if "reason" in row:
            print(f"{line}  {row['reason']}")
            continue
        for (_, name, form), width in zip(columns, widths, strict=True):
            line += f"{row[name]:{form}}" if row.get(name) is not None else " " * width
        held = [row.get(f"{when}{name}", []) for name in MEMORY for when in ("", "alone_")]
        line += "".join(f"{number / GIB:8.2f}" for one in held for number in one if number)
        if "ours_times_as_fast" in row:
            line += f"  ours is {row['ours_times_as_fast']:.2f} times as fast"
        print(line)


def main() -> None:
    """Measure, print the table, write the record after each row."""
    arguments = make_parser().parse_args()
    rows: list[dict[str, Any]] = []
    names = ("shape", "batch_size", "channels", "changes", "volume")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(arguments, arguments.cache or Path(folder)):
            rows.append(row)
            say(row)
            write_record(
                arguments.json,
                devices_named((arguments.device,)),
                setting={name: getattr(arguments, name) for name in names},
                rows=rows,
            )
    print_table(rows)


if __name__ == "__main__":
    main()
