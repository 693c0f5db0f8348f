"""Default training runs of unet3d and, if installed, nnU-Net, with the same wall time.

    python benchmarks/quality.py DATASET --minutes 4 --json quality.json
    python benchmarks/quality.py DATASET --minutes 4 --folds 0,1,2,3,4 --devices 0,1,2,3 --keep work
    python benchmarks/quality.py DATASET --nnunet-epochs 1000 --held-out OTHER

Both train on the cases that are not in the fold, with their own defaults: ``unet3d train DATASET``
without a configuration (but for ``--set``), and nnU-Net's planner and trainer, 3d_fullres. Only the
number of epochs follows from ``--minutes``; a short training run before measures the time of an
epoch. ``--nnunet-epochs`` sets nnU-Net's number of epochs; without minutes, ours then gets the time
that they took. Data preparation is not counted.

Then the commands of both segment the images of the fold and, with ``--held-out``, of another data
set, from file to file, with and without mirror images. Ours omits its post-processing, which was
chosen on the cases of the fold; nnU-Net also runs with its torch resampler (``nnunet.py``).
``unet3d evaluate`` scores them.

Each of ``--devices`` trains one tool on one fold at a time, with its share of the cores. Results
stay in the folder of ``--keep``: ``fold-0/unet3d/run`` and ``fold-0/nnU-Net/results``. What is
finished there is not trained again, so several commands can share the work.
"""

import argparse
import json
import os
import queue
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nnunet_process
import yaml
from common import devices_named, new_parser, numbers, one_device, words, write_record
from nnunet import command_of_nnunet, with_torch_resampler

from unet3d.datasets.dataset import Case, Dataset, fold_cases, load_dataset
from unet3d.distributed.ranks import num_cores

NUM_TIMED_EPOCHS = 2
NUM_FOLDS = 5
WAYS = {"plain": (), "mirrored": ("--tta",)}
"""Both predict with and without mirror images: the options of ``unet3d predict``."""
MEASURES = ("dice", "hd95_mm", "nsd")
TOOLS = ("unet3d", "nnU-Net")
ROW = "row.json"
"""File that is written last into the folder of a tool and fold."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--minutes", type=float, help="of each training")
    parser.add_argument("--nnunet-epochs", type=int, help="as 1000, nnU-Net's own number")
    parser.add_argument("--held-out", type=Path, help="a data set that nobody trains on")
    parser.add_argument("--folds", type=numbers, default="0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--devices", type=words, default=one_device(), help="one training run on each"
    )
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--nnunet-steps", type=int, default=250, help="of an epoch of nnU-Net's")
    parser.add_argument("--keep", type=Path, help="leave all files in this folder")
    return parser


def seconds_of(said: Sequence[object], environment: Mapping[str, str] | None = None) -> float:
    """Run a command, and return the seconds that it took."""
    began = time.perf_counter()
    subprocess.run(
        [str(word) for word in said],
        env={**os.environ, **(environment or {})},
        stdout=sys.stderr.fileno(),
        check=True,
    )
    return time.perf_counter() - began


def unet3d(*said: object) -> float:
    """Run a command of ours, and return the seconds that it took."""
    print(f"unet3d {shlex.join(map(str, said))}", file=sys.stderr)
    return seconds_of([sys.executable, "-m", "unet3d", *said])


def scores(predictions: Path, labels: Path, folder: Path) -> dict[str, Any]:
    """Return the scores of segmentations: the mean, by label, and by case."""
    file = folder / "scores.json"
    unet3d("evaluate", predictions, labels, "--json", file, "--overwrite")
    found = json.loads(file.read_text())
    over_labels = {
        measure: spread(label[measure] for label in found["mean"].values())["mean"]
        for measure in MEASURES
    }
    cases = {case["case"]: case["labels"] for case in found["cases"]}
    return {**over_labels, "labels": found["mean"], "cases": cases}


def spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return the mean of values that are known, and their standard deviation if there are two."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "standard_deviation": statistics.stdev(known) if len(known) > 1 else None,
    }


def put(cases: Sequence[Case], folder: Path) -> None:
    """Copy cases to ``images`` and ``labels``, in the names that both tools read."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for case in cases:
        for channel, image in enumerate(case.images):
            shutil.copyfile(image, folder / "images" / f"{case.name}_{channel:04}.nii.gz")
        shutil.copyfile(case.label, folder / "labels" / f"{case.name}.nii.gz")


def ours(
    arguments: argparse.Namespace,
    fold: int,
    device: str,
    minutes: float,
    sets: Mapping[str, Path],
    folder: Path,
) -> dict[str, Any]:
    """Train unet3d for some minutes, and score it on sets of cases."""
    said = ["train", arguments.dataset, "--fold", fold, "--seed", arguments.seed]
    said += ["--devices", device]
    said += [word for change in arguments.changes for word in ("--set", change)]
    unet3d(*said, "--epochs", NUM_TIMED_EPOCHS, "--output", folder / "timed")
    lines = (folder / "timed" / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines]
    seconds = [epoch["seconds"] for epoch in epochs]
    config = yaml.safe_load((folder / "timed" / "config.yaml").read_text())
    validation = epochs[-1]["validation_seconds"] / config["training"]["validate_every"]
    # Run the command again to measure the rest: start, planning, compilation, validation.
    whole = unet3d(*said, "--epochs", 1, "--output", folder / "started")
    beside = whole - json.loads((folder / "started" / "metrics.jsonl").read_text())["seconds"]
    num_epochs = max(1, int((60 * minutes - beside) / (seconds[-1] + validation)))
    run = folder / "run"
    row: dict[str, Any] = {
        "train_seconds": unet3d(*said, "--epochs", num_epochs, "--output", run),
        "epoch_seconds": seconds,
        "num_epochs": num_epochs,
        "summary": json.loads((run / "summary.json").read_text()),
        "scores": {},
    }
    for name, cases in sets.items():
        for way, options in WAYS.items():
            out = folder / name / way
            predict = ["predict", cases / "images", "-o", out, "--checkpoint", run, *options]
            taken = unet3d(*predict, "--no-postprocessing", "--devices", device)
            found = scores(out, cases / "labels", folder)
            row["scores"][f"{name}, {way}"] = {**found, "predict_seconds": taken}
    return row


def nnunet(
    arguments: argparse.Namespace,
    dataset: Dataset,
    validation: Sequence[Case],
    device: str,
    sets: Mapping[str, Path],
    folder: Path,
) -> dict[str, Any]:
    """Train nnU-Net, and score it on sets of cases; or return a ``reason`` why not."""
    fit = nnunet_process.Fit(
        minutes=arguments.minutes,
        num_epochs=arguments.nnunet_epochs,
        steps_per_epoch=arguments.nnunet_steps,
    )
    workers = min(12, num_cores())  # as by nnU-Net's own default
    place = str(devices_named((device,))[0])
    request = nnunet_process.request_of(dataset, validation, place, workers, fit=fit)
    row = nnunet_process.ask(request, folder)
    if "reason" in row:
        return row
    row["scores"] = {}
    model = Path(row.pop("model"))
    faster = with_torch_resampler(model, folder / "with-torch-resampler")
    ways = {"plain": model, "mirrored": model, "plain, torch resampler": faster}
    for name, cases in sets.items():
        for way, of_way in ways.items():
            out = folder / name / way
            taken = seconds_of(
                *command_of_nnunet(
                    of_way, cases / "images", out, device, mirrored=way == "mirrored"
                )
            )
            found = scores(out, cases / "labels", folder)
            row["scores"][f"{name}, {way}"] = {**found, "predict_seconds": taken}
    return row


class Trials:
    """Training runs of both tools, each on the next free device with its share of the cores."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.dataset = load_dataset(arguments.dataset)
        self.places = queue.SimpleQueue[tuple[str, list[int]]]()
        cores = sorted(os.sched_getaffinity(0))
        self.num_places = min(len(arguments.devices), len(TOOLS) * len(arguments.folds))
        for index, device in enumerate(arguments.devices[: self.num_places]):
            self.places.put((device, cores[index :: self.num_places] or cores))

    def run(self) -> dict[int, dict[str, dict[str, Any]]]:
        """Return a row of each tool for each fold."""
        folds = self.arguments.folds
        with ThreadPoolExecutor(self.num_places) as threads:
            theirs = {fold: threads.submit(self.row_of, "nnU-Net", fold) for fold in folds}
            mine = {fold: threads.submit(self.ours, fold, theirs[fold]) for fold in folds}
            return {
                fold: {"unet3d": mine[fold].result(), "nnU-Net": theirs[fold].result()}
                for fold in folds
            }

    def ours(self, fold: int, theirs: Future[dict[str, Any]]) -> dict[str, Any]:
        """Return our row of a fold, with the time that nnU-Net took if no minutes are given."""
        minutes = self.arguments.minutes
        if minutes is None:
            row = theirs.result()
            if "reason" in row:
                return {"reason": "needs --minutes where nnU-Net does not train"}
            minutes = row["train_seconds"] / 60
        return self.row_of("unet3d", fold, minutes)

    def row_of(self, tool: str, fold: int, minutes: float | None = None) -> dict[str, Any]:
        """Train one tool on a fold and score it, or return the row of an earlier command."""
        own = self.folder / f"fold-{fold}" / tool
        if not (own / ROW).exists():
            shutil.rmtree(own, ignore_errors=True)  # of a command that was ended
            device, share = self.places.get()
            os.sched_setaffinity(0, share)  # for this thread and the commands that it starts
            try:
                row = self.train(tool, fold, device, minutes, own)
            finally:
                self.places.put((device, share))
            (own / ROW).write_text(json.dumps(row))
        return dict(json.loads((own / ROW).read_text()))

    def train(
        self, tool: str, fold: int, device: str, minutes: float | None, own: Path
    ) -> dict[str, Any]:
        """Train one tool on a fold on a device, and score it."""
        _, validation = fold_cases(self.dataset, fold, NUM_FOLDS, self.arguments.seed)
        sets = {"validation": own / "cases" / "validation"}
        put(validation, sets["validation"])
        if self.arguments.held_out is not None:
            sets["held out"] = own / "cases" / "held-out"
            put(load_dataset(self.arguments.held_out).cases, sets["held out"])
        if tool == "nnU-Net":
            return nnunet(self.arguments, self.dataset, validation, device, sets, own)
        assert minutes is not None
        return ours(self.arguments, fold, device, minutes, sets, own)


def summary(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the mean over folds of each score and time, with its spread, for each way."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        for tool, of_tool in row.items():
            for way, of_way in of_tool.get("scores", {}).items():
                times = {key: of_tool[key] for key in ("train_seconds", "num_epochs")}
                found.setdefault(f"{tool}, {way}", []).append({**of_way, **times})
    keys = (*MEASURES, "num_epochs", "train_seconds", "predict_seconds")
    return {
        way: {"num_folds": len(folds), "num_cases": sum(len(fold["cases"]) for fold in folds)}
        | {key: spread(fold[key] for fold in folds) for key in keys}
        for way, folds in found.items()
    }


def cell(value: Mapping[str, float | None], digits: int) -> str:
    """Return a mean, with its standard deviation if it has one."""
    parts = (value["mean"], value["standard_deviation"])
    return " ± ".join(f"{part:.{digits}f}" for part in parts if part is not None)


def main() -> None:
    """Train both and print a table."""
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.minutes is None and arguments.nnunet_epochs is None:
        parser.error("give --minutes, --nnunet-epochs, or both")
    if arguments.keep is not None:
        rows = Trials(arguments, arguments.keep.absolute()).run()
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = Trials(arguments, Path(folder)).run()
    table = summary(rows)
    print("| | folds, cases | Dice | HD95, mm | NSD | epochs | training, s | prediction, s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    digits = {"dice": 4, "hd95_mm": 2, "nsd": 4}
    digits |= {"num_epochs": 0, "train_seconds": 0, "predict_seconds": 1}
    for way, found in table.items():
        cells = [f"{found['num_folds']}, {found['num_cases']}"]
        cells += [cell(found[key], places) for key, places in digits.items()]
        print(f"| {way} | {' | '.join(cells)} |")
    for fold, row in rows.items():
        for tool, of_tool in row.items():
            if "reason" in of_tool:
                print(f"\n{tool}, fold {fold}: {of_tool['reason']}")
    devices = devices_named(arguments.devices)
    write_record(arguments.json, devices, summary=table, rows=rows)


if __name__ == "__main__":
    main()
