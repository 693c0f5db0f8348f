"""Membranes in a FIB-SEM stack: unet3d on a few CPU cores, and nnU-Net on a GPU, in equal time.

    python benchmarks/membranes.py FOLDER --minutes 10 --threads 2 --keep work --json membranes.json
    python benchmarks/membranes.py FOLDER --prepare membranes

FOLDER holds ``fib25_raw.tif`` and ``fib25_membrane.tif``, 170 planes of 250x250 voxels. The first
120 planes become a data set of four blocks in nnU-Net's layout, as TIFF, the last 50 a stack that
is only scored; ``--prepare`` writes nothing but that. Both programs read these files, and train on
all four blocks: ours with ``--config``, on ``--device`` with the cores of ``--threads``; nnU-Net
with its own plan, 3d_fullres, on ``--nnunet-device`` with all cores.

With ``--minutes`` both train for that time, without the preparation of data: the number of our
epochs follows from a short training run, nnU-Net's from its second epoch. Without it, ours trains
as configured, and nnU-Net does not run. ``--config none`` trains ours with its defaults. Then the
commands of both segment the last planes, with and without mirror images. The Dice is computed here
from the files.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nnunet_process
import numpy as np
from common import devices_named, new_parser, one_device, write_record
from nnunet import command_of_nnunet
from numpy.typing import NDArray
from quality import (
    NNUNET_EPOCHS,
    NUM_TIMED_EPOCHS,
    TOOLS,
    epochs_of,
    seconds_of,
    train,
    unet3d,
)

from unet3d.datasets.dataset import load_dataset
from unet3d.distributed.ranks import num_cores

NUM_TRAINED = 120
"""Planes to train on; the others are scored."""
WAYS = {"plain": "--no-tta", "mirrored": "--tta"}
"""Both predict with and without mirror images: the option of ``unet3d predict``."""
SPACING_MM = (1e-5, 1e-5, 1e-5)
CONFIG = Path(__file__).parent.parent / "configs" / "em-membranes.yaml"


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, help="of each training run")
    parser.add_argument("--config", type=config, default=CONFIG, help="of ours, or none")
    parser.add_argument("--epochs", type=int, help="of ours; default: by --minutes, else its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="cpu", help="of ours")
    parser.add_argument("--threads", type=int, help="cores of ours")
    parser.add_argument("--nnunet-device", default=one_device())
    parser.add_argument("--nnunet-steps", type=int, default=250, help="of an epoch of nnU-Net's")
    parser.add_argument("--prepare", type=Path, metavar="DATASET", help="only write the data set")
    parser.add_argument("--only", choices=TOOLS, help="train only one of the two")
    parser.add_argument("--keep", type=Path, help="leave all files in this new folder")
    return parser


def config(text: str) -> Path | None:
    """Return the path of a configuration, or none."""
    return None if text == "none" else Path(text)


def prepare(folder: Path, dataset: Path) -> None:
    """Write the data set: blocks to train on, and in ``imagesTs`` and ``labelsTs`` the test."""
    import tifffile

    image, label = (tifffile.imread(folder / f"fib25_{name}.tif") for name in ("raw", "membrane"))
    rows, columns = (size // 2 for size in image.shape[1:])
    trained = slice(0, NUM_TRAINED)
    for number, (top, left) in enumerate(np.ndindex(2, 2)):
        block = (
            trained,
            slice(top * rows, (top + 1) * rows),
            slice(left * columns, (left + 1) * columns),
        )
        put(f"block{number}", image[block], label[block], dataset, "Tr")
    put("test", image[NUM_TRAINED:], label[NUM_TRAINED:], dataset, "Ts")
    description = {
        "channel_names": {"0": "EM"},
        "labels": {"background": 0, "membrane": 1},
        "numTraining": 4,
        "file_ending": ".tif",
        "overwrite_image_reader_writer": "Tiff3DIO",
    }
    (dataset / "dataset.json").write_text(json.dumps(description, indent=1))


def put(
    name: str, image: NDArray[np.uint8], label: NDArray[np.uint8], dataset: Path, part: str
) -> None:
    """Write a case as stacks, with the spacing in a file beside each, as nnU-Net reads it."""
    import tifffile

    for kind, array, channel in (("images", image, "_0000"), ("labels", label, "")):
        folder = dataset / f"{kind}{part}"
        folder.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(folder / f"{name}{channel}.tif", array, compression="zlib")
        (folder / f"{name}.json").write_text(json.dumps({"spacing": SPACING_MM}))


def scores(predictions: Path, dataset: Path) -> dict[str, float]:
    """Return the Dice of the only segmentation in a folder, and its precision and recall."""
    import tifffile

    (file,) = predictions.glob("*.tif")
    found = tifffile.imread(file) == 1
    truth = tifffile.imread(dataset / "labelsTs" / "test.tif") == 1
    both = int((found & truth).sum())
    return {
        "dice": 2 * both / int(found.sum() + truth.sum()),
        "precision": both / max(1, int(found.sum())),
        "recall": both / int(truth.sum()),
    }


@contextmanager
def cores(number: int | None) -> Iterator[None]:
    """Let commands that are started use only this number of cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def our_num_epochs(arguments: argparse.Namespace, run: Path) -> int:
    """Return the number of epochs that ``unet3d train`` completes in the minutes."""
    whole = train(arguments, "none", arguments.device, NUM_TIMED_EPOCHS, run)
    seconds = [epoch["seconds"] for epoch in epochs_of(run)]
    left = 60 * arguments.minutes - (whole - sum(seconds))
    return max(1, int(left / seconds[-1]))


def ours(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train unet3d, and score it."""
    num_epochs = arguments.epochs
    if num_epochs is None and arguments.minutes is not None:
        num_epochs = our_num_epochs(arguments, folder / "timed")
    run = folder / "run"
    row: dict[str, Any] = {
        "train_seconds": train(arguments, "none", arguments.device, num_epochs, run),
        "num_epochs": len(epochs_of(run)),
        "scores": {},
    }
    images = arguments.dataset / "imagesTs"
    for way, option in WAYS.items():
        out = folder / way
        said = ["predict", images, "-o", out, "--checkpoint", run, option]
        taken = unet3d(*said, "--no-postprocessing", "--devices", arguments.device)
        row["scores"][way] = {**scores(out, arguments.dataset), "predict_seconds": taken}
    return row


def nnunet(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train nnU-Net on all cases, and score it; or return a ``reason`` why not."""
    device = arguments.nnunet_device

    fit = nnunet_process.Fit(
        num_epochs=NNUNET_EPOCHS,
        steps_per_epoch=arguments.nnunet_steps,
        seconds=60 * arguments.minutes,
    )
    request = nnunet_process.request_of(
        load_dataset(arguments.dataset),
        (),
        str(devices_named((device,))[0]),
        min(12, num_cores()),  # as by nnU-Net's own default
        raw=str(arguments.dataset),
        fit=fit,
    )
    row = nnunet_process.ask(request, folder)
    if "reason" in row:
        return row
    row["scores"] = {}
    images, model = arguments.dataset / "imagesTs", Path(row.pop("model"))
    for way in WAYS:
        out, mirrored = folder / way, way == "mirrored"
        said = command_of_nnunet(model, images, out, device, folds=("all",), mirrored=mirrored)
        taken = seconds_of(*said)
        row["scores"][way] = {**scores(out, arguments.dataset), "predict_seconds": taken}
    return row


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Return a row for each program."""
    arguments.dataset = folder / "dataset"
    prepare(arguments.folder, arguments.dataset)
    rows = {}
    if arguments.only != "nnU-Net":
        with cores(arguments.threads):
            rows["unet3d"] = ours(arguments, folder / "unet3d")
    if arguments.only != "unet3d" and arguments.minutes is not None:
        rows["nnU-Net"] = nnunet(arguments, folder / "nnunet")
    return rows


def main() -> None:
    """Train both and print a table."""
    arguments = make_parser().parse_args()
    if arguments.prepare is not None:
        prepare(arguments.folder, arguments.prepare)
        return
    if arguments.keep is not None:
        rows = measure(arguments, arguments.keep.absolute())
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(arguments, Path(folder))
    print("| | device | Dice | precision | recall | epochs | training, s | prediction, s |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    devices = {"unet3d": arguments.device, "nnU-Net": arguments.nnunet_device}
    for tool, row in rows.items():
        for way, found in row.get("scores", {}).items():
            cells = [f"{found[key]:.4f}" for key in ("dice", "precision", "recall")]
            cells += [f"{row['num_epochs']}", f"{row['train_seconds']:.0f}"]
            cells.append(f"{found['predict_seconds']:.1f}")
            print(f"| {tool}, {way} | {devices[tool]} | {' | '.join(cells)} |")
        if "reason" in row:
            print(f"\n{tool}: {row['reason']}", file=sys.stderr)
    named = devices_named(tuple(dict.fromkeys(devices.values())))
    write_record(arguments.json, named, threads=arguments.threads, rows=rows)


if __name__ == "__main__":
    main()
