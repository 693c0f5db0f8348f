"""Choosing and starting a run: new or continued, in this process or in several."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from unet3d.config import Config, load_config
from unet3d.distributed.commands import Say
from unet3d.distributed.group import Group
from unet3d.distributed.launcher import launch, meeting_folder
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import ConfigError
from unet3d.interruption import Interrupted
from unet3d.memory.record import device_bytes
from unet3d.parallel import ParallelDims
from unet3d.planning.auto_settings import load_settings
from unet3d.planning.network_plan import plan_without_data
from unet3d.planning.placements import choose_mode as planned_mode
from unet3d.planning.step_size import within_gpus
from unet3d.runs.run_folder import RunFolder, make_run
from unet3d.training.data_record import dataset_name
from unet3d.training.earlier_runs import recorded_settings, run_to_resume
from unet3d.training.initialising import settings_of_init
from unet3d.training.job import for_ranks, train
from unet3d.training.loop import TrainingResult

logger = logging.getLogger(__name__)

MAX_NAME_LETTERS = 50
"""Letters of a data set's name in that of a run; a file system allows 255 bytes in all."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a user says of a run."""

    config_path: Path | None
    """A configuration file; None: the defaults, or where a run is continued, its own."""
    changes: Mapping[str, Any]
    """Settings that differ from it: dotted key to value."""
    output: Path | None
    """The run's folder; None: a new one below ``runs/``, or the newest to continue."""
    resume: bool
    """Whether to continue a run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What will be trained, and where its files go."""

    config: Config
    """Every setting; those that depend on the number of ranks suit it."""
    folder: RunFolder
    """The run's files."""
    resume: bool
    """Whether to continue from the folder's latest checkpoint."""


def start_training(
    request: RunRequest, ranks: Ranks, console: Console, quiet: bool
) -> TrainingResult | None:
    """Train what was asked for, in this process or in one for each replica.

    Args:
        request: What was asked for.
        ranks: The place of this process; the only one where torchrun has not started it.
        console: For the live line.
        quiet: No progress at all.

    Returns:
        What this process has trained; None where it has started others, which show their own.

    Raises:
        Unet3dError: For every reason that we can explain.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after a checkpoint was saved.
    """
    with joined(ranks) as group:
        return train_run(choose_run(request, group), group, console, quiet)


def train_run(
    run: Run, group: Group, console: Console, quiet: bool, say: Say | None = None
) -> TrainingResult | None:
    """Train a run, in this process or in one for each replica.

    Args:
        run: What is trained.
        group: The ranks that do it together; all of them call it.
        console: For the live line.
        quiet: No progress at all.
        say: Takes the lines of the processes that are started; None: they go to the terminal.

    Returns:
        What this process has trained; None where it has started others.

    Raises:
        Unet3dError: For every reason that we can explain.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after a checkpoint was saved.
    """
    try:
        dims = ParallelDims.resolve(run.config.parallel, ranks=group.ranks)
        if group.size < dims.num_processes:
            start_ranks(run, dims, quiet, say)
            return None
        return train(run.config, run.folder, run.resume, console, quiet, group)
    finally:
        if group.is_first:
            run.folder.discard_if_empty()


def choose_run(request: RunRequest, group: Group) -> Run:
    """Return the run that all ranks train; only the first one must see the files of an old one.

    Args:
        request: What was asked for.
        group: The ranks; all of them call it.

    Raises:
        ConfigError: A setting is refused, or there is no run to continue.
    """
    return group.from_first(
        lambda: _choose_run(request, group), to_plain=_to_plain, from_plain=_from_plain
    )


def _choose_run(request: RunRequest, group: Group) -> Run:
    folder = folder_to_resume(request) if request.resume else None
    refuse_init_of_old_run(request)
    if folder is not None:
        config = settings_to_resume(request, folder, group.ranks)
    else:
        config = load_settings(
            request.config_path,
            request.changes,
            partial(ParallelDims.resolve, ranks=group.ranks),
        )
        config = settings_of_init(config)
    devices = ParallelDims.resolve(config.parallel, ranks=group.ranks).all_devices
    config = within_gpus(config, [device_bytes(one) for one in devices if one.type == "cuda"])
    config = choose_mode(config, group.ranks)
    config = for_ranks(config, ParallelDims.resolve(config.parallel, ranks=group.ranks))
    if folder is not None:
        return Run(config=config, folder=folder, resume=True)
    if group.size > 1 and request.output is None and _may_be_restarted():
        raise ConfigError(
            "torchrun may restart the ranks, which then must find the run again; name its "
            "folder with --output, or use torchrun --max-restarts 0"
        )
    folder = make_run(run_name(config)) if request.output is None else RunFolder(request.output)
    resume = group.has_begun(str(folder.path)) and folder.latest.exists()
    return Run(config=config, folder=folder, resume=resume)


def settings_to_resume(request: RunRequest, folder: RunFolder, ranks: Ranks) -> Config:
    """Return the settings with which a run goes on.

    Args:
        request: What was asked for.
        folder: The run.
        ranks: The place of this process.

    Raises:
        ConfigError: A setting is refused.
        CheckpointError: The run's settings are damaged, and so is its latest checkpoint.
    """
    dims_of = partial(ParallelDims.resolve, ranks=ranks)
    with recorded_settings(folder) as path:
        recorded = load_config(path)
        if request.config_path is None:
            changes = {**_mode_for_devices(recorded, request.changes), **request.changes}
            changes = {**forgotten_modes(recorded, changes), **changes}
            return without_stale_cuts(load_settings(path, changes, dims_of), recorded)
    config = load_settings(request.config_path, request.changes, dims_of)
    if recorded.training.init is None or config.model.strides is not None:
        return config
    # The network and the spacing came with the weights, and the file says nothing of them.
    model = recorded.model.model_dump(mode="json")
    return config.with_values(
        {
            **{f"model.{name}": value for name, value in model.items()},
            "data.spacing_mm": recorded.data.spacing_mm,
        }
    )


def refuse_init_of_old_run(request: RunRequest) -> None:
    """Refuse weights to begin with where a run is to be continued.

    Raises:
        ConfigError: Both are asked for.
    """
    if request.resume and "training.init" in request.changes:
        raise ConfigError(
            "training.init begins a new run, and --resume continues one; leave one out"
        )


def _mode_for_devices(recorded: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return mode auto where devices are named that the mode of a resumed run does not suit."""
    if "parallel.devices" not in changes or "parallel.mode" in changes:
        return {}
    named = load_config(None, {"parallel.devices": changes["parallel.devices"]}).parallel.devices
    is_unsuited = (named is not None and len(named) > 1) == (recorded.parallel.mode == "none")
    return {"parallel.mode": "auto"} if is_unsuited else {}


def forgotten_modes(recorded: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes that reset what a run recorded for a parallel mode that it now leaves.

    They would be refused with the other mode, such as replicas with mode none, although
    nothing asks for them any more.
    """
    if changes.get("parallel.mode", recorded.parallel.mode) == recorded.parallel.mode:
        return {}
    return {
        "parallel.replicas": 1,
        "parallel.cuts": "auto",
        "parallel.data_parallel": False,
    }


def without_stale_cuts(config: Config, recorded: Config) -> Config:
    """Return the settings of a resumed run without the cuts of another placement.

    A run records the cuts that it used, which may be measured ones: they do not suit other devices.
    """
    cuts, now, before = config.parallel.cut_blocks, config.parallel, recorded.parallel
    is_same = (now.mode, now.devices) == (before.mode, before.devices)
    if cuts is None or cuts != before.cuts or is_same:
        return config
    named = ",".join(map(str, cuts))
    logger.info("placed in another way than before: parallel.cuts=%s is dropped", named)
    return config.with_values({"parallel.cuts": "auto"})


def choose_mode(config: Config, ranks: Ranks) -> Config:
    """Return the settings with a parallel mode in place of ``auto``.

    Args:
        config: As the user wrote it.
        ranks: The place of this process. Where torchrun has started several, mode ``none`` is that
            of a run which one process has trained, and counts as ``auto``.

    Raises:
        ConfigError: A setting is refused with the devices, or does not suit the data.
        DeviceError: A device is unknown or absent.
        DatasetError: The data set cannot be understood.
        VolumeError: A header cannot be read.
    """
    parallel, has_ranks = config.parallel, ranks.world_size > 1
    if parallel.mode != "auto" and not (has_ranks and parallel.mode == "none"):
        return config
    if not has_ranks and len(ParallelDims.resolve(parallel).all_devices) == 1:
        return config.with_values({"parallel.mode": "none"})
    network = plan_without_data(config, parallel.replicas)
    chosen, line = planned_mode(config, network, ranks if has_ranks else None)
    logger.info("%s", line)
    return config.with_values(
        {
            "parallel.mode": chosen.mode,
            "parallel.devices": chosen.devices,
            "parallel.replicas": chosen.replicas,
        }
    )


def folder_to_resume(request: RunRequest, over_folds: bool = False) -> RunFolder:
    """Return the run to continue; without a folder, the newest of the data set that is named.

    Args:
        request: What was asked for.
        over_folds: Whether it must be one over several folds.

    Raises:
        ConfigError: There is no such run.
    """
    of_data = ("data.dataset", "data.cache")
    named = {key: value for key, value in request.changes.items() if key in of_data}
    data = load_config(request.config_path, named).data
    return run_to_resume(request.output, data.dataset, data.cache, over_folds)


def _may_be_restarted() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") > "0"


def run_name(config: Config, folds: str | None = None) -> str:
    """Return the name of a new run: data set, fold and time.

    Args:
        config: The settings of the run.
        folds: Words for its folds; None: the one of the settings.
    """
    name = dataset_name(config)[:MAX_NAME_LETTERS]
    fold = config.data.fold
    folds = folds or ("every-case" if fold == "none" else f"fold{fold}")
    return f"{name}-{folds}-{time.strftime('%Y%m%d-%H%M%S')}"


def start_ranks(run: Run, dims: ParallelDims, quiet: bool, say: Say | None = None) -> None:
    """Train in a process for each replica, each started with the settings as they are now.

    Args:
        run: What they train.
        dims: The devices of each.
        quiet: No progress at all.
        say: Takes the lines that they write; None: they write to the terminal.

    Raises:
        Unet3dError: A rank failed; the reason of the first one that did.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after the ranks have ended.
    """
    with meeting_folder() as folder:
        settings = folder / "settings.yaml"
        settings.write_text(run.config.to_yaml())
        arguments = ["train", "--config", str(settings), "--output", str(run.folder.path)]
        arguments += ["--resume"] if run.resume else []
        arguments += ["--quiet"] if quiet else []
        try:
            launch(
                arguments,
                folder,
                num_ranks=dims.num_processes,
                max_restarts=run.config.parallel.max_restarts,
                on_gpus=any(one.type == "cuda" for devices in dims.replicas for one in devices),
                say=say,
            )
        except Interrupted as interruption:
            raise Interrupted(
                interruption.signal_number, can_resume=run.folder.latest.exists()
            ) from interruption


def _to_plain(run: Run) -> dict[str, Any]:
    return {
        "config": run.config.model_dump(mode="json"),
        "folder": str(run.folder.path),
        "is_made": run.folder.is_made,
        "resume": run.resume,
    }


def _from_plain(values: Mapping[str, Any]) -> Run:
    return Run(
        config=Config.from_plain(values["config"]),
        folder=RunFolder(Path(values["folder"]), is_made=values["is_made"]),
        resume=values["resume"],
    )
