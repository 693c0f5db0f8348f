"""``unet3d train``."""

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.cli.command import GivenSettings, command, dataset_argument, grouped, setting
from unet3d.cli.options import (
    FILE,
    batch_options,
    common_options,
    devices_option,
    output_option,
    parallel_option,
    reading_options,
    replicas_option,
)
from unet3d.cli.output import begin_as_rank, load_torch, show_result

if TYPE_CHECKING:
    from unet3d.reports.tables import Table
    from unet3d.runs.run_folder import RunFolder


@command("unet3d train DATASET --devices 0,1", "unet3d train --resume -o runs/mine --epochs 200")
@dataset_argument()
@grouped(
    "Training",
    setting(
        "training.epochs",
        "--epochs",
        "N",
        "Total number of epochs; with --resume, a larger number extends the run.",
    ),
    setting(
        "data.fold",
        "--fold",
        "K|none",
        "Fold that validates, counted from 0; none: train on all cases.",
    ),
    click.option(
        "--folds",
        metavar="LIST",
        help="Folds to train: all, or a list such as 0,1,2. Each device trains one fold at a time; "
        "if --parallel names a mode, all devices train each fold together.",
    ),
    setting(
        "training.init",
        "--init",
        None,
        "Checkpoint or run whose weights the new run starts from; its labels may differ.",
        type=FILE,
    ),
    *batch_options,
    setting("training.seed", "--seed", "S", "Seed of every random choice."),
)
@grouped(
    "Devices",
    devices_option,
    parallel_option,
    replicas_option,
    setting(
        "parallel.max_restarts",
        "--max-restarts",
        "N",
        "How often to restart from the latest checkpoint when a process dies.",
    ),
)
@reading_options
@grouped(
    "Output",
    output_option("Folder of the run; default: a new one in runs/."),
    click.option("--resume", is_flag=True, help="Continue the run in --output, or the newest one."),
    click.option("--quiet", is_flag=True, help="Show neither progress nor tables."),
)
@common_options
def train(
    *, settings: GivenSettings, folds: str | None, output: Path | None, resume: bool, quiet: bool
) -> None:
    """Train a network on DATASET.

    DATASET is a folder with a dataset.json in the layout of the Medical Segmentation Decathlon,
    nnU-Net or MONAI. Without DATASET, built-in phantom heads are used.
    """
    from unet3d.distributed.ranks import Ranks
    from unet3d.training.request import Request, check_early

    ranks = begin_as_rank(quiet)
    changes = dict(settings.changes)
    if changes.get("training.init") is not None:
        from unet3d.nnunet.model_files import network_in
        from unet3d.runs.finding import refuse_other_file

        changes["training.init"] = network_in(Path(changes["training.init"]))
        refuse_other_file(changes["training.init"])
    request = Request(config_path=settings.path, changes=changes, output=output, resume=resume)
    if ranks.is_first:
        check_early(request, folds)
        is_alone = ranks == Ranks()  # ranks that torchrun restarts find their own run in the folder
        if output is not None and not resume and folds is None and is_alone:
            from unet3d.runs.run_folder import RunFolder

            RunFolder(output).refuse_used()

    load_torch()
    from rich.console import Console

    from unet3d.training.folds import request_over_folds, train_folds
    from unet3d.training.job import start_training

    over_folds = request_over_folds(request, folds, ranks)
    memory = None
    if over_folds is not None:
        folder = train_folds(over_folds, folds, quiet, partial(click.echo, err=True))
    else:
        result = start_training(request, ranks, Console(), quiet)
        if result is None or not ranks.is_first:
            return
        folder, memory = result.folder, result.memory
    if not quiet:
        for line in _results(folder, memory):
            show_result(line)


def _results(folder: "RunFolder", memory: Mapping[str, Any] | None) -> Iterator["str | Table"]:
    """Yield the results of a run over one or several folds, and commands for what users do next."""
    from unet3d.inputs.reading import read_json
    from unet3d.reports.tables import dice_table, folds_table, memory_table

    summary = read_json(folder.summary)
    if memory is not None:
        yield memory_table(memory)
    if "folds" in summary:
        yield folds_table(summary)
    elif (final := summary.get("final")) is None:
        yield "Trained on every case, without validation."
    else:
        yield dice_table(final)
    path = shlex.quote(str(folder.path))
    yield f"The run: {path}"
    yield f"To segment scans: unet3d predict SCAN -c {path}"
    yield f"To see its curves and pictures: unet3d report {path}"
