"""Finding the networks that are meant by a path: ours, and those of nnU-Net's models.

A model of nnU-Net is a folder of its results::

    nnUNetTrainer__nnUNetPlans__3d_fullres/
        plans.json  dataset.json
        fold_0/checkpoint_final.pth     fold_1/...     or fold_all/...

or the archive of such folders that ``nnUNetv2_export_model_to_zip`` writes.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeVar

from unet3d.errors import CheckpointError, some
from unet3d.nnunet.archives import Archive, archive_of, open_archive
from unet3d.nnunet.layout import DATASET, FINAL, PLANS, SUFFIX, fold_folder, fold_named
from unet3d.runs.finding import checkpoints_in, folds_in

Fold = int | str
"""Number of a fold, or ``all``."""

AnyPath = TypeVar("AnyPath", bound=PurePath)


def networks_in(
    path: Path, folds: Sequence[Fold] | None = None, stack: ExitStack | None = None
) -> tuple[Path, ...]:
    """Return the files of the networks that are meant by a path.

    Args:
        path: What :func:`~unet3d.runs.finding.checkpoints_in` takes; a model of nnU-Net, the folder
            of one of its folds or its only configuration, a checkpoint in it; or an archive of it,
            or one of these within an archive.
        folds: Which folds; None: all that are numbered, or else the one on all cases.
        stack: Until it is closed, what is needed of an archive is in a temporary folder; None:
            archives are refused.

    Raises:
        CheckpointError: There is none, or a fold is missing.
    """
    packed = archive_of(path)
    if packed is not None:
        if stack is None:
            raise CheckpointError(f"{packed[0]} is an archive; unpack it, and name its folder")
        return _of_archive(*packed, folds, stack)
    if path.is_dir():
        model = _model_in(path)
        if model is not None:
            files = [file.relative_to(model) for file in model.glob(f"fold_*/*{SUFFIX}")]
            return tuple(model / file for file in _of_model(files, folds, model))
        if fold_named(path.name) is not None and (files := list(path.glob(f"*{SUFFIX}"))):
            _refuse_folds(path, folds)
            return (_final(files, path),)
        if folds is not None:
            return _of_run(path, folds)
    if path.exists():  # else that is said when it is read
        _refuse_folds(path, folds)
    return checkpoints_in(path)


def _refuse_folds(path: Path, folds: Sequence[Fold] | None) -> None:
    if folds is not None:
        raise CheckpointError(f"{path} is one network, which has no folds; leave --folds out")


def _of_run(path: Path, folds: Sequence[Fold]) -> tuple[Path, ...]:
    """Return the checkpoints of some folds of a run of ours."""
    known = folds_in(path)
    missing = [fold for fold in folds if fold not in known]
    if missing:
        raise CheckpointError(
            f"{path} has no fold {some(missing)}; it has {some(list(known)) if known else 'none'}"
        )
    return tuple(file for fold in folds for file in checkpoints_in(known[int(fold)].path))


def _model_in(path: Path) -> Path | None:
    """Return the folder of a model that a folder is, or the only one that it has."""
    if (path / PLANS).is_file():
        return path
    models = _usual(folder.parent for folder in path.glob(f"*__*__*/{PLANS}"))
    if len(models) > 1:
        raise _several(path, models)
    return models[0] if models else None


def _usual(folders: Iterable[AnyPath]) -> list[AnyPath]:
    """Return models; where there are others, not those of two dimensions or of a cascade."""
    models = sorted(folders)
    usual = [model for model in models if not model.name.endswith(("__2d", "cascade_fullres"))]
    return usual or models


def _several(path: Path, models: Sequence[Path]) -> CheckpointError:
    return CheckpointError(f"{path} has several models: {some(models)}; name one of them")


def _of_model(files: Iterable[AnyPath], folds: Sequence[Fold] | None, model: Path) -> list[AnyPath]:
    """Return the checkpoints of the folds of a model.

    Args:
        files: All checkpoints in its folds, relative to it.
        folds: As for :func:`networks_in`.
        model: What the user knows it by.
    """
    found: dict[Fold, AnyPath] = {}
    others: dict[Fold, list[Path]] = {}
    for file in sorted(files):
        fold = fold_named(file.parent.name)
        if fold is None:
            continue
        if file.name == FINAL:
            found[fold] = file
        else:
            others.setdefault(fold, []).append(model / file)
    if not found:
        named = [file for files in others.values() for file in files]
        raise CheckpointError(
            f"{model} has no {fold_folder(0)}/{FINAL}, or of another fold; "
            + (_name_one(named) if named else "train it first")
        )
    if folds is None:
        numbered = sorted(fold for fold in found if isinstance(fold, int))
        return [found[fold] for fold in numbered or found]
    missing = [fold for fold in folds if fold not in found]
    if missing:
        known = sorted(found, key=str)
        named = [file for fold in missing for file in others.get(fold, [])]
        raise CheckpointError(
            f"{model} has no {FINAL} of fold {some(missing)}; it has {some(known)}"
            + (f"; {_name_one(named)}" if named else "")
        )
    return [found[fold] for fold in folds]


def _final(files: Sequence[AnyPath], fold: Path) -> AnyPath:
    """Return the final one of the checkpoints of a fold, which a user knows by a path."""
    for file in files:
        if file.name == FINAL:
            return file
    others = sorted(fold / file.name for file in files)
    raise CheckpointError(f"{fold} has no {FINAL}; {_name_one(others)}")


def _name_one(checkpoints: Sequence[Path]) -> str:
    return f"name what it has: {some(checkpoints)}"


def _of_archive(
    path: Path, inside: PurePosixPath, folds: Sequence[Fold] | None, stack: ExitStack
) -> tuple[Path, ...]:
    """Unpack what a prediction needs of an archive, and return the checkpoints."""
    with open_archive(path) as archive:
        model = _model_in_archive(archive, inside)
        files = [
            name.relative_to(model)
            for name in archive.names
            if name.suffix == SUFFIX and name.parent.parent == model and name.parent != model
        ]
        place = inside.relative_to(model) if inside.is_relative_to(model) else PurePosixPath()
        if place.parts:
            _refuse_folds(path / inside, folds)
            chosen = [_within(files, place, path / model)]
        else:
            chosen = _of_model(files, folds, path / model)
        described = [model / name for name in (PLANS, DATASET) if model / name in archive.names]
        folder = archive.unpack([*described, *(model / name for name in chosen)], stack)
    return tuple(folder / model / name for name in chosen)


def _model_in_archive(archive: Archive, inside: PurePosixPath) -> PurePosixPath:
    """Return the only model at a place in an archive, or the one that has this place."""
    folders = [name.parent for name in archive.names if name.name == PLANS]
    models = _usual(
        folder
        for folder in folders
        if folder.is_relative_to(inside) or inside.is_relative_to(folder)
    )
    if not models:
        raise CheckpointError(
            f"{archive.path / inside} has no {PLANS}, so it is no model of nnU-Net; name an "
            "archive that nnUNetv2_export_model_to_zip has written"
        )
    if len(models) > 1:
        raise _several(archive.path, [archive.path / model for model in models])
    return models[0]


def _within(files: Sequence[PurePosixPath], place: PurePosixPath, model: Path) -> PurePosixPath:
    """Return the checkpoint at a place in a model, which is its own or that of its fold."""
    if place in files:
        return place
    of_fold = [file for file in files if file.parent == place]
    if not of_fold:
        names = [model / file for file in files]
        raise CheckpointError(f"there is no {model / place}; {_name_one(names or [model])}")
    return _final(of_fold, model / place)
