"""Finding the networks that are meant by a path: ours, and those of nnU-Net's models.

A model of nnU-Net is a folder of its results::

    nnUNetTrainer__nnUNetPlans__3d_fullres/
        plans.json  dataset.json
        fold_0/checkpoint_final.pth     fold_1/...     or fold_all/...

or the archive of such folders that ``nnUNetv2_export_model_to_zip`` writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from unet3d.errors import CheckpointError, some
from unet3d.nnunet.archives import Archive, archive_of, open_archive
from unet3d.nnunet.layout import ALL, DATASET, FINAL, PLANS, SUFFIX, fold_folder, fold_named
from unet3d.runs.finding import checkpoints_in, folds_in, own_fold
from unet3d.runs.run_folder import checkpoint_in

Folds = Sequence[int] | None
"""Numbers of folds; None: all, which are the numbered ones, or else the one on every case."""

Found = TypeVar("Found")
AnyPath = TypeVar("AnyPath", bound=PurePath)


def networks_in(
    path: Path, folds: Folds = None, stack: ExitStack | None = None
) -> tuple[Path, ...]:
    """Return the files of the networks that are meant by a path.

    That is what :func:`~unet3d.runs.finding.checkpoints_in` takes; a model of nnU-Net, the folder
    of one of its folds or its only configuration, a checkpoint in it; or an archive of it, or one
    of these within an archive. What is needed of an archive is in a temporary folder until the
    stack is closed; without a stack archives are refused.
    """
    packed = archive_of(path)
    if packed is not None:
        if stack is None:
            raise CheckpointError(f"{packed[0]} is an archive; unpack it, and name its folder")
        return _of_archive(*packed, folds, stack)
    if path.is_dir():
        model = _model_in(path)
        if model is not None:
            found = [file.relative_to(model) for file in model.glob(f"fold_*/*{SUFFIX}")]
            return tuple(model / file for file in _of_model(found, folds, model))
        if fold_named(path.name) is not None and (found := list(path.glob(f"*{SUFFIX}"))):
            return (_only(_final(found, path), path, folds),)
        runs = folds_in(path)
        if folds is not None and runs:
            return tuple(checkpoint_in(run.path) for run in _chosen(runs, folds, path))
    files = checkpoints_in(path)
    if folds is None or not path.exists():  # what is missing is said when it is read
        return files
    if len(files) == 1:
        return (_only(files[0], path, folds),)
    by_fold = {fold: file for file in files if (fold := fold_named(file.stem)) is not None}
    return tuple(_chosen(by_fold, folds, path))


def _chosen(known: Mapping[Any, Found], folds: Folds, path: Path) -> list[Found]:
    """Return what is known of some folds of what a user knows by a path."""
    if folds is None:
        folds = [fold for fold in known if isinstance(fold, int)]
        return [known[fold] for fold in sorted(folds)] or list(known.values())
    missing = [fold for fold in folds if fold not in known]
    if missing:
        has = some(sorted(known, key=str)) if known else "none"
        raise CheckpointError(f"{path} has no fold {some(missing)}; it has {has}")
    return [known[fold] for fold in folds]


def _only(network: Found, path: Path, folds: Folds, fold: int | str | None = None) -> Found:
    """Return the only network at a path, which is of one fold, or of none."""
    folder = path if path.is_dir() else path.absolute().parent
    known = [one for one in (fold, own_fold(folder), fold_named(folder.name)) if one is not None]
    return _chosen({[*known, ALL][0]: network}, folds, path)[0]


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


def _of_model(files: Iterable[AnyPath], folds: Folds, model: Path) -> list[AnyPath]:
    """Return the checkpoints of folds of a model that a user knows by a path.

    The files are all checkpoints in its folds, relative to it.
    """
    by_fold = {file: fold_named(file.parent.name) for file in sorted(files)}
    found = {
        fold: file for file, fold in by_fold.items() if file.name == FINAL and fold is not None
    }
    if found:
        return _chosen(found, folds, model)
    others = [model / file for file, fold in by_fold.items() if fold is not None]
    raise CheckpointError(
        f"{model} has no {fold_folder(0)}/{FINAL}, or of another fold; "
        + (_name_one(others) if others else "train it first")
    )


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
    path: Path, inside: PurePosixPath, folds: Folds, stack: ExitStack
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
            name = _within(files, place, path / model)
            chosen = [_only(name, path / inside, folds, fold_named(name.parent.name))]
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
