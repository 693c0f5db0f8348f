"""Training several folds: one after another on all devices, or one on each at the same time.

Folds are independent, so several devices train them fastest with one fold on each, without
communication. This is what mode ``auto`` means here. Any other mode places *one* network on all
devices, so folds are then trained one after another.

Each fold runs in its own process as a normal run, in ``fold0``, ``fold1``, ... of one folder.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from unet3d.config import Config
from unet3d.distributed.commands import Say, in_words, run_commands
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, Unet3dError, some
from unet3d.inputs.reading import read_json
from unet3d.interruption import Interrupted
from unet3d.planning.experiment import open_dataset, plan_experiment
from unet3d.runs.finding import FOLDS, recorded_folds
from unet3d.runs.run_folder import RunFolder, make_run
from unet3d.training.cores import preparing_processes
from unet3d.training.plan import Plan, run_name
from unet3d.training.request import Request, named_folds, num_folds, run_to_resume

logger = logging.getLogger(__name__)

SCORES = ("final_mean_dice", "best_dice")
"""Scores in the summary of each fold, which the summary over folds averages."""

SCORES_OF_LABELS = ("final_dice", "dice")
"""Scores of each label, which are averaged, too."""


def request_over_folds(request: Request, folds: str | None, ranks: Ranks) -> Request | None:
    """Return the request if its run has several folds, with the folder of a run to resume.

    None: the run has one fold.

    ``folds`` is the value of ``--folds``; None: the run to resume decides.
    """
    if folds is not None and ranks.world_size > 1:
        raise ConfigError(
            f"torchrun has started {ranks.world_size} ranks, but --folds starts the processes of "
            "each fold itself; leave torchrun out, or name one --fold"
        )
    if not request.resume or ranks.world_size > 1:
        return None if folds is None else request
    folder = run_to_resume(request, over_folds=folds is not None and request.output is None)
    if recorded_folds(folder.path) is not None:
        return replace(request, output=folder.path)
    if folds is not None:
        raise ConfigError(
            f"{folder.path} is the run of one fold; continue it without --folds, or start a new "
            "run in another --output"
        )
    return None


def train_folds(request: Request, folds: str | None, quiet: bool, say: Say) -> RunFolder:
    """Train or resume several folds, and return the folder with their summary.

    ``folds`` is ``all`` or numbers with commas between them; None: the folds of the run to resume.
    ``say`` shows a line of a fold while several are trained in parallel. A fold that fails does not
    stop running folds. If it fails before its first checkpoint, waiting folds would fail in the
    same way and do not start.
    """
    old_run = RunFolder(request.output) if request.resume and request.output else None
    plan = Plan.of(request, old_run=old_run)
    devices = plan.dims.all_devices
    if plan.config.parallel.mode == "auto" and len(devices) > 1:
        plans = [plan.on("none", [str(device)]) for device in devices]
    else:
        plans = [plan.placed()]
    for note in plans[0].notes:
        logger.info("%s", note)
    numbers = _numbers(folds, old_run, plan.config)
    folder = _folder(request, old_run, plan.config)
    runs = {fold: RunFolder(folder.path / f"fold{fold}") for fold in numbers}
    epochs = plan.config.training.epochs
    try:
        with folder.locked():
            if old_run is None:
                folder.create()
            left = [fold for fold in numbers if _summary_of(runs[fold]).get("epochs", 0) < epochs]
            if left:
                config = _prepare_cases(plans[0], left[0])
                if len(plans) > 1:  # record the setting for all folds, not the first fold's device
                    config = config.model_copy(update={"parallel": plan.config.parallel})
                folder.write_config(config)
            folder.write_json(folder.path / FOLDS, {"folds": list(numbers)})
            if left:
                folder.summary.unlink(missing_ok=True)  # not finished any more
                _log_places(plans, left, [fold for fold in numbers if fold not in left])
                _train(folder, {fold: runs[fold] for fold in left}, plans, quiet, say)
            folder.write_json(folder.summary, _summary(runs))
    finally:
        folder.discard_if_empty()
    return folder


def _numbers(named: str | None, old_run: RunFolder | None, config: Config) -> tuple[int, ...]:
    """Return the named folds, with the folds that a run already has."""
    recorded = () if old_run is None else recorded_folds(old_run.path) or ()
    if named is None:
        return recorded
    wanted = named_folds(named, num_folds(open_dataset(config), config))
    return tuple(sorted({*wanted, *recorded}))


def _folder(request: Request, old_run: RunFolder | None, config: Config) -> RunFolder:
    if old_run is not None:
        return old_run
    if request.output is None:
        return make_run(run_name(config, "folds"))
    folder = RunFolder(request.output)
    if recorded_folds(folder.path) is not None:
        raise ConfigError(
            f"{folder.path} holds a run over folds already; continue it with --resume, or "
            "choose another --output"
        )
    return folder


def _prepare_cases(plan: Plan, fold: int) -> Config:
    """Check and prepare the cases, once for all folds, and return settings with planned values.

    Errors that every fold would raise are raised before any fold begins.
    """
    config, dims = plan.config.with_values({"data.fold": fold}), plan.dims
    num_processes = preparing_processes(config, dims.all_devices, 1)
    counts = (dims.num_stages, dims.num_shards, dims.num_replicas)
    return plan_experiment(config, num_processes, *counts, plan.architecture).config


def _log_places(plans: Sequence[Plan], left: Sequence[int], finished: Sequence[int]) -> None:
    done = f"; finished: {', '.join(map(str, finished))}" if finished else ""
    where = "one after another"
    if len(plans) > 1:
        devices = [str(plan.dims.devices[0]) for plan in plans]
        unused = devices[len(left) :]
        where = f"one at a time on each of {', '.join(devices[: len(left)])}"
        where += f" (unused: {', '.join(unused)})" if unused else ""
    logger.info("training folds %s, %s%s", ", ".join(map(str, left)), where, done)


def _train(
    folder: RunFolder, runs: dict[int, RunFolder], plans: Sequence[Plan], quiet: bool, say: Say
) -> None:
    """Train the remaining folds, as many in parallel as there are plans.

    Raises Unet3dError if some failed, and Interrupted after a requested stop.
    """
    slots: list[tuple[str, ...]] = [()]
    if len(plans) > 1:
        slots = [("--parallel", "none", "--devices", str(plan.dims.devices[0])) for plan in plans]
    settings = ("--config", str(folder.config), *["--quiet"] * quiet)
    commands, of_name = {}, {run.path.name: run for run in runs.values()}
    for fold, run in runs.items():
        resume = ["--resume"] * (run.latest.exists() or run.config.exists())
        words = ("train", *settings, "--fold", str(fold), "--output", str(run.path), *resume)
        commands[run.path.name] = words
    try:
        statuses = run_commands(
            commands,
            slots[: len(runs)],
            on_cpu=any(one.type == "cpu" for plan in plans for one in plan.dims.all_devices),
            say=say,
            goes_on_after=lambda name: of_name[name].latest.exists(),
        )
    except Interrupted as interruption:
        can_resume = any(run.latest.exists() for run in runs.values())
        raise Interrupted(interruption.signal_number, can_resume=can_resume) from interruption
    failed = [f"{name} {in_words(status)}" for name, status in statuses.items() if status]
    if failed:
        others = [name for name in of_name if name not in statuses]
        begin = f", so {some(others)} did not begin" if others else ""
        raise Unet3dError(
            f"{len(failed)} of {len(runs)} folds did not finish: {some(failed)}{begin}; "
            "their errors are above. Fix them, or remove the folder of a fold to start it over, "
            f"and add --resume --output {folder.path}"
        )


def _summary_of(run: RunFolder) -> dict[str, Any]:
    """Return a finished fold's summary, with final scores at the top level; else an empty one."""
    if not run.has_summary():
        return {}
    summary = read_json(run.summary)
    final = summary.get("final") or {}
    return {**summary, "final_mean_dice": final.get("mean_dice"), "final_dice": final.get("dice")}


def _summary(runs: dict[int, RunFolder]) -> dict[str, Any]:
    """Return the content of ``summary.json`` over folds, all of which are finished.

    ``final_mean_dice``, and ``final_dice`` of each label, come from segmentations of the validation
    cases with the final networks; ``best_dice`` and ``dice`` from the best validation during
    training, which was chosen by the same cases. Each is the mean over folds, with the standard
    deviation between folds (None for one fold) and the number of folds that have a value.
    """
    of_fold = {fold: _summary_of(run) for fold, run in runs.items()}
    keys = (*SCORES, "best_epoch", *SCORES_OF_LABELS, "epochs", "seconds")
    summary: dict[str, Any] = {
        "folds": {str(fold): {key: of.get(key) for key in keys} for fold, of in of_fold.items()}
    }
    for key in SCORES:
        summary[key] = _spread([found.get(key) for found in of_fold.values()])
    for key in SCORES_OF_LABELS:
        each = [found.get(key) or {} for found in of_fold.values()]
        labels = dict.fromkeys(label for dice in each for label in dice)
        summary[key] = {label: _spread([dice.get(label) for dice in each]) for label in labels}
    return summary


def _spread(values: Sequence[float | None]) -> dict[str, float | int | None]:
    known = [value for value in values if value is not None]
    return {
        "mean": fmean(known) if known else None,
        "standard_deviation": stdev(known) if len(known) > 1 else None,
        "num_folds": len(known),
    }
