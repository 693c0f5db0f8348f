"""``unet3d plan``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.cli.checkpoints import wanted_checkpoints
from unet3d.cli.command import GivenSettings, command, dataset_argument, grouped, setting
from unet3d.cli.options import (
    FILE,
    FiniteRange,
    batch_options,
    checkpoint_option,
    common_options,
    devices_option,
    json_option,
    overwrite_option,
    parallel_option,
    reading_options,
    replicas_option,
)
from unet3d.cli.output import (
    begin_as_rank,
    check_result,
    files_of,
    load_torch,
    show_result,
    working,
    write_json,
    writing_result,
)
from unet3d.errors import ConfigError, DoesNotFitError

if TYPE_CHECKING:
    from unet3d.config import Config
    from unet3d.planning.network_plan import NetworkPlan

TOO_LARGE = (
    "all measured settings ran out of memory; use smaller patches (--shape), a smaller network "
    "(model.base_channels) or more devices"
)


@command(
    "unet3d plan DATASET --devices 0,1 --device-memory 24",
    "unet3d plan --predict scan.nii.gz -c runs/mine",
)
@dataset_argument()
@grouped(
    "Training",
    setting("patches.size", "--shape", "X,Y,Z", "Voxels of a patch; default: as in training."),
    *batch_options,
)
@grouped(
    "Prediction instead of training",
    click.option(
        "--predict",
        "scan",
        type=FILE,
        metavar="SCAN",
        multiple=True,
        help="Predict the memory for segmenting this scan; repeatable: one file per channel.",
    ),
    checkpoint_option("With --predict: the network, as in unet3d predict.", several=True),
    click.option("--skip-background", is_flag=True, help="With --predict: as in unet3d predict."),
)
@grouped(
    "Devices",
    devices_option,
    parallel_option,
    replicas_option,
    click.option(
        "--device-memory",
        type=FiniteRange(min=0, max=2**20, min_open=True),
        metavar="GIB",
        help="Memory of each GPU, for a plan without these GPUs; default: the memory of this "
        "machine's GPUs.",
    ),
    click.option(
        "--measure",
        is_flag=True,
        help="Measure training steps on --devices for every promising mode, cut and number of "
        "micro-batches; training then uses the fastest.",
    ),
)
@reading_options
@grouped(
    "Output",
    click.option(
        "--picture",
        type=FILE,
        help="With --measure: PNG file for a plot of the times; default: tuning.png.",
    ),
    json_option("the numbers"),
    overwrite_option,
)
@common_options
@click.option("--step-record", type=FILE, hidden=True)  # in the ranks that --measure starts
def plan(
    *,
    settings: GivenSettings,
    measure: bool,
    picture: Path | None,
    device_memory: float | None,
    scan: tuple[Path, ...],
    checkpoints: tuple[Path, ...],
    skip_background: bool,
    json_path: Path | None,
    overwrite: bool,
    step_record: Path | None,
) -> None:
    """Predict the memory and time that training takes.

    The memory of each device is predicted for DATASET, or for patches of --shape. With --predict,
    only the memory for segmenting a scan is predicted, on the host and on a GPU. No GPU is needed:
    --device-memory 80 stands for GPUs of 80 GiB.
    """
    if step_record is not None:
        _measure_rank(settings.config, step_record)
        return
    from unet3d.datasets.dataset import load_dataset
    from unet3d.memory.gpus import refuse_unknown_memory

    if (checkpoints or skip_background) and not scan:
        name = "--checkpoint" if checkpoints else "--skip-background"
        raise click.UsageError(f"{name} needs --predict SCAN; add it")
    if scan:
        if "data.dataset" in settings.changes or measure:
            raise click.UsageError("--predict is for one scan; drop DATASET and --measure")
        check_result(json_path, *scan, *checkpoints, overwrite=overwrite)
        record = _predict_scan(settings, scan, checkpoints, skip_background, device_memory)
        write_json(json_path, record, overwrite)
        return
    if measure and device_memory is not None:
        raise click.UsageError("--measure uses the devices of this machine; drop --device-memory")
    if picture is not None and not measure:
        raise click.UsageError("--picture shows measured times; add --measure")
    if measure and picture is None:
        picture = Path("tuning.png")
    dataset = settings.config.data.dataset
    read = (*files_of(dataset), settings.path)
    check_result(json_path, *read, picture, overwrite=overwrite)
    check_result(picture, *read, overwrite=overwrite)
    if dataset is not None:
        load_dataset(dataset, settings.config.data.reading)  # before PyTorch is imported
    if measure:
        settings.check_devices()
    elif device_memory is None:
        refuse_unknown_memory(settings.config.parallel.devices or ())
    memory_bytes = None if device_memory is None else int(device_memory * 1024**3)
    with working("starting"):
        load_torch()
        from unet3d.training.plan import Plan
        from unet3d.training.request import Request

        request = Request(config_path=settings.path, changes=settings.changes)
        planned = Plan.of(request, is_described=not measure, gpu_bytes=memory_bytes)
        notes = [*planned.notes, *planned.network_notes()]
        config, network = planned.network.settled(planned.config), planned.network
    for note in notes:
        show_result(note)
    if picture is not None:
        _measure(config, network, picture, json_path, overwrite)
        return
    record = _predict(config, network, memory_bytes)
    write_json(json_path, {**record, "notes": [*notes, *record["notes"]]}, overwrite)


def _predict_scan(
    settings: GivenSettings,
    scan: tuple[Path, ...],
    checkpoints: tuple[Path, ...],
    skip_background: bool,
    device_memory: float | None,
) -> dict[str, Any]:
    """Show the memory for segmenting a scan."""
    from unet3d.inference.request import PredictionRequest
    from unet3d.inference.scan_search import refuse_early

    used = ("inference.", "parallel.", "data.reading.")
    if ignored := [key for key in settings.changes if not key.startswith(used)]:
        raise ConfigError(f"--predict does not use {ignored[0]}; leave it out")
    if device_memory is None:
        settings.check_devices()
    given = settings.config.flat(only_set=True)
    request = PredictionRequest(
        images=scan,
        settings={key: value for key, value in given.items() if key.startswith(used)},
        skip_background=skip_background,
        goes_on=True,
    )
    refuse_early(request)
    request = request.model_copy(update={"checkpoints": wanted_checkpoints(checkpoints)})
    with working("predicting"):
        load_torch()
        from unet3d.inference.prediction_memory import planned_prediction

        record = planned_prediction(request, device_memory)
    from unet3d.reports.plan import prediction_lines

    for line in prediction_lines(record, scan[0].name):
        show_result(line)
    return record


def _predict(config: "Config", network: "NetworkPlan", memory_bytes: int | None) -> dict[str, Any]:
    """Show the memory of all placements, then the largest volume of each, which takes a search."""
    from unet3d.planning.comparison import compare
    from unet3d.reports.plan import plan_line, plan_table, way_name

    with working("predicting") as show:
        ways, record = compare(
            config,
            network,
            memory_bytes,
            watch=lambda done, total: show(f"predicting the memory of {done + 1} of {total}"),
        )
    show_result(plan_table(record))
    if record["choice"] is not None:
        show_result(record["choice"])
    for way, row in zip(ways, record["ways"], strict=True):
        with working(f"searching for the largest volume: {way_name(row)}"):
            row["largest_shape"] = way.largest()
        show_result(plan_line(row))
    return record


def _measure(
    config: "Config",
    network: "NetworkPlan",
    picture: Path,
    json_path: Path | None,
    overwrite: bool,
) -> None:
    """Measure every setting, show the times, and save the best ones for later training."""
    from unet3d.planning.sweep import measure
    from unet3d.reports.figures import save_figure
    from unet3d.reports.tuning import tuning_figure, tuning_lines, tuning_table

    with working("predicting") as show:
        sweep = measure(
            config,
            network,
            lambda number, total, name: show(f"measuring {number} of {total}: {name}"),
        )
    record = sweep.to_dict()
    show_result(tuning_table(record))
    write_json(json_path, record, overwrite)
    if sweep.best() is None:
        raise DoesNotFitError(TOO_LARGE)
    folder = sweep.remember()
    with writing_result(picture, overwrite) as unfinished:
        save_figure(tuning_figure(record), unfinished)
    for line in (
        *tuning_lines(record),
        f"Plot of time against micro-batches: {picture}",
        f"The fastest settings of each placement are saved in {folder}. Training and --parallel "
        "auto use them for the same network, patch, batch and devices, unless micro-batches or "
        "cuts are set.",
    ):
        show_result(line)


def _measure_rank(config: "Config", step_record: Path) -> None:
    """Run training steps as one of the ranks that ``--measure`` has started to time a mode."""
    begin_as_rank(quiet=True)
    load_torch()
    from unet3d.planning.network_plan import plan_without_data
    from unet3d.planning.sweep import measure_rank
    from unet3d.training.initialising import network_to_begin_with

    config, architecture = network_to_begin_with(config)
    network = plan_without_data(config, architecture=architecture)
    measure_rank(network.settled(config), network, step_record)
