"""Training several folds: one after another on all devices, or one on each at the same time.

Folds are independent of one another, so several devices train them fastest with one fold on each:
nothing is exchanged. That is what mode ``auto`` means here. Any other mode says how *one* network
is spread over the devices, so the folds are then trained one after another, each on all of them.

Each fold is a process of its own and a normal run, in ``fold0``, ``fold1``, ... of one folder.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from unet3d.config import Config
from unet3d.config.configuration import in_yaml
from unet3d.datasets.dataset import folds_of
from unet3d.distributed.commands import in_words, run_commands
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, Unet3dError, some
from unet3d.inputs.reading import read_json
from unet3d.interruption import Interrupted
from unet3d.memory.record import device_bytes
from unet3d.parallel import ParallelDims
from unet3d.planning.auto_settings import load_settings
from unet3d.planning.experiment import open_dataset, plan_experiment
from unet3d.planning.step_size import within_gpus
from unet3d.runs.finding import FOLDS, folds_in, recorded_folds
from unet3d.runs.run_folder import RunFolder, make_run
from unet3d.training.cores import preparing_processes
from unet3d.training.initialising import settings_of_init
from unet3d.training.job import for_ranks
from unet3d.training.start import (
    RunRequest,
    choose_mode,
    folder_to_resume,
    refuse_init_of_old_run,
    run_name,
    settings_to_resume,
)

logger = logging.getLogger(__name__)

Say = Callable[[str], object]

SCORES = ("final_mean_dice", "last_mean_dice", "best_dice")
"""Numbers of a fold's summary whose mean the summary over folds has."""

SCORES_OF_LABELS = ("final_dice", "last_dice", "dice")
"""The same of each label."""


@dataclass(frozen=True, kw_only=True)
class FoldsResult:
    """What the training of several folds has come to."""

    folder: RunFolder
    """The folder of all folds."""
    summary: dict[str, Any]
    """What ``summary.json`` holds."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Folds to train, and where."""

    request: RunRequest
    folder: RunFolder
    """Of all folds."""
    config: Config
    """Every setting of a fold that has not begun."""
    folds: tuple[int, ...]
    """All of them, finished ones too."""
    slots: tuple[tuple[str, ...], ...]
    """Options that say where a fold is trained, for each fold that is trained at a time."""
    on_cpu: bool
    """Whether a device is a CPU."""

    def run_of(self, fold: int) -> RunFolder:
        """Return the files of one fold."""
        return RunFolder(self.folder.path / f"fold{fold}")

    def is_finished(self, fold: int) -> bool:
        """Return whether a fold has nothing left to do."""
        summary = _summary_of(self.run_of(fold))
        return summary is not None and summary.get("epochs", 0) >= self.config.training.epochs


def request_over_folds(request: RunRequest, folds: str | None, ranks: Ranks) -> RunRequest | None:
    """Return the request for a run over several folds, its folder named; None: it is for one run.

    Args:
        request: What was asked for.
        folds: The folds that were named; None: none were, so that an earlier run decides.
        ranks: The place of this process.

    Raises:
        ConfigError: There is no run to resume, or torchrun has started several ranks.
    """
    if folds is not None and ranks.world_size > 1:
        raise ConfigError(
            f"torchrun has started {ranks.world_size} ranks, but --folds starts the processes of "
            "each fold itself; leave torchrun out, or name one --fold"
        )
    if not request.resume or ranks.world_size > 1:
        return None if folds is None else request
    folder = folder_to_resume(request, over_folds=folds is not None)
    if recorded_folds(folder.path) is None:
        if folds is None:
            return None
        raise ConfigError(
            f"{folder.path} is the run of one fold; continue it without --folds, or start a new "
            "run in another --output"
        )
    return RunRequest(
        config_path=request.config_path,
        changes=request.changes,
        output=folder.path,
        resume=True,
    )


def train_folds(request: RunRequest, folds: str | None, quiet: bool, say: Say) -> FoldsResult:
    """Train several folds, or continue to.

    A fold that fails does not stop the others. If it has not come to its first checkpoint, those
    that have not begun would fail in the same way, so they do not begin.

    Args:
        request: What was asked for, from :func:`request_over_folds`.
        folds: ``all``, or numbers with commas between them; None: those of the run to continue.
        quiet: No progress at all.
        say: Shows a line of a fold that is trained beside others.

    Raises:
        Unet3dError: For every reason that we can explain; where folds failed, which ones.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after all folds have saved and ended.
    """
    plan = _planned(request, folds)
    folder = plan.folder
    try:
        with folder.locked():
            if not request.resume:
                folder.create()
            left = [fold for fold in plan.folds if not plan.is_finished(fold)]
            if left:
                _prepare_cases(plan, left[0])
                folder.write_config(plan.config)
                folder.write_json(folder.path / FOLDS, {"folds": list(plan.folds)})
                folder.summary.unlink(missing_ok=True)  # not finished any more
                _log_places(plan, left)
                _train(plan, left, quiet, say)
            summary = _summary(plan)
            folder.write_json(folder.summary, summary)
    finally:
        folder.discard_if_empty()
    return FoldsResult(folder=folder, summary=summary)


def _planned(request: RunRequest, named: str | None) -> _Plan:
    refuse_init_of_old_run(request)
    recorded: tuple[int, ...] = ()
    if request.resume and request.output is not None:
        recorded = recorded_folds(request.output) or ()
        config = settings_to_resume(request, RunFolder(request.output), Ranks())
    else:
        config = load_settings(request.config_path, request.changes, ParallelDims.resolve)
        config = settings_of_init(config)
    if "data.fold" in request.changes:
        raise ConfigError("--fold is given for a run over several folds; leave it out, or --folds")
    devices = ParallelDims.resolve(config.parallel).all_devices
    # All folds have one patch, whatever their GPUs.
    config = within_gpus(config, [device_bytes(one) for one in devices if one.type == "cuda"])
    slots: tuple[tuple[str, ...], ...] = ((),)
    if config.parallel.mode == "auto" and len(devices) > 1:
        slots = tuple(("--parallel", "none", "--devices", str(device)) for device in devices)
    else:
        config = choose_mode(config, Ranks())
        config = for_ranks(config, ParallelDims.resolve(config.parallel))
    folds = _folds(named, recorded, config)
    if request.output is not None:
        folder = RunFolder(request.output)
        if not request.resume and recorded_folds(folder.path) is not None:
            raise ConfigError(
                f"{folder.path} holds a run over folds already; continue it with --resume, or "
                "choose another --output"
            )
    else:
        folder = make_run(run_name(config, "folds"))
    return _Plan(
        request=request,
        folder=folder,
        config=config,
        folds=folds,
        slots=slots,
        on_cpu=any(device.type == "cpu" for device in devices),
    )


def _folds(named: str | None, recorded: tuple[int, ...], config: Config) -> tuple[int, ...]:
    """Return the folds that are named, with those that a run is over already."""
    data = config.data
    if named is None:
        return recorded
    number = len(folds_of(open_dataset(config), data.num_folds, config.training.seed))
    if named == "all":
        return tuple(range(number))
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", named):
        raise ConfigError(f"--folds is {named}; give all, or numbers such as 0,1,2")
    wanted = {int(fold) for fold in named.split(",")}
    if max(wanted) >= number:
        raise ConfigError(
            f"--folds names fold {max(wanted)}, but there are {number}, counted from 0; name "
            "others, or set data.num_folds"
        )
    return tuple(sorted(wanted.union(recorded)))


def _prepare_cases(plan: _Plan, fold: int) -> None:
    """Check settings and cases and prepare them, once for all folds and before any of them begins.

    Raises:
        Unet3dError: For every reason that every fold would have.
    """
    dims = ParallelDims.resolve(plan.config.parallel)
    counts = (dims.num_stages, dims.num_shards, dims.num_replicas)
    counts = counts if len(plan.slots) == 1 else (1, 1, 1)
    num_workers = preparing_processes(plan.config, dims.all_devices, 1)
    plan_experiment(plan.config.with_values({"data.fold": fold}), num_workers, *counts)


def _log_places(plan: _Plan, left: Sequence[int]) -> None:
    finished = [fold for fold in plan.folds if fold not in left]
    done = f"; finished: {', '.join(map(str, finished))}" if finished else ""
    names = ", ".join(map(str, left))
    if len(plan.slots) == 1:
        logger.info("folds %s, one after another%s", names, done)
        return
    devices = [slot[-1] for slot in plan.slots]
    unused = devices[len(left) :]
    logger.info(
        "folds %s, one at a time on each of %s%s%s",
        names,
        ", ".join(devices[: len(left)]),
        f" ({', '.join(unused)} unused; --parallel data trains one fold after another on all)"
        if unused
        else "",
        done,
    )


def _train(plan: _Plan, left: Sequence[int], quiet: bool, say: Say) -> None:
    """Train the folds that are left.

    Raises:
        Unet3dError: Some failed.
        Interrupted: They were asked to stop.
    """
    runs = {f"fold{fold}": plan.run_of(fold) for fold in left}
    commands = {f"fold{fold}": (*_arguments(plan, fold), *["--quiet"] * quiet) for fold in left}
    try:
        statuses = run_commands(
            commands,
            plan.slots[: len(left)],
            on_cpu=plan.on_cpu,
            say=say,
            goes_on_after=lambda name: runs[name].latest.exists(),
        )
    except Interrupted as interruption:
        can_resume = any(run.latest.exists() for run in runs.values())
        raise Interrupted(interruption.signal_number, can_resume=can_resume) from interruption
    failed = [f"{name} {in_words(status)}" for name, status in statuses.items() if status]
    if failed:
        others = [name for name in runs if name not in statuses]
        begin = f", so {some(others)} did not begin" if others else ""
        raise Unet3dError(
            f"{len(failed)} of {len(left)} folds did not come to their end: {some(failed)}{begin}; "
            f"to go on, add --resume --output {plan.folder.path}"
        )


def _arguments(plan: _Plan, fold: int) -> tuple[str, ...]:
    """Return the command line that trains one fold, or continues to."""
    request, run = plan.request, plan.run_of(fold)
    if not run.latest.exists():
        settings = ("--config", str(plan.folder.config), "--fold", str(fold))
        return ("train", *settings, "--output", str(run.path))
    changes = [
        word
        for key, value in request.changes.items()
        for word in ("--set", f"{key}={value if isinstance(value, str) else in_yaml(value)}")
    ]
    if request.config_path is not None:
        changes += ["--config", str(request.config_path), "--set", f"data.fold={fold}"]
    return ("train", "--resume", "--output", str(run.path), *changes)


def _summary_of(run: RunFolder) -> Mapping[str, Any] | None:
    """Return the summary of a finished fold, its final scores beside the others; or None."""
    if not run.has_summary():
        return None
    summary = read_json(run.summary)
    final = summary.get("final") or {}
    scores = {"final_mean_dice": final.get("mean_dice"), "final_dice": final.get("dice")}
    return {**summary, **scores}


def _summary(plan: _Plan) -> dict[str, Any]:
    """Return what ``summary.json`` over folds holds; all of them are finished.

    ``final_mean_dice``, and ``final_dice`` of each label, are of the validation cases as predicted
    with the final networks; ``last_mean_dice`` and ``last_dice`` are of the last
    validation in training, ``best_dice`` and ``dice`` of the best one, chosen by the cases that it
    is measured on. Each is the mean over folds, with the standard deviation between them (None for
    one fold) and the number of folds in which it is known.
    """
    runs = folds_in(plan.folder.path)
    of_fold = {fold: _summary_of(runs[fold]) or {} for fold in plan.folds}
    summary: dict[str, Any] = {
        "folds": {
            str(fold): {
                key: found.get(key)
                for key in (*SCORES, "best_epoch", *SCORES_OF_LABELS, "epochs", "seconds")
            }
            for fold, found in of_fold.items()
        }
    }
    for key in SCORES:
        summary[key] = _spread([found.get(key) for found in of_fold.values()])
    for key in SCORES_OF_LABELS:
        each = [found.get(key) or {} for found in of_fold.values()]
        labels = dict.fromkeys(label for dice in each for label in dice)
        summary[key] = {label: _spread([dice.get(label) for dice in each]) for label in labels}
    return summary


def _spread(values: Sequence[float | None]) -> dict[str, float | int | None]:
    known = [value for value in values if value is not None and value >= 0]  # -1: never validated
    return {
        "mean": fmean(known) if known else None,
        "standard_deviation": stdev(known) if len(known) > 1 else None,
        "num_folds": len(known),
    }
