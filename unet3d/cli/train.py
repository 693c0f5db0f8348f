"""``unet3d train``."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unet3d.cli.options import (
    FILE,
    balance_option,
    changes_of,
    config_options,
    offload_option,
    placement_options,
    replicas_option,
)
from unet3d.errors import ConfigError

if TYPE_CHECKING:
    from unet3d.config import Config
    from unet3d.distributed.group import Group
    from unet3d.runs.run_folder import RunFolder


@click.command()
@click.argument("dataset", type=FILE, required=False)
@config_options
@placement_options("none", "model", "data")
@click.option("--batch-size", type=click.IntRange(min=1), help="Patches in a step.")
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1),
    help="Portions of a batch; pipelined over the devices of --parallel model.",
)
@balance_option
@offload_option
@replicas_option
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    help="How often to go on from the last checkpoint when a process of several dies.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="With --resume: may be extended.")
@click.option("--fold", type=click.IntRange(min=0), help="Which fold validates.")
@click.option("--output", type=FILE, help="The run's folder; default: a new one below runs/.")
@click.option("--resume", is_flag=True, help="Continue the run in --output, or the newest one.")
@click.option("--seed", type=click.IntRange(min=0), help="Of every random choice.")
@click.option("--quiet", is_flag=True, help="No progress, no tables.")
def train(
    *,
    dataset: Path | None,
    config_path: Path | None,
    overrides: tuple[str, ...],
    parallel: str | None,
    devices: str | None,
    batch_size: int | None,
    micro_batches: int | None,
    balance: str | None,
    offload: str | None,
    replicas: int | None,
    max_restarts: int | None,
    epochs: int | None,
    fold: int | None,
    output: Path | None,
    resume: bool,
    seed: int | None,
    quiet: bool,
) -> None:
    """Train on DATASET: MSD, nnU-Net or MONAI layout; none: built-in phantom heads."""
    from unet3d.distributed.ranks import Ranks, die_with_parent, silence_torch

    ranks = Ranks.from_environment()
    die_with_parent()
    if ranks.world_size > 1 and not logging.getLogger("unet3d").isEnabledFor(logging.DEBUG):
        silence_torch()
    if quiet or not ranks.is_first:
        logging.getLogger("unet3d").setLevel(logging.WARNING)
    changes = [
        *overrides,
        *changes_of(
            {
                "data.dataset": dataset and dataset.absolute(),
                "parallel.mode": parallel,
                "parallel.devices": devices,
                "training.batch_size": batch_size,
                "training.micro_batches": micro_batches,
                "parallel.balance": balance,
                "memory.offload": offload,
                "parallel.replicas": replicas,
                "parallel.max_restarts": max_restarts,
                "training.epochs": epochs,
                "data.fold": fold,
                "training.seed": seed,
            }
        ),
    ]
    from rich.console import Console

    from unet3d.config import Config
    from unet3d.distributed.rendezvous import joined
    from unet3d.reports.memory import memory_table
    from unet3d.runs.run_folder import RunFolder
    from unet3d.training.job import num_processes
    from unet3d.training.job import train as run_training

    console = Console()
    with joined(ranks) as group:
        # Only the first rank must be able to name a new run, and to see the files of an old one.
        settings, path, resume = group.from_first(
            lambda: _choose_run(config_path, changes, output, resume, group)
        )
        config, folder = Config.from_yaml(settings), RunFolder(Path(path))
        if group.size == 1 and num_processes(config) > 1:
            _start_ranks(config, folder, resume, quiet)
            return
        result = run_training(config, folder, resume, console, quiet, group)
    if quiet or not ranks.is_first:
        return
    if result.memory is not None:
        console.print(memory_table(result.memory))
    dice = "none yet" if result.best_dice < 0 else f"{result.best_dice:.3f}"
    console.print(
        f"Best mean Dice {dice}. Checkpoints, metrics and pictures: {folder.path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _new_run(config: "Config") -> Path:
    from unet3d.runs.run_folder import RUNS

    source = config.data.dataset
    name = "phantom" if source is None else source.parent.name if source.is_file() else source.name
    return RUNS / f"{name}-fold{config.data.fold}-{time.strftime('%Y%m%d-%H%M%S')}"


def _choose_run(
    config_path: Path | None,
    changes: Sequence[str],
    output: Path | None,
    resume: bool,
    group: "Group",
) -> tuple[str, str, bool]:
    """Return the settings of a training as YAML, its folder, and whether to continue in it."""
    from unet3d.config import load_config
    from unet3d.planning.tuning_cache import forgotten_modes, without_stale_cuts
    from unet3d.runs.run_folder import RunFolder
    from unet3d.training.job import for_ranks, num_processes

    folder = _run_to_resume(output) if resume else None
    if folder is not None and config_path is None:
        recorded = load_config(folder.config)
        config = load_config(folder.config, [*forgotten_modes(recorded, changes), *changes])
        config = without_stale_cuts(config, recorded)
    else:
        config = load_config(config_path, changes)
    if group.size > 1:
        config = for_ranks(config, group.size)
        if output is None and not resume and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") > "0":
            raise ConfigError(
                "torchrun may restart the ranks, which then must find the run again; name its "
                "folder with --output, or use torchrun --max-restarts 0"
            )
    else:
        config = for_ranks(config, num_processes(config))
    if folder is None:
        folder = RunFolder(output or _new_run(config))
        resume = group.has_begun(str(folder.path)) and folder.latest.exists()
    return config.to_yaml(), str(folder.path), resume


def _start_ranks(config: "Config", folder: "RunFolder", resume: bool, quiet: bool) -> None:
    """Train in a process for each replica, each started with the settings as they are now."""
    import tempfile

    from unet3d.distributed.interruption import Interrupted
    from unet3d.distributed.launcher import launch
    from unet3d.parallel import devices_of_replicas

    devices = devices_of_replicas(config.parallel)
    with tempfile.NamedTemporaryFile("w", prefix="unet3d-", suffix=".yaml") as settings:
        settings.write(config.to_yaml())
        settings.flush()
        arguments = ["train", "--config", settings.name, "--output", str(folder.path)]
        arguments += ["--resume"] if resume else []
        arguments += ["--quiet"] if quiet else []
        if logging.getLogger("unet3d").isEnabledFor(logging.DEBUG):
            arguments.insert(0, "--debug")
        on_gpus = any(device.type == "cuda" for of_rank in devices for device in of_rank)
        try:
            launch(arguments, len(devices), config.parallel.max_restarts, on_gpus)
        except Interrupted as interruption:
            raise Interrupted(
                interruption.signal_number, can_resume=folder.latest.exists()
            ) from interruption


def _run_to_resume(output: Path | None) -> "RunFolder":
    from unet3d.runs.run_folder import RUNS, RunFolder, newest_run

    run = RunFolder(output) if output is not None else newest_run(finished=False)
    if run is None or not run.latest.exists():
        raise ConfigError(
            f"there is no run to resume in {output or RUNS}; start one without --resume"
        )
    return run
