"""Finding the networks that are meant by a path: ours, and those of nnU-Net's models.

A model of nnU-Net is a folder of its results::

    nnUNetTrainer__nnUNetPlans__3d_fullres/
        plans.json  dataset.json
        fold_0/checkpoint_final.pth     fold_1/...     or fold_all/...

or the archive of such folders that ``nnUNetv2_export_model_to_zip`` writes.
"""

import re
import shutil
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from unet3d.errors import CheckpointError, reason_of, some
from unet3d.inputs.plain_data import printable
from unet3d.memory.host import readable
from unet3d.nnunet.layout import ALL, DATASET, FINAL, PLANS, fold_folder
from unet3d.runs.finding import checkpoints_in, folds_in

FOLD = re.compile(fold_folder(f"([0-9]{{1,4}}|{ALL})"))

MAX_MEMBERS = 100_000
"""Files in an archive; one with all predictions of a large data set has some thousands."""

Fold = int | str
"""Number of a fold, or ``all``."""


def networks_in(
    path: Path, folds: Sequence[Fold] | None = None, unpacked: Path | None = None
) -> tuple[Path, ...]:
    """Return the files of the networks that are meant by a path.

    Args:
        path: What :func:`~unet3d.runs.finding.checkpoints_in` takes; a model of nnU-Net, the folder
            of one of its folds or its only configuration, a checkpoint in it, or an archive of it.
        folds: Which folds; None: all that are numbered, or else the one on all cases.
        unpacked: A folder to unpack an archive to.

    Raises:
        CheckpointError: There is none, or a fold is missing.
    """
    if path.suffix == ".zip" and path.is_file():
        if unpacked is None:
            raise CheckpointError(f"{path} is an archive; unpack it, and name its folder")
        return _of_model(_unpacked_model(path, unpacked), folds, name=str(path))
    if path.is_dir():
        model = _model_in(path)
        if model is not None:
            return _of_model(model, folds, name=str(path))
        final = path / FINAL
        if FOLD.fullmatch(path.name) and final.is_file():
            _refuse_folds(path, folds)
            return (final,)
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
        raise _several(path, [model.name for model in models])
    return models[0] if models else None


def _usual(folders: Iterable[Path]) -> list[Path]:
    """Return models; where there are others, not those of two dimensions or of a cascade."""
    models = sorted(folders)
    usual = [model for model in models if not model.name.endswith(("__2d", "cascade_fullres"))]
    return usual or models


def _several(path: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{path} has several models: {some(list(names))}; name one of them")


def _of_model(model: Path, folds: Sequence[Fold] | None, name: str) -> tuple[Path, ...]:
    """Return the checkpoints of the folds of a model."""
    found: dict[Fold, Path] = {}
    for folder in model.glob("fold_*"):
        match = FOLD.fullmatch(folder.name)
        if match and (folder / FINAL).is_file():
            found[match[1] if match[1] == ALL else int(match[1])] = folder / FINAL
    if not found:
        raise CheckpointError(
            f"{name} has no {fold_folder(0)}/{FINAL}, or of another fold; train it first"
        )
    if folds is None:
        numbered = sorted(fold for fold in found if isinstance(fold, int))
        return tuple(found[fold] for fold in numbered or found)
    missing = [fold for fold in folds if fold not in found]
    if missing:
        known = sorted(found, key=str)
        raise CheckpointError(
            f"{name} has no {FINAL} of fold {some(missing)}; it has {some(known)}"
        )
    return tuple(found[fold] for fold in folds)


def _unpacked_model(path: Path, folder: Path) -> Path:
    """Unpack what a prediction needs of an archive, and return the folder of its model."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [entry for entry in archive.infolist() if _is_needed(entry.filename)]
            if len(members) > MAX_MEMBERS:
                raise CheckpointError(f"{path} has {len(members):,} members; unpack it yourself")
            paths = [Path(entry.filename) for entry in members]
            models = _usual(path.parent for path in paths if path.name == PLANS)
            if not models:
                raise CheckpointError(
                    f"{path} has no {PLANS}, so it is no model of nnU-Net; name an archive that "
                    "nnUNetv2_export_model_to_zip has written"
                )
            if len(models) > 1:
                raise _several(path, [str(model) for model in models])
            wanted = [
                entry
                for entry, path in zip(members, paths, strict=True)
                if path.is_relative_to(models[0])
            ]
            _refuse_large(path, sum(entry.file_size for entry in wanted), folder)
            for entry in wanted:
                archive.extract(entry, folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} is damaged: {printable(str(error), 200)}; copy it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot unpack {path}: {reason_of(error)}") from error
    return folder / models[0]


def _is_needed(name: str) -> bool:
    parts = PurePosixPath(name).parts
    is_safe = bool(parts) and ".." not in parts and not name.startswith("/")
    return is_safe and parts[-1] in (PLANS, DATASET, FINAL)


def _refuse_large(path: Path, num_bytes: int, folder: Path) -> None:
    """Refuse what the disk cannot hold, before any of it is written."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"{path} needs {readable(num_bytes)} unpacked, and {folder} has {readable(free)}; set "
            "TMPDIR to a folder with space"
        )
