"""Default trainings of unet3d and, where it is installed, of nnU-Net, of the same wall time.

    python benchmarks/quality.py DATASET --minutes 4 --json quality.json
    python benchmarks/quality.py DATASET --minutes 4 --held-out OTHER --keep work

Both train on the cases that are not in the fold, for ``--minutes``, with what they choose
themselves: ``unet3d train DATASET`` without a configuration (but for ``--set``), and nnU-Net's
planner and trainer, 3d_fullres. Only the number of epochs follows from the minutes; a short
training before it tells how long one takes. Preparing the data is not counted. Then both segment
the images of the fold and, if one is named, of another data set's folder that nobody trained on,
from file to file, with and without mirror images, and ``unet3d evaluate`` scores them. What both
trained stays in the folder of ``--keep``: ``unet3d/run`` and ``nnunet/results``.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nnunet_process
import yaml
from common import devices_named, new_parser, one_device, write_record

from unet3d.datasets.dataset import Case, Dataset, fold_cases, load_dataset
from unet3d.distributed.ranks import num_cores

NUM_TIMED_EPOCHS = 2
NUM_FOLDS = 5
WAYS = {"plain": (), "mirrored": ("--tta",)}
"""Both predict with and without mirror images: the options of ``unet3d predict``."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--minutes", type=float, required=True, help="of each training")
    parser.add_argument("--held-out", type=Path, help="a data set that nobody trains on")
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=one_device())
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--nnunet-steps", type=int, default=250, help="of an epoch of nnU-Net's")
    parser.add_argument("--keep", type=Path, help="leave all files in this new folder")
    return parser


def unet3d(*words: object) -> float:
    """Run a command, and return the seconds that it took."""
    said = [str(word) for word in words]
    print(f"unet3d {shlex.join(said)}", file=sys.stderr)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "unet3d", *said], stdout=sys.stderr.fileno(), check=True)
    return time.perf_counter() - began


def scores(predictions: Path, labels: Path, folder: Path) -> dict[str, Any]:
    """Return the mean Dice of segmentations, over labels and of each."""
    file = folder / "scores.json"
    unet3d("evaluate", predictions, labels, "--json", file, "--overwrite")
    found = json.loads(file.read_text())
    return {
        "mean_dice": found["mean_dice"],
        "dice": {label: mean["dice"] for label, mean in found["mean"].items()},
        "num_cases": len(found["cases"]),
    }


def put(cases: Sequence[Case], folder: Path) -> None:
    """Copy cases to ``images`` and ``labels``, in the names that both tools read."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for case in cases:
        for channel, image in enumerate(case.images):
            shutil.copyfile(image, folder / "images" / f"{case.name}_{channel:04}.nii.gz")
        shutil.copyfile(case.label, folder / "labels" / f"{case.name}.nii.gz")


def ours(arguments: argparse.Namespace, sets: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Train unet3d, and score it on sets of cases."""
    words = ["train", arguments.dataset, "--fold", arguments.fold, "--seed", arguments.seed]
    words += ["--devices", arguments.device]
    words += [word for change in arguments.changes for word in ("--set", change)]
    unet3d(*words, "--epochs", NUM_TIMED_EPOCHS, "--output", folder / "timed")
    lines = (folder / "timed" / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines]
    seconds = [epoch["seconds"] for epoch in epochs]
    config = yaml.safe_load((folder / "timed" / "config.yaml").read_text())
    validation = epochs[-1]["validation_seconds"] / config["training"]["validate_every"]
    # The command again, for what it takes besides: start, planning, compiling, validation.
    whole = unet3d(*words, "--epochs", 1, "--output", folder / "started")
    beside = whole - json.loads((folder / "started" / "metrics.jsonl").read_text())["seconds"]
    num_epochs = max(1, int((60 * arguments.minutes - beside) / (seconds[-1] + validation)))
    run = folder / "run"
    row: dict[str, Any] = {
        "train_seconds": unet3d(*words, "--epochs", num_epochs, "--output", run),
        "epoch_seconds": seconds,
        "num_epochs": num_epochs,
        "summary": json.loads((run / "summary.json").read_text()),
    }
    for name, cases in sets.items():
        for way, options in WAYS.items():
            out = folder / name / way
            predict = ["predict", cases / "images", "-o", out, "--checkpoint", run, *options]
            predict_seconds = unet3d(*predict, "--devices", arguments.device)
            found = scores(out, cases / "labels", folder)
            row[f"{name}, {way}"] = {**found, "predict_seconds": predict_seconds}
    return row


def nnunet(
    arguments: argparse.Namespace,
    dataset: Dataset,
    validation: Sequence[Case],
    sets: Mapping[str, Path],
    folder: Path,
) -> dict[str, Any]:
    """Train nnU-Net, and score it on sets of cases; or return a ``reason`` why not."""
    fit = nnunet_process.Fit(
        minutes=arguments.minutes,
        steps_per_epoch=arguments.nnunet_steps,
        folders={str(cases / "images"): str(folder / name) for name, cases in sets.items()},
    )
    workers = min(8, num_cores())
    request = nnunet_process.request_of(dataset, validation, arguments.device, workers, fit=fit)
    row = nnunet_process.ask(request, folder)
    if "reason" not in row:
        for name, cases in sets.items():
            for way in WAYS:
                row[f"{name}, {way}"] = scores(folder / name / way, cases / "labels", folder)
    return row


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Train both in a folder, and return a row of each."""
    dataset = load_dataset(arguments.dataset)
    _, validation = fold_cases(dataset, arguments.fold, NUM_FOLDS, arguments.seed)
    sets = {"validation": folder / "cases" / "validation"}
    put(validation, sets["validation"])
    if arguments.held_out is not None:
        sets["held out"] = folder / "cases" / "held-out"
        put(load_dataset(arguments.held_out).cases, sets["held out"])
    for name in ("unet3d", "nnunet"):
        (folder / name).mkdir()
    return {
        "unet3d": ours(arguments, sets, folder / "unet3d"),
        "nnU-Net": nnunet(arguments, dataset, validation, sets, folder / "nnunet"),
    }


def main() -> None:
    """Train both and print a table."""
    arguments = make_parser().parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir()
        rows = compare(arguments, arguments.keep.absolute())
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(arguments, Path(folder))
    print("| | cases | mean Dice | epochs | training, s |\n|---|---|---:|---:|---:|")
    for way, row in rows.items():
        if "reason" in row:
            print(f"| {way} | | {row['reason']} | | |")
        for name, found in row.items():
            if isinstance(found, dict) and "num_cases" in found:
                print(
                    f"| {way} | {found['num_cases']}, {name} | {found['mean_dice']:.4f} | "
                    f"{row['num_epochs']} | {row['train_seconds']:.0f} |"
                )
    write_record(arguments.json, devices_named((arguments.device,)), rows=rows)


if __name__ == "__main__":
    main()
