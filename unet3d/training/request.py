"""The request for a training run, and the run to resume; read before PyTorch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unet3d.config import Config, ParallelSettings, load_config
from unet3d.datasets.dataset import Dataset, fold_cases, folds_of, load_dataset
from unet3d.datasets.naming import with_labels
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DatasetError
from unet3d.memory.gpus import refuse_impossible
from unet3d.runs.finding import (
    chosen_folds,
    dataset_of,
    described_in,
    newest_run,
    recorded_folds,
)
from unet3d.runs.run_folder import RUNS, RunFolder

PLACEMENT = ("parallel.mode", "parallel.devices")
"""Settings that give a resumed run a new placement."""

KEPT = {"devices", "timeout_seconds", "max_restarts"}
"""Settings of the section ``parallel`` that a resumed run keeps with a new placement."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a user for a run."""

    config_path: Path | None = None
    """A configuration file; None: the defaults, or the settings of a resumed run."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that override the file's: dotted key to value."""
    output: Path | None = None
    """The run's folder; None: a new one below ``runs/``, or the newest to continue."""
    resume: bool = False
    """Whether to continue a run."""


def check_early(request: Request, folds: str | None) -> None:
    """Refuse impossible settings, devices, data sets and folds, without waiting for PyTorch."""
    old_run = None
    if request.resume:
        old_run = run_to_resume(request, over_folds=folds is not None and request.output is None)
    is_over_folds = folds is not None or (old_run and recorded_folds(old_run.path) is not None)
    if is_over_folds and "data.fold" in request.changes:
        raise ConfigError("--fold and a run over several folds exclude each other; leave one out")
    config = settings_of(request, old_run)
    precisions = {
        "training.precision": config.training.precision,
        "inference.precision": config.inference.precision,
    }
    is_alone = Ranks.from_environment() == Ranks() and folds is None
    parallel, data = config.parallel, config.data
    named = (parallel.devices, parallel.mode, parallel.replicas)
    refuse_impossible(*named, precisions, is_alone)
    if data.dataset is not None:
        dataset = load_dataset(data.dataset, data.reading)
        if dataset.faults:  # all are reported together, later
            return
        if data.labels is not None:
            with_labels(dataset, data.labels)
        if folds is not None:
            named_folds(folds, num_folds(dataset, config))
        else:
            fold_cases(dataset, data.fold, data.num_folds, config.training.seed)
    elif folds is not None:
        named_folds(folds, data.num_folds)
    elif data.fold != "none" and data.fold >= data.num_folds:
        raise DatasetError(
            f"the built-in phantoms have folds 0 to {data.num_folds - 1}, not fold {data.fold}; "
            "set data.fold accordingly"
        )


def num_folds(dataset: Dataset, config: Config) -> int:
    """Return how many folds a data set has: its own, or drawn ones."""
    return len(folds_of(dataset, config.data.num_folds, config.training.seed))


def named_folds(named: str, count: int) -> tuple[int, ...]:
    """Return the folds that ``--folds`` names: ``all`` of them, or numbers separated by commas."""
    try:
        wanted = chosen_folds(named) or tuple(range(count))
    except ValueError as error:
        raise ConfigError(f"--folds {error}") from error
    if max(wanted) >= count:
        raise ConfigError(
            f"--folds names fold {max(wanted)}, but there are {count}, counted from 0; name "
            "others, or set data.num_folds"
        )
    return wanted


def run_to_resume(request: Request, over_folds: bool = False) -> RunFolder:
    """Return the run to continue: the one in a folder, or the newest of the data set.

    It may be a run over several folds; with ``over_folds`` the newest run over several folds is
    chosen. A run that was killed before its first checkpoint counts, because its settings exist.
    """
    if "training.init" in request.changes:
        raise ConfigError(
            "training.init begins a new run, and --resume continues one; leave one out"
        )
    named = {key: value for key, value in request.changes.items() if key == "data.dataset"}
    dataset = load_config(request.config_path, named).data.dataset

    def suits(run: RunFolder) -> bool:
        if over_folds and recorded_folds(run.path) is None:
            return False
        made_with = dataset_of(run)
        if dataset is None:
            return True
        return bool(made_with) and described_in(Path(made_with)) == described_in(dataset)

    run = newest_run(finished=False, suits=suits) if request.output is None else None
    if request.output is not None and RunFolder(request.output).config.is_file():
        run = RunFolder(request.output)
    if run is None and request.output is not None and RunFolder(request.output).checkpoint():
        raise ConfigError(
            f"{request.output} has a checkpoint, but no config.yaml to resume with; restore that "
            f"file, or start a new run with its network: --init {request.output}"
        )
    if run is None:
        made_with = "" if request.output or dataset is None else f" that was made with {dataset}"
        raise ConfigError(
            f"there is no run to resume in {request.output or RUNS}{made_with}; name one with "
            "--output, or start one without --resume"
        )
    return run


def settings_of(request: Request, old_run: RunFolder | None) -> Config:
    """Return the settings of a request, which override the settings of a resumed run."""
    if old_run is None:
        return load_config(request.config_path, request.changes)
    changes = dict(request.changes)
    if request.config_path is not None:
        changes = {**load_config(request.config_path).flat(only_set=True), **changes}
    if _is_moved(load_config(old_run.config).parallel, changes):
        # Replicas or cuts that were recorded might be refused with the new placement.
        default = ParallelSettings().model_dump(mode="json", exclude=KEPT)
        changes = {**{f"parallel.{key}": value for key, value in default.items()}, **changes}
    return load_config(old_run.config, changes)


def _is_moved(recorded: ParallelSettings, changes: Mapping[str, Any]) -> bool:
    """Return whether changes give a run another placement than its recorded one."""
    named = {key: changes[key] for key in PLACEMENT if key in changes}
    wanted = load_config(None, named).parallel
    return any(
        getattr(wanted, key) != getattr(recorded, key)
        for key in ("mode", "devices")
        if f"parallel.{key}" in named
    )


def dataset_name(config: Config) -> str:
    """Return the name of the data set: its folder, or ``phantom``."""
    source = config.data.dataset
    if source is None:
        return "phantom"
    return source.parent.name if source.is_file() else source.name
