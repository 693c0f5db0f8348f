"""Finding the networks that are meant by a path: ours, and those of nnU-Net's models.

A model of nnU-Net is a folder of its results::

    nnUNetTrainer__nnUNetPlans__3d_fullres/
        plans.json  dataset.json
        fold_0/checkpoint_final.pth     fold_1/...     or fold_all/...

or the archive of such folders that ``nnUNetv2_export_model_to_zip`` writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from unet3d.errors import CheckpointError, some
from unet3d.nnunet.archives import archive_of, open_archive
from unet3d.nnunet.layout import ALL, DATASET, FINAL, PLANS, SUFFIX, fold_named
from unet3d.runs.finding import checkpoints_in, folds_in
from unet3d.runs.run_folder import RunFolder, checkpoint_in

Folds = Sequence[int] | None
"""Numbers of folds; None: all, which are the numbered ones, or else the one on every case."""

Found = TypeVar("Found")


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
        model, place = _model_in(path), Path()
        if model is None and fold_named(path.name) is not None and any(path.glob(f"*{SUFFIX}")):
            model, place = path.parent, Path(path.name)
        if model is not None:
            found = [file.relative_to(model) for file in model.glob(f"fold*/*{SUFFIX}")]
            return tuple(model / file for file in _of_model(found, place, folds, model))
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
    recorded = (RunFolder(folder).read_data() or {}).get("fold")
    if fold is None:
        fold = recorded if isinstance(recorded, int) else fold_named(folder.name)
    return _chosen({ALL if fold is None else fold: network}, folds, path)[0]


def _model_in(path: Path) -> Path | None:
    """Return the folder of a model that a folder is, or the only one that it has."""
    if (path / PLANS).is_file():
        return path
    return _only_usual([folder.parent for folder in path.glob(f"*__*__*/{PLANS}")], path)


def _only_usual(models: Sequence[Path], path: Path) -> Path | None:
    """Return the only model at a path; where there are others, not of 2-D or of a cascade."""
    names = ("__2d", "cascade_fullres")
    usual = [one for one in sorted(models) if not one.name.endswith(names)] or sorted(models)
    if len(usual) > 1:
        raise CheckpointError(f"{path} has several models: {some(usual)}; name one of them")
    return usual[0] if usual else None


def _of_model(files: Iterable[Path], place: Path, folds: Folds, model: Path) -> list[Path]:
    """Return the checkpoints at a place in a model: of its folds, of one of them, or itself.

    The files are all checkpoints in its folds. They and the place are relative to the model.
    """
    known = sorted(files)
    final = {fold_named(file.parent.name): file for file in known if file.name == FINAL}
    final.pop(None, None)
    if final and place == Path():
        return _chosen(final, folds, model)
    for file in (place, place / FINAL):
        if file in known:
            return [_only(file, model / place, folds, fold_named(file.parent.name))]
    others = [model / file for file in known if file.is_relative_to(place)]
    others = others or [model / file for file in known]
    instead = f"name what it has: {some(others)}" if others else "train it first"
    raise CheckpointError(f"there is no {FINAL} in {model / place}; {instead}")


def _of_archive(path: Path, inside: Path, folds: Folds, stack: ExitStack) -> tuple[Path, ...]:
    """Unpack what a prediction needs of an archive, and return the checkpoints."""
    with open_archive(path) as archive:
        folders = [name.parent for name in archive.names if name.name == PLANS]
        around = [
            one for one in folders if one.is_relative_to(inside) or inside.is_relative_to(one)
        ]
        known_as = _only_usual([path / folder for folder in around], path)
        if known_as is None:
            raise CheckpointError(
                f"{path / inside} has no {PLANS}, so it is no model of nnU-Net; name an archive "
                "that nnUNetv2_export_model_to_zip has written"
            )
        model = known_as.relative_to(path)
        files = [
            name.relative_to(model)
            for name in archive.names
            if name.suffix == SUFFIX and name.parent.parent == model and name.parent != model
        ]
        place = inside.relative_to(model) if inside.is_relative_to(model) else Path()
        chosen = [model / name for name in _of_model(files, place, folds, known_as)]
        described = [model / name for name in (PLANS, DATASET) if model / name in archive.names]
        folder = archive.unpack([*described, *chosen], stack)
    return tuple(folder / name for name in chosen)
