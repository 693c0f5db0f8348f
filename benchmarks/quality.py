"""Default training runs of unet3d and, if installed, nnU-Net: Dice, HD95, NSD over folds.

    python benchmarks/quality.py DATASET --minutes 4 --json quality.json
    python benchmarks/quality.py DATASET --minutes 4 --folds 0,1,2,3,4 --devices 0,1,2,3 --keep work
    python benchmarks/quality.py DATASET --held-out OTHER

Both train on the cases that are not in the fold, with their own defaults: ``unet3d train DATASET``
without a configuration (but for ``--config`` and ``--set``), and nnU-Net's planner and trainer,
3d_fullres. With ``--minutes`` both have the same wall time, without the time to prepare data: a
short training run of each measures an epoch, from which the number of epochs follows. Without
``--minutes`` each trains for as many epochs as it does by default, which takes nnU-Net hours.
``--epochs`` and ``--nnunet-epochs`` set the numbers.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nnunet_process
import yaml
from common import devices_named, new_parser, numbers, one_device, words, write_record
from nnunet import command_of_nnunet, with_torch_resampler

from unet3d.datasets.dataset import Case, fold_cases, load_dataset
from unet3d.distributed.ranks import num_cores

NUM_TIMED_EPOCHS = 2
NUM_FOLDS = 5
WAYS = {"plain": (), "mirrored": ("--tta",)}
"""Both predict with and without mirror images: the options of ``unet3d predict``."""
MEASURES = ("dice", "hd95_mm", "nsd")
TOOLS = ("unet3d", "nnU-Net")
RESULT = "result.json"
"""File that is written last into a folder of work."""
NNUNET_EPOCHS = 1000
"""nnU-Net's default number of epochs."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--minutes", type=float, help="of each training run")
    parser.add_argument("--epochs", type=int, help="of ours; default: by --minutes, else its own")
    parser.add_argument("--nnunet-epochs", type=int, help="of nnU-Net; likewise")
    parser.add_argument("--held-out", type=Path, help="a data set that nobody trains on")
    parser.add_argument("--folds", type=numbers, default="0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--devices", type=words, default=one_device(), help="one training run on each"
    )
    parser.add_argument("--config", type=Path, help="of ours; default: none")
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
    cases = {
        case["case"]: {
            label: {measure: values[measure] for measure in MEASURES}
            for label, values in case["labels"].items()
        }
        for case in found["cases"]
    }
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
    num_epochs: int | None,
    sets: Mapping[str, Path],
    folder: Path,
) -> dict[str, Any]:
    """Train unet3d, and score it on sets of cases."""
    run = folder / "run"
    row: dict[str, Any] = {
        "train_seconds": train(arguments, fold, device, num_epochs, run),
        "num_epochs": len(epochs_of(run)),
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


def train(
    arguments: argparse.Namespace, fold: int | str, device: str, num_epochs: int | None, run: Path
) -> float:
    """Run ``unet3d train`` into a folder, and return the seconds that the command took."""
    said = ["train", arguments.dataset, "--fold", fold, "--seed", arguments.seed]
    said += ["--devices", device, "--output", run]
    said += [] if arguments.config is None else ["--config", arguments.config]
    said += [word for change in arguments.changes for word in ("--set", change)]
    return unet3d(*said, *([] if num_epochs is None else ["--epochs", num_epochs]))


def epochs_of(run: Path) -> list[dict[str, Any]]:
    """Return what a run of ours recorded of each epoch."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def our_num_epochs(arguments: argparse.Namespace, fold: int, device: str, folder: Path) -> int:
    """Return the number of epochs that ``unet3d train`` completes in the minutes."""
    train(arguments, fold, device, NUM_TIMED_EPOCHS, folder / "timed")
    config = yaml.safe_load((folder / "timed" / "config.yaml").read_text())
    last = epochs_of(folder / "timed")[-1]
    validation = last["validation_seconds"] / config["training"]["validate_every"]
    # A second run measures the rest: start, planning, compilation, validation.
    whole = train(arguments, fold, device, 1, folder / "started")
    beside = whole - epochs_of(folder / "started")[-1]["seconds"]
    return max(1, int((60 * arguments.minutes - beside) / (last["seconds"] + validation)))


def nnunet(
    request: nnunet_process.Request, device: str, sets: Mapping[str, Path], folder: Path
) -> dict[str, Any]:
    """Train nnU-Net, and score it on sets of cases; or return a ``reason`` why not."""
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


def nnunet_num_epochs(request: nnunet_process.Request, minutes: float, folder: Path) -> int:
    """Return the number of epochs that nnU-Net completes in the minutes; 1 if it does not train."""
    row = nnunet_process.ask(request, folder)
    if "reason" in row:
        return 1
    first, *_, last = row["epoch_seconds"]
    return max(1, int((60 * minutes - (first - last)) / last))


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
            epochs = {tool: threads.submit(self.num_epochs, tool) for tool in TOOLS}
            rows = {
                (tool, fold): threads.submit(self.row, tool, fold, epochs[tool])
                for tool in TOOLS
                for fold in folds
            }
            return {fold: {tool: rows[tool, fold].result() for tool in TOOLS} for fold in folds}

    def num_epochs(self, tool: str) -> int | None:
        """Return the number of epochs of a tool, or none for its default."""
        epochs = {"unet3d": self.arguments.epochs, "nnU-Net": self.arguments.nnunet_epochs}
        given: int | None = epochs[tool]
        minutes, fold = self.arguments.minutes, self.arguments.folds[0]
        if given is not None or minutes is None:
            return given

        def measured(device: str, own: Path) -> int:
            if tool == "unet3d":
                return our_num_epochs(self.arguments, fold, device, own)
            request = self.request(fold, device, NUM_TIMED_EPOCHS)
            return nnunet_num_epochs(request, minutes, own)

        found: int = self.once(self.folder / "timed" / tool, measured)
        return found

    def row(self, tool: str, fold: int, epochs: Future[int | None]) -> dict[str, Any]:
        """Train one tool on a fold and score it."""
        num_epochs = epochs.result()

        def trained(device: str, own: Path) -> dict[str, Any]:
            sets = {"validation": own / "cases" / "validation"}
            put(self.validation(fold), sets["validation"])
            if self.arguments.held_out is not None:
                sets["held out"] = own / "cases" / "held-out"
                put(load_dataset(self.arguments.held_out).cases, sets["held out"])
            if tool == "unet3d":
                return ours(self.arguments, fold, device, num_epochs, sets, own)
            request = self.request(fold, device, num_epochs or NNUNET_EPOCHS)
            return nnunet(request, device, sets, own)

        found: dict[str, Any] = self.once(self.folder / f"fold-{fold}" / tool, trained)
        return found

    def once(self, own: Path, work: Callable[[str, Path], Any]) -> Any:
        """Do work on the next free device, or return the result of an earlier command."""
        if not (own / RESULT).exists():
            shutil.rmtree(own, ignore_errors=True)  # of a command that was ended
            own.mkdir(parents=True)
            device, share = self.places.get()
            os.sched_setaffinity(0, share)  # for this thread and the commands that it starts
            try:
                result = work(device, own)
            finally:
                self.places.put((device, share))
            (own / RESULT).write_text(json.dumps(result))
        return json.loads((own / RESULT).read_text())

    def validation(self, fold: int) -> Sequence[Case]:
        """Return the cases of a fold, on which nothing is trained."""
        return fold_cases(self.dataset, fold, NUM_FOLDS, self.arguments.seed)[1]

    def request(self, fold: int, device: str, num_epochs: int) -> nnunet_process.Request:
        """Return a request to train nnU-Net."""
        fit = nnunet_process.Fit(num_epochs=num_epochs, steps_per_epoch=self.arguments.nnunet_steps)
        workers = min(12, num_cores())  # as by nnU-Net's own default
        place = str(devices_named((device,))[0])
        return nnunet_process.request_of(
            self.dataset, self.validation(fold), place, workers, fit=fit
        )


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
    arguments = make_parser().parse_args()
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
