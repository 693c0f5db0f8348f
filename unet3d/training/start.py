"""Choosing and starting a run: new or continued, in this process or in several."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from unet3d.config import Config
from unet3d.distributed.commands import Say
from unet3d.distributed.group import Group
from unet3d.distributed.launcher import launch, meeting_folder
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import ConfigError
from unet3d.interruption import Interrupted
from unet3d.runs.run_folder import RunFolder, make_run
from unet3d.training.job import train
from unet3d.training.loop import TrainingResult
from unet3d.training.plan import Plan
from unet3d.training.recording import dataset_name
from unet3d.training.request import Request, run_to_resume

logger = logging.getLogger(__name__)

MAX_NAME_LETTERS = 50
"""Letters of a data set's name in that of a run; a file system allows 255 bytes in all."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What will be trained, and where its files go."""

    plan: Plan
    folder: RunFolder
    """The run's files."""
    resume: bool
    """Whether to continue from the folder's latest checkpoint."""


def start_training(
    request: Request, ranks: Ranks, console: Console, quiet: bool
) -> TrainingResult | None:
    """Train what was asked for; None: in processes that were started, which show their own."""
    with joined(ranks) as group:
        return train_run(choose_run(request, group), group, console, quiet)


def train_run(
    run: Run, group: Group, console: Console, quiet: bool, say: Say | None = None
) -> TrainingResult | None:
    """Train a run, in this process or in one for each replica or slab; None: in those.

    ``say`` takes the lines of the processes that are started; None: they go to the terminal.
    """
    try:
        if group.size < run.plan.dims.num_processes:
            start_ranks(run, quiet, say)
            return None
        return train(run.plan, run.folder, run.resume, console, quiet, group)
    finally:
        if group.is_first:
            run.folder.discard_if_empty()


def choose_run(request: Request, group: Group) -> Run:
    """Return the run that all ranks train; only the first one must see the files of an old one."""

    def to_plain(run: Run) -> dict[str, Any]:
        path, is_made = str(run.folder.path), run.folder.is_made
        return {"plan": run.plan.to_plain(), "path": path, "made": is_made, "resume": run.resume}

    def from_plain(values: Mapping[str, Any]) -> Run:
        return Run(
            plan=Plan.from_plain(values["plan"], group.ranks),
            folder=RunFolder(Path(values["path"]), is_made=values["made"]),
            resume=values["resume"],
        )

    run = group.from_first(
        lambda: _choose_run(request, group), to_plain=to_plain, from_plain=from_plain
    )
    for note in run.plan.notes:
        logger.info("%s", note)
    return run


def _choose_run(request: Request, group: Group) -> Run:
    old_run = None
    if request.resume:
        old_run = run_to_resume(request)
    plan = Plan.of(request, group.ranks, old_run=old_run).placed(group.ranks)
    if old_run is not None:
        is_saved = old_run.latest.exists()
        if not is_saved:
            logger.warning(
                "%s was stopped before its first checkpoint; it begins anew", old_run.path
            )
        return Run(plan=plan, folder=old_run, resume=is_saved)
    may_be_restarted = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") > "0"
    if group.size > 1 and request.output is None and may_be_restarted:
        raise ConfigError(
            "torchrun may restart the ranks, which then must find the run again; name its "
            "folder with --output, or use torchrun --max-restarts 0"
        )
    if request.output is None:
        return Run(plan=plan, folder=make_run(run_name(plan.config)), resume=False)
    folder = RunFolder(request.output)
    has_begun = group.has_begun(str(folder.path))
    return Run(plan=plan, folder=folder, resume=has_begun and folder.latest.exists())


def run_name(config: Config, folds: str | None = None) -> str:
    """Return the name of a new run: data set, fold and time; ``folds`` names several."""
    name = dataset_name(config)[:MAX_NAME_LETTERS]
    fold = config.data.fold
    folds = folds or ("every-case" if fold == "none" else f"fold{fold}")
    return f"{name}-{folds}-{time.strftime('%Y%m%d-%H%M%S')}"


def start_ranks(run: Run, quiet: bool, say: Say | None = None) -> None:
    """Train in a process for each replica or slab, each started with the settings of the plan."""
    config, dims = run.plan.config, run.plan.dims
    with meeting_folder() as folder:
        settings = folder / "settings.yaml"
        settings.write_text(config.to_yaml())
        arguments = ["train", "--config", str(settings), "--output", str(run.folder.path)]
        arguments += ["--resume"] if run.resume else []
        arguments += ["--quiet"] if quiet else []
        try:
            launch(
                arguments,
                folder,
                num_ranks=dims.num_processes,
                max_restarts=config.parallel.max_restarts,
                on_gpus=any(device.type == "cuda" for device in dims.all_devices),
                say=say,
            )
        except Interrupted as interruption:
            raise Interrupted(
                interruption.signal_number, can_resume=run.folder.latest.exists()
            ) from interruption
