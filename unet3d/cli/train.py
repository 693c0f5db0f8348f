"""``unet3d train``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unet3d.cli.options import (
    FILE,
    OneFold,
    changes_of,
    config_options,
    placement_options,
    replicas_option,
)
from unet3d.cli.output import begin_as_rank

if TYPE_CHECKING:
    from rich.console import Console

    from unet3d.runs.run_folder import RunFolder
    from unet3d.training.cross_validation import FoldsResult
    from unet3d.training.loop import TrainingResult
    from unet3d.training.state import TrainingState


@click.command()
@click.argument("dataset", type=FILE, required=False)
@config_options
@placement_options("auto", "none", "data", "spatial", "model")
@click.option("--batch-size", type=click.IntRange(min=1), help="Patches in a step.")
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1),
    help="Portions of a batch; pipelined over the devices of --parallel model.",
)
@replicas_option
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    help="How often to continue from the last checkpoint when one of several processes dies.",
)
@click.option(
    "--epochs", type=click.IntRange(min=1), help="Epochs in all; more with --resume extend a run."
)
@click.option(
    "--fold",
    type=OneFold(),
    metavar="K|none",
    help="Which fold validates; none: train on every case, without validation.",
)
@click.option(
    "--folds",
    metavar="LIST",
    help="Train several folds, all or 0,1,2: one on each of --devices at the same time, or with "
    "another --parallel than auto one after another on all of them.",
)
@click.option(
    "--init",
    type=FILE,
    help="Begin with the weights and the network of a checkpoint, or of a run's final one, for the "
    "same or other labels and channels.",
)
@click.option(
    "-o", "--output", type=FILE, help="Folder of the run; default: a new one below runs/."
)
@click.option("--resume", is_flag=True, help="Continue the run in --output, or the newest one.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of every random choice.")
@click.option("--quiet", is_flag=True, help="No progress, no tables.")
def train(
    *,
    dataset: Path | None,
    config_path: Path | None,
    presets: tuple[str, ...],
    overrides: tuple[str, ...],
    parallel: str | None,
    devices: str | None,
    batch_size: int | None,
    micro_batches: int | None,
    replicas: int | None,
    max_restarts: int | None,
    epochs: int | None,
    fold: int | str | None,
    folds: str | None,
    init: Path | None,
    output: Path | None,
    resume: bool,
    seed: int | None,
    quiet: bool,
) -> None:
    """Train on DATASET: MSD, nnU-Net or MONAI layout; none: built-in phantom heads."""
    ranks = begin_as_rank(quiet)
    if init is not None:
        from unet3d.runs.finding import checkpoint_in

        init = checkpoint_in(init).absolute()
    changes = changes_of(
        {
            "data.dataset": dataset and dataset.absolute(),
            "parallel.mode": parallel,
            "parallel.devices": devices,
            "training.batch_size": batch_size,
            "training.micro_batches": micro_batches,
            "parallel.replicas": replicas,
            "parallel.max_restarts": max_restarts,
            "training.epochs": epochs,
            "data.fold": fold,
            "training.seed": seed,
            "training.init": init,
        }
    )

    from rich.console import Console

    from unet3d.config import preset_changes
    from unet3d.training.cross_validation import request_over_folds, train_folds
    from unet3d.training.start import RunRequest, start_training

    request = RunRequest(
        config_path=config_path,
        changes=(*preset_changes(presets), *overrides, *changes),
        output=output,
        resume=resume,
    )
    console = Console()
    over_folds = request_over_folds(request, folds, ranks)
    if over_folds is not None:
        trained = train_folds(over_folds, folds, quiet, partial(click.echo, err=True))
        if not quiet:
            _show_folds(trained, console)
        return
    result = start_training(request, ranks, console, quiet)
    if result is not None and ranks.is_first and not quiet:
        _show(result, console)


def _show_folds(trained: "FoldsResult", console: "Console") -> None:
    from unet3d.reports.folds import folds_table

    console.print(folds_table(trained.summary))
    console.print(
        f"The folds and their summary: {trained.folder.path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _show(result: "TrainingResult", console: "Console") -> None:
    from unet3d.reports.memory import memory_table

    if result.memory is not None:
        console.print(memory_table(result.memory))
    final = ""
    if result.final_dice is not None:
        final = (
            f" The validation cases as predict segments them: mean Dice {result.final_dice:.3f}, "
            f"{result.folder.validation}.{_pictures_line(result.folder)}"
        )
    console.print(
        f"{_dice_line(result.state)}{final} Checkpoints, metrics and pictures: "
        f"{result.folder.path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _pictures_line(run: "RunFolder") -> str:
    """Return where the pictures of the cases are, after a space; nothing where there are none."""
    names = run.validation_pictures()
    if not names:
        return ""
    whose = "The worst and the best of them" if len(names) > 1 else "One of them"
    return f" {whose}, drawn: {' and '.join(str(run.validation / name) for name in names)}."


def _dice_line(state: "TrainingState") -> str:
    """Return what the final network has come to, and where the best one was better."""
    last, best = state.last_mean_dice, state.best_dice
    if not state.last_dice:
        return "Trained on every case, without validation."
    if last is None:
        return "Mean Dice none yet."
    line = f"Mean Dice {last:.3f}, of the final network."
    if f"{best:.3f}" > f"{last:.3f}":
        line += f" That after epoch {state.best_epoch} has {best:.3f}: checkpoint-best.pt."
    return line
