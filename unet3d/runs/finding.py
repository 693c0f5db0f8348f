"""Finding runs, their folds and their checkpoints by the names of their folders."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from unet3d.errors import CheckpointError, reason_of, some
from unet3d.inputs.plain_data import shown
from unet3d.inputs.reading import open_regular, read_json
from unet3d.runs.run_folder import RUNS, RunFolder, folds_in

logger = logging.getLogger(__name__)

FOLDS = "folds.json"
"""File that lists the folds of a run over several folds."""


def chosen_folds(folds: str | int | Sequence[str | int] | None) -> tuple[int, ...] | None:
    """Return folds such as ``0,2`` or ``[0, 2]`` as numbers, each once; None for ``all`` or None.

    Raises ValueError for anything else.
    """
    parts: Sequence[str | int] = [folds] if isinstance(folds, int) else folds or ["all"]
    parts = parts.split(",") if isinstance(parts, str) else parts
    words = [str(part).strip() for part in parts]
    if words == ["all"]:
        return None
    if not all(re.fullmatch("[0-9]{1,4}", word) for word in words):
        raise ValueError(f"{shown(folds)} names no folds; give numbers such as 0,2, or all")
    return tuple(dict.fromkeys(map(int, words)))


def recorded_folds(path: Path) -> tuple[int, ...] | None:
    """Return the folds of a run over several folds; None: a run of one fold.

    If the record is missing or damaged, these are the folds that have begun.
    """
    with suppress(OSError, ValueError, TypeError, LookupError):
        folds = read_json(path / FOLDS)["folds"]
        if folds and all(type(fold) is int and fold >= 0 for fold in folds):
            return tuple(folds)
    return tuple(folds_in(path)) or None


def checkpoints_in(path: Path) -> tuple[Path, ...]:
    """Return the checkpoints that a path names.

    A file names itself, the folder of a run one checkpoint, the folder of a run over several folds
    one checkpoint of each fold, and a folder of checkpoints all of them.
    """
    if not path.is_dir():
        return (path,)
    run = RunFolder(path)
    own = run.checkpoint()
    if own is not None:
        if run.data.is_file() and not run.has_summary():  # else a checkpoint alone was copied
            logger.warning("%s: training has not finished", path)
        return (own,)
    folds = list(folds_in(path).values())
    begun = tuple(file for fold in folds if (file := fold.checkpoint()) is not None)
    if begun:
        lacking = [fold.path.name for fold in folds if not fold.has_summary()]
        if lacking:
            logger.warning("%s: training of %s has not finished", path, some(lacking))
        return begun
    files = tuple(sorted(file for file in path.glob("*.pt") if file.is_file()))
    if not files:
        raise CheckpointError(
            f"{path} holds no checkpoint: neither {run.latest.name} nor {run.best.name}, in it or "
            "in a fold, nor another file *.pt; name a checkpoint, or the folder of a run"
        )
    return files


def refuse_other_file(path: Path) -> None:
    """Without importing PyTorch, refuse a file that is missing or clearly no checkpoint."""
    try:
        with open_regular(path) as file:
            is_archive = file.read(2) == b"PK"  # as torch.save writes
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {reason_of(error)}; name one or a run"
        ) from error
    if not is_archive:
        raise CheckpointError(
            f"{path} is not a checkpoint; name one, the folder of a run, or a model of nnU-Net"
        )


def checkpoint_in(path: Path) -> Path:
    """Return the only checkpoint that a path names."""
    return only_one(path, checkpoints_in(path))


def only_one(path: Path, found: Sequence[Path]) -> Path:
    """Return the only one of the checkpoints of a path, or raise CheckpointError."""
    if len(found) > 1:
        raise CheckpointError(f"{path} has several checkpoints: {some(found)}; name one of them")
    return found[0]


def newest_run(
    finished: bool, suits: Callable[[RunFolder], bool] = lambda run: True
) -> RunFolder | None:
    """Return the most recently written run in ``runs/`` for which ``suits`` is true, if any.

    A run over several folds counts as one run, and as finished only if all its folds are finished.
    """
    return next(filter(suits, newest_runs(finished)), None)


def newest_runs(finished: bool) -> list[RunFolder]:
    """Return the runs in ``runs/``, or only the finished ones; the last written comes first."""
    written = []
    for path in RUNS.iterdir() if RUNS.is_dir() else ():
        run = RunFolder(path)
        latest = [run.config, run.latest, *(fold.latest for fold in folds_in(path).values())]
        files = [run.summary] if finished else latest
        times = [os.path.getmtime(file) for file in files if os.path.isfile(file)]
        if times:
            written.append((max(times), path.name, run))
    return [run for _, _, run in sorted(written, key=lambda one: one[:2], reverse=True)]


def dataset_of(run: RunFolder) -> str:
    """Return the path of a run's training data; empty if the run does not record it."""
    for one in (run, *folds_in(run.path).values()):
        with suppress(OSError, ValueError, TypeError, LookupError):
            return str(read_json(one.data)["dataset"] or "")
    return ""


def described_in(dataset: Path) -> Path:
    """Return the file that describes a data set, which may be named by its folder."""
    return (dataset / "dataset.json" if dataset.is_dir() else dataset).resolve()
