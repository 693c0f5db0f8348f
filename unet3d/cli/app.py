"""The command line. Heavy imports are inside the commands, so that ``--help`` is instant."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from unet3d import __version__
from unet3d.errors import (
    ConfigError,
    DatasetError,
    DoesNotFitError,
    LostRankError,
    Unet3dError,
)

if TYPE_CHECKING:
    from rich.console import Console

    from unet3d.config import Config
    from unet3d.distributed.group import Group
    from unet3d.runs.run_folder import RunFolder

Function = TypeVar("Function", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
PARALLEL_HELP = "model: encoder on one device, decoder on the next; data: a replica on each."


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit status: 0 done; 1 a problem that we explain; 2 wrong usage; 130 and 143 after Ctrl-C and
    SIGTERM.

    Args:
        arguments: Without the program's name; None: those of the process.
    """
    from unet3d.distributed.interruption import Interrupted
    from unet3d.distributed.ranks import is_launched, leave, report_end

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    if debug:  # taken wherever it stands, for it is added last, after an error
        arguments = ["--debug", *(argument for argument in arguments if argument != "--debug")]
    try:
        sys.exit(commands.main(arguments, prog_name="unet3d", standalone_mode=False) or 0)
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Unet3dError as error:
        report_end(error, "consequence" if isinstance(error, LostRankError) else "explained")
        if debug:
            raise
        if not is_launched():  # or whoever started the ranks says it, once
            _show(error)
        leave(1)
    except OSError as error:  # such as a full disk, in the middle of a run
        place = f"{error.filename}: " if error.filename else ""
        explained = Unet3dError(f"{place}{error.strerror or error}; --debug shows where")
        report_end(explained, "explained")
        if debug:
            raise
        if not is_launched():
            _show(explained)
        leave(1)
    except Interrupted as interruption:
        report_end(interruption, "interrupted", interruption.signal_number)
        if not is_launched():
            advice = "; continue with --resume" if interruption.can_resume else ""
            click.echo(f"Stopped by {interruption}{advice}", err=True)
        leave(interruption.exit_status)
    except (click.Abort, KeyboardInterrupt):
        stopped = Interrupted(signal.SIGINT)
        report_end(stopped, "interrupted", stopped.signal_number)
        if not is_launched():
            click.echo("Stopped", err=True)
        leave(stopped.exit_status)
    except Exception as error:
        report_end(error, "unexpected")
        if debug or not is_launched():
            raise
        leave(1)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="unet3d %(version)s")
@click.option("--debug", is_flag=True, help="Log more, and show tracebacks.")
def commands(debug: bool) -> None:
    """Train and use a 3D U-Net on volumes that outgrow one GPU."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s" if debug else "%(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("unet3d").setLevel(logging.DEBUG if debug else logging.INFO)


def placement_options(*modes: str) -> Callable[[Function], Function]:
    """Return a decorator that adds the options which say where the network runs.

    Args:
        modes: Those that the command knows.
    """

    def add(function: Function) -> Function:
        for option in _placement_options(modes):
            function = option(function)
        return function

    return add


def _placement_options(modes: Sequence[str]) -> tuple[Callable[[Function], Function], ...]:
    return (
        click.option(
            "--devices",
            metavar="LIST",
            help="Such as 0,1 or cuda:0 or cpu,cpu or cpu,0; a stage of the network on each"
            + (", or a replica." if "data" in modes else "."),
        ),
        click.option(
            "--parallel",
            type=click.Choice(modes),
            help=PARALLEL_HELP if "data" in modes else PARALLEL_HELP.partition(";")[0] + ".",
        ),
    )


balance_option = click.option(
    "--balance",
    type=click.Choice(["encoder-decoder", "time", "memory"]),
    help="Cut the network so that its stages take equal time, or memory, on --devices.",
)

replicas_option = click.option(
    "--replicas",
    type=click.IntRange(min=1),
    help="Copies of a network on several devices, over which --devices are divided.",
)

offload_option = click.option(
    "--offload",
    type=click.Choice(["none", "skips"]),
    help="skips: GPUs park what waits for the decoder in host memory.",
)


def config_options(function: Function) -> Function:
    """Add the options that name a configuration."""
    for option in (
        click.option(
            "--set",
            "overrides",
            metavar="KEY=VALUE",
            multiple=True,
            help="Override one setting, such as training.batch_size=4; repeatable.",
        ),
        click.option("--config", "config_path", type=FILE, help="YAML; see configs/."),
    ):
        function = option(function)
    return function


@commands.command()
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
        *_changes(
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


@commands.command()
@click.argument("images", type=FILE, nargs=-1, required=True)
@click.option("--checkpoint", "checkpoint_path", type=FILE, help="Default: of the newest run.")
@click.option("-o", "--output", type=FILE, help="File or folder; default: beside each image.")
@placement_options("none", "model")
@click.option("--overlap", type=click.FloatRange(0, 1, max_open=True), help="Of the windows.")
@click.option(
    "--window", metavar="X,Y,Z", help="Voxels of a window, or whole; default: as in training."
)
@click.option("--statistics", is_flag=True, help="Also write mL and intensity of each label.")
@click.option("--overwrite", is_flag=True, help="Replace existing segmentations.")
def predict(
    images: tuple[Path, ...],
    checkpoint_path: Path | None,
    output: Path | None,
    parallel: str | None,
    devices: str | None,
    overlap: float | None,
    window: str | None,
    statistics: bool,
    overwrite: bool,
) -> None:
    """Segment IMAGES, files or folders: scan.nii.gz becomes scan_seg.nii.gz."""
    from unet3d.config import load_config

    if checkpoint_path is None:
        checkpoint_path = _newest_checkpoint()

    from unet3d.inference.predictor import Predictor
    from unet3d.runs.checkpoint import load_checkpoint
    from unet3d.volumes.scans import (
        find_scans,
        label_statistics,
        read_scan,
        write_segmentation,
        write_statistics,
    )

    checkpoint = load_checkpoint(checkpoint_path)
    settings = load_config(
        None,
        _changes(
            {
                # Where the network was trained says nothing of where it is used.
                "parallel.mode": parallel or _mode_for(devices),
                "parallel.devices": devices,
                "inference.window": window or checkpoint.config.inference.window,
                "inference.overlap": (
                    checkpoint.config.inference.overlap if overlap is None else overlap
                ),
                "inference.batch_size": checkpoint.config.inference.batch_size,
            }
        ),
    )
    preprocessing = checkpoint.preprocessing
    scans = find_scans(images, output, len(preprocessing.channels), overwrite, statistics)
    predictor = Predictor(checkpoint, settings.parallel, settings.inference)
    names = dict(zip(preprocessing.label_values, preprocessing.label_names, strict=True))
    del names[preprocessing.label_values[0]]
    failures: list[str] = []
    for scan in scans:
        began = time.monotonic()
        try:
            image = read_scan(scan)
            labels = predictor.segment(image)
            write_segmentation(scan, labels, image.header)
            if statistics:
                write_statistics(scan, label_statistics(labels, image, names))
        except Unet3dError as error:
            # One bad scan does not keep the others of a folder from being segmented.
            if len(scans) == 1:
                raise
            _show(error, "Skipped")
            failures.append(str(scan.images[0]))
            continue
        click.echo(f"{scan.images[0]} -> {scan.output} ({time.monotonic() - began:.1f} s)")
    if failures:
        raise DatasetError(f"{len(failures)} of {len(scans)} scans could not be segmented")


@commands.command()
@click.argument("predictions", type=FILE)
@click.argument("labels", type=FILE)
@click.option("--json", "json_path", type=FILE, help="Also write the scores here.")
def evaluate(predictions: Path, labels: Path, json_path: Path | None) -> None:
    """Compare PREDICTIONS with LABELS: Dice, HD95 and volume. Files or folders."""
    from rich.console import Console

    from unet3d.inference.evaluation import evaluate as run_evaluation
    from unet3d.reports.memory import evaluation_table

    result = run_evaluation(predictions, labels)
    Console().print(evaluation_table(result))
    if json_path is not None:
        _write_json(json_path, result.to_dict())


@commands.command()
@click.argument("dataset", type=FILE)
@click.option("--json", "json_path", type=FILE, help="Also write the findings here.")
def check(dataset: Path, json_path: Path | None) -> None:
    """Find what would break training on DATASET, before it starts."""
    from dataclasses import asdict

    from unet3d.volumes.check import check_dataset
    from unet3d.volumes.dataset import load_dataset

    opened = load_dataset(dataset)
    findings = check_dataset(opened)
    for finding in findings:
        click.echo(f"{finding.severity:7}  {finding.case}: {finding.message}")
    if json_path is not None:
        _write_json(json_path, {"findings": [asdict(finding) for finding in findings]})
    num_errors = sum(finding.severity == "error" for finding in findings)
    num_warnings = len(findings) - num_errors
    summary = f"{len(opened.cases)} cases, {num_errors} errors, {num_warnings} warnings"
    if num_errors:
        raise DatasetError(f"{dataset}: {summary}; mend the errors before training")
    click.echo(summary)


@commands.command()
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
    help="Of each GPU; default: as in this machine.",
)
@click.option("--json", "json_path", type=FILE, help="Also write the prediction here.")
def plan(
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
    devices that are here.
    """
    if measure and device_memory is not None:
        raise click.UsageError("--measure is of the devices that are here; drop --device-memory")
    if picture is not None and not measure:
        raise click.UsageError("--picture shows measured times; add --measure")
    from rich.console import Console

    from unet3d.config import load_config

    changes = _changes(
        {
            "data.dataset": dataset and dataset.absolute(),
            "patches.size": shape,
            "parallel.mode": parallel or _mode_for(devices),
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
    from unet3d.reports.memory import plan_lines, plan_table

    memory_bytes = None if device_memory is None else int(device_memory * 1024**3)
    record = compare(config, plan_without_data(config), memory_bytes).to_dict()
    console.print(plan_table(record))
    for line in plan_lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if json_path is not None:
        _write_json(json_path, record)


def _measure(config: "Config", console: "Console", picture: Path, json_path: Path | None) -> None:
    """Measure every setting, show what they took, and leave the best for training to find."""
    from unet3d.planning.experiment import plan_without_data
    from unet3d.planning.tuning import tune
    from unet3d.planning.tuning_cache import remember_choice
    from unet3d.reports.tuning import tuning_table, write_tuning_picture

    tuning = tune(config, plan_without_data(config))
    record = tuning.to_dict()
    console.print(tuning_table(record))
    if json_path is not None:
        _write_json(json_path, record)
    if tuning.choice is None:
        raise DoesNotFitError(
            "every setting ran out of memory; use smaller patches (--shape), a smaller network "
            "(model.base_channels) or more devices"
        )
    path = remember_choice(tuning.circumstances, tuning.choice)
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


def _show(error: Unet3dError, what: str = "Error") -> None:
    click.echo(f"{what}: {' '.join(str(error).split())}", err=True)


def _changes(values: dict[str, Any]) -> list[str]:
    """Return overrides for the options that were given."""
    given = {key: value for key, value in values.items() if value is not None}
    return [
        f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in given.items()
    ]


def _mode_for(devices: str | None) -> str:
    return "model" if devices and "," in devices else "none"


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


def _newest_checkpoint() -> Path:
    from unet3d.runs.run_folder import RUNS, newest_run

    run = newest_run(finished=True)
    if run is None:
        raise ConfigError(
            f"no checkpoint: there is no finished run in {RUNS.absolute()}; name one with "
            "--checkpoint FILE, or make one with unet3d train DATASET"
        )
    path = run.best if run.best.exists() else run.latest
    click.echo(f"using {path}")
    return path


def _write_json(path: Path, content: dict[str, Any]) -> None:
    import json

    from unet3d.atomic import write_atomically

    text = json.dumps(content, indent=2) + os.linesep
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
