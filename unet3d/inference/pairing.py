"""Pairs of segmentations and label maps, by name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet3d.errors import DatasetError, reason_of
from unet3d.images.files import (
    is_collection,
    is_picture,
    is_there,
    is_volume_file,
    is_volume_folder,
    stands_for_volume,
    volume_stem,
)
from unet3d.images.image import open_source
from unet3d.images.source import AS_STATED, Reading


@dataclass(frozen=True, kw_only=True)
class FoundPairs:
    """The pairs to compare, and the files without a partner."""

    pairs: Sequence[tuple[Path, Path]]
    """Segmentations, each with its label map."""
    without_prediction: tuple[str, ...] = ()
    """Names of label maps without a segmentation."""
    without_label: tuple[str, ...] = ()
    """Names of segmentations without a label map."""


def find_pairs(
    predictions: Path, labels: Path, leave_out: bool = False, reading: Reading = AS_STATED
) -> FoundPairs:
    """Pair two files, or the files of folders by their names."""
    for path, of_path in ((predictions, reading), (labels, reading.near(None))):
        if not is_there(path):
            raise DatasetError(f"there is no file or folder {path}; name a label map or a folder")
        if not _is_list(path):
            open_source(path, of_path)
    if not _is_list(predictions) and not _is_list(labels):
        return FoundPairs(pairs=[(predictions, labels)])
    label_of = _by_stem(labels)
    prediction_of: dict[str, Path] = {}  # by the stem of the label map
    unknown = []
    for stem, prediction in _by_stem(predictions).items():
        partner = next((name for name in _label_stems(stem) if name in label_of), None)
        if partner is None:
            unknown.append(prediction)
            continue
        if partner in prediction_of:
            raise DatasetError(
                f"{prediction_of[partner]} and {prediction} both belong to {label_of[partner]}; "
                "keep one of them"
            )
        prediction_of[partner] = prediction
    if unknown and not (leave_out and prediction_of):
        more = f", nor have {len(unknown) - 1} more segmentations" if len(unknown) > 1 else ""
        advice = ", or leave them out with --leave-out" if prediction_of else ""
        raise DatasetError(
            f"{unknown[0]} has no label map in {labels}, looked for "
            f"{' and '.join(_label_stems(volume_stem(unknown[0])))}{more}; give each "
            f"segmentation the name of its label map, and move others elsewhere{advice}"
        )
    # A user who names one segmentation asks only for that one.
    without = sorted(label_of.keys() - prediction_of.keys()) if _is_list(predictions) else []
    return FoundPairs(
        pairs=[(prediction_of[stem], label_of[stem]) for stem in sorted(prediction_of)],
        without_prediction=tuple(without),
        without_label=tuple(map(volume_stem, unknown)),
    )


def _is_list(path: Path) -> bool:
    """Return whether a path is a folder of volumes, not of the slices of one."""
    return is_collection(path) and not is_volume_folder(path)


def _is_volume(path: Path) -> bool:
    is_file = stands_for_volume(path) and not is_picture(path)
    return is_file or is_volume_folder(path)


def _by_stem(path: Path) -> dict[str, Path]:
    try:
        files = sorted(filter(_is_volume, path.iterdir())) if _is_list(path) else [path]
    except OSError as error:
        raise DatasetError(f"cannot list {path}: {reason_of(error)}") from error
    found: dict[str, Path] = {}
    for file in files:
        if file.name.startswith(".") or not (is_volume_file(file) or is_volume_folder(file)):
            continue
        stem = volume_stem(file)
        if stem in found:
            raise DatasetError(f"{found[stem]} and {file} have the same name; keep one of them")
        found[stem] = file
    if not found:
        inner = path / "labelsTr"
        name = inner if inner.is_dir() else "the folder of the files"
        raise DatasetError(f"{path} holds no volume to compare; name {name}")
    return found


def _label_stems(prediction_stem: str) -> list[str]:
    """Return the names that the label map of a segmentation may have, the likeliest first."""
    image = prediction_stem.removesuffix("_seg")
    return list(dict.fromkeys([prediction_stem, image, re.sub(r"_\d{4}$", "", image)]))
