"""Finding the checkpoints that a path stands for, of unet3d or of nnU-Net's models.

A model of nnU-Net is a folder of its results::

    nnUNetTrainer__nnUNetPlans__3d_fullres/
        plans.json  dataset.json
        fold_0/checkpoint_final.pth     fold_1/...     or fold_all/...

or an archive of such folders, which ``nnUNetv2_export_model_to_zip`` writes. From an archive, the
files named above are unpacked to a temporary folder, whose link ``archive`` tells all ranks the
archive's path::

    TEMPORARY/.unfinished-1a2b3c4d-unet3d-archive/
        archive -> weights/Task.zip
        files/nnUNetTrainer__nnUNetPlans__3d_fullres/fold_0/checkpoint_final.pth
"""

import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

from unet3d.atomic import temporary_folder
from unet3d.errors import CheckpointError, reason_of, some
from unet3d.inputs.plain_data import is_printable, printable
from unet3d.inputs.reading import open_regular
from unet3d.memory.host import readable
from unet3d.runs.finding import checkpoints_in, only_one
from unet3d.runs.run_folder import RunFolder

PLANS = "plans.json"
DATASET = "dataset.json"

SUFFIX = ".pth"
"""Suffix of nnU-Net's checkpoints; unet3d's checkpoints have another."""

FINAL = f"checkpoint_final{SUFFIX}"
"""The checkpoint that nnU-Net writes at the end of training, and predicts with."""

ALL = "all"
"""The fold that is trained on every case."""

UNPACKED = "unet3d-archive"
"""End of the name of a folder that an archive is unpacked to."""

MAX_GROWTH = 20
"""Largest ratio of an archive's unpacked size to its own. Weights are hardly compressible; zeros
shrink a thousandfold, and a small archive of them would fill a disk."""

Folds = Sequence[int] | None
"""Numbers of folds; None: all numbered folds or, if there are none, the fold trained on every
case."""


def networks_in(
    path: Path, folds: Folds = None, stack: ExitStack | None = None
) -> tuple[Path, ...]:
    """Return the checkpoint files that a path stands for.

    ``path`` may be anything that :func:`~unet3d.runs.finding.checkpoints_in` takes; a model of
    nnU-Net, a folder with a single model, the folder of a fold or a checkpoint in it; or an archive
    of a model, or one of these within an archive. The unpacked files of an archive exist until
    ``stack`` is closed; without a stack archives are refused.
    """
    archive = next((one for one in (path, *path.parents) if _is_archive(one)), None)
    if archive is not None:
        if stack is None:
            raise CheckpointError(f"{archive} is an archive; unpack it, and name its folder")
        path = _unpacked(archive, stack) / path.relative_to(archive)
    model = _model_in(path, "*__*__*" if archive is None else "**")
    if model is not None:
        return _chosen(_final_ones(model, "fold*/"), folds, model)
    if fold_named(path.name) is not None and any(path.glob(f"*{SUFFIX}")):
        return _chosen(_final_ones(path, ""), folds, path)
    if archive is not None and not path.is_file():
        raise CheckpointError(
            f"{known_as(path)} has no {PLANS}, so it is not a model of nnU-Net; name an archive "
            "from nnUNetv2_export_model_to_zip, or its content"
        )
    files = checkpoints_in(path)
    if folds is None or not path.exists():  # a missing file is reported when it is read
        return files
    by_fold = {ALL if (fold := fold_of(file)) is None else fold: file for file in files}
    return _chosen(by_fold, folds, path)


def network_in(path: Path) -> Path:
    """Return the only checkpoint that a path stands for, of unet3d or of nnU-Net."""
    return only_one(path, networks_in(path))


def known_as(path: Path) -> Path:
    """Return the path by which a user knows a checkpoint; for an archive, the path in it."""
    for folder in path.parents:
        if folder.name.endswith(UNPACKED) and (folder / "archive").is_symlink():
            return Path(os.readlink(folder / "archive"), path.relative_to(folder / "files"))
    return path


def fold_named(name: str) -> int | str | None:
    """Return the fold in a name such as ``fold_0`` or ``fold0``; None: the name has none."""
    match = re.fullmatch(f"fold_?([0-9]{{1,4}}|{ALL})", name)
    if match is None:
        return None
    return ALL if match[1] == ALL else int(match[1])


def fold_of(file: Path) -> int | str | None:
    """Return the fold of a checkpoint: recorded by its run, or in its own or its folder's name.

    None: unknown.
    """
    folder = file.absolute().parent
    recorded = (RunFolder(folder).read_data() or {}).get("fold")
    if recorded is not None:
        return recorded if isinstance(recorded, int) else ALL
    by_name = fold_named(file.stem)
    return fold_named(folder.name) if by_name is None else by_name


def _chosen(known: Mapping[Any, Path], folds: Folds, path: Path) -> tuple[Path, ...]:
    """Return the checkpoints of chosen folds among the known ones; ``path`` is for messages."""
    if folds is None:
        folds = sorted(fold for fold in known if isinstance(fold, int))
        return tuple(known[fold] for fold in folds or known)
    missing = [fold for fold in folds if fold not in known]
    if missing:
        has = some(sorted(known, key=str))
        raise CheckpointError(f"{known_as(path)} has no fold {some(missing)}; it has {has}")
    return tuple(known[fold] for fold in folds)


def _model_in(path: Path, pattern: str) -> Path | None:
    """Return a folder if it is a model, or else the only model in it.

    Models in 2-D and second stages of cascades count only if there is no other model.
    """
    if (path / PLANS).is_file():
        return path
    models = sorted(plans.parent for plans in path.glob(f"{pattern}/{PLANS}"))
    usual = [one for one in models if not one.name.endswith(("__2d", "cascade_fullres"))] or models
    if len(usual) > 1:
        several = some([known_as(model) for model in usual])
        raise CheckpointError(f"{known_as(path)} has several models: {several}; name one of them")
    return usual[0] if usual else None


def _final_ones(path: Path, folders: str) -> dict[int | str | None, Path]:
    """Return the final checkpoints by fold: of a whole model, or of one fold's folder."""
    found = {fold_named(file.parent.name): file for file in path.glob(f"{folders}{FINAL}")}
    found.pop(None, None)
    if not found:
        others = sorted(known_as(file) for file in path.glob(f"{folders}*{SUFFIX}"))
        instead = f"name what it has: {some(others)}" if others else "train it first"
        raise CheckpointError(f"there is no {FINAL} in {known_as(path)}; {instead}")
    return found


def _is_archive(path: Path) -> bool:
    return path.suffix.lower() == ".zip" and path.is_file()


def _unpacked(path: Path, stack: ExitStack) -> Path:
    """Unpack the files of models to a temporary folder, which the stack removes; return it."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = [
                member
                for member in archive.infolist()
                if is_printable(member.filename)
                and PurePosixPath(member.filename).suffix in (".json", SUFFIX)
            ]
            size, needed = path.stat().st_size, sum(member.file_size for member in members)
            if needed > MAX_GROWTH * size:
                raise CheckpointError(
                    f"{path} has {readable(size)}, and {readable(needed)} unpacked, which is "
                    "implausible for weights; if that is right, unpack it yourself and name its "
                    "folder"
                )
            folder = stack.enter_context(temporary_folder(UNPACKED))
            (folder / "archive").symlink_to(path)
            archive.extractall(folder / "files", members)  # no name leads out of the folder
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot unpack {path}: {reason_of(error)}; TMPDIR may name a folder with more space"
        ) from error
    except Exception as error:  # a damaged file leads to many errors, few of them documented
        reason = printable(str(error), 200) or type(error).__name__
        raise CheckpointError(f"{path} is damaged: {reason}; copy it again") from error
    return folder / "files"
