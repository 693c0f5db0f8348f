"""``unet3d plan``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from unet3d.cli.options import (
    FILE,
    balance_option,
    changes_of,
    config_options,
    mode_for,
    offload_option,
    placement_options,
    replicas_option,
)
from unet3d.cli.output import write_json
from unet3d.errors import ConfigError, DoesNotFitError

if TYPE_CHECKING:
    from rich.console import Console

    from unet3d.config import Config


@click.command()
@click.argument("dataset", type=FILE, required=False)
@click.option("--shape", metavar="X,Y,Z", help="Voxels of a patch; default: as training chooses.")
@config_options
@placement_options("none", "model", "data")
@click.option("--batch-size", type=click.IntRange(min=1), help="Patches in a step.")
@click.option("--micro-batches", type=click.IntRange(min=1), help="Portions of a batch.")
@balance_option
@click.option(
    "--measure",
    is_flag=True,
    help="Time steps on --devices instead, for every cut and number of micro-batches that may be "
    "best; training then takes the best.",
)
@click.option(
    "--picture",
    type=FILE,
    help="With --measure: PNG of time against micro-batches; default: tuning.png.",
)
@offload_option
@replicas_option
@click.option(
    "--device-memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory of each GPU; default: as in this machine.",
)
@click.option("--json", "json_path", type=FILE, help="Also write the prediction here.")
def plan(
    *,
    dataset: Path | None,
    shape: str | None,
    config_path: Path | None,
    overrides: tuple[str, ...],
    parallel: str | None,
    devices: str | None,
    batch_size: int | None,
    micro_batches: int | None,
    balance: str | None,
    measure: bool,
    picture: Path | None,
    offload: str | None,
    replicas: int | None,
    device_memory: float | None,
    json_path: Path | None,
) -> None:
    """Predict the memory that training takes of each device, on DATASET or for --shape.

    No GPU is needed: --device-memory 80 describes one. With --measure, times are taken on the
    devices of this machine.
    """
    if measure and device_memory is not None:
        raise click.UsageError("--measure takes the devices of this machine; drop --device-memory")
    if picture is not None and not measure:
        raise click.UsageError("--picture shows measured times; add --measure")
    from rich.console import Console

    from unet3d.config import load_config

    changes = changes_of(
        {
            "data.dataset": dataset and dataset.absolute(),
            "patches.size": shape,
            "parallel.mode": parallel or mode_for(devices),
            "parallel.devices": devices,
            "training.batch_size": batch_size,
            "training.micro_batches": micro_batches,
            "parallel.balance": balance,
            "memory.offload": offload,
            "parallel.replicas": replicas,
        }
    )
    config = load_config(config_path, [*overrides, *changes])
    console = Console()
    if measure:
        _measure(config, console, picture or Path("tuning.png"), json_path)
        return

    from unet3d.planning.comparison import compare
    from unet3d.planning.experiment import plan_without_data
    from unet3d.reports.plan import plan_lines, plan_table

    memory_bytes = None if device_memory is None else int(device_memory * 1024**3)
    record = compare(config, plan_without_data(config), memory_bytes).to_dict()
    console.print(plan_table(record))
    for line in plan_lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if json_path is not None:
        write_json(json_path, record)


def _measure(config: "Config", console: "Console", picture: Path, json_path: Path | None) -> None:
    """Measure every setting, show the times, and store the best one for training to find."""
    from unet3d.planning.experiment import plan_without_data
    from unet3d.planning.tuning import tune
    from unet3d.planning.tuning_cache import remember_tuned
    from unet3d.reports.tuning import tuning_table, write_tuning_picture

    tuning = tune(config, plan_without_data(config))
    record = tuning.to_dict()
    console.print(tuning_table(record))
    if json_path is not None:
        write_json(json_path, record)
    if tuning.choice is None:
        raise DoesNotFitError(
            "every setting ran out of memory; use smaller patches (--shape), a smaller network "
            "(model.base_channels) or more devices"
        )
    path = remember_tuned(tuning.tuning_key, tuning.choice)
    try:
        write_tuning_picture(record, picture)
    except OSError as error:
        raise ConfigError(f"cannot write {picture}: {error.strerror}") from error
    for line in (
        f"Time against micro-batches: {picture}",
        f"The best is in {path}, where training finds it: for the same network, patch, batch and "
        "devices, unless micro-batches, balance or cuts are set.",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
