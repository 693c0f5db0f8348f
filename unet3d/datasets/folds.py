"""Folds: which cases train and which validate, by name."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.errors import DatasetError, counted, reason_of, some
from unet3d.inputs.plain_data import printable, shown
from unet3d.inputs.reading import read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The names of the cases to train on, and of the cases to validate on."""

    train: tuple[str, ...] | None = None
    """None: all cases that do not validate."""
    validation: tuple[str, ...]


def drawn_folds(names: Sequence[str], num_folds: int, seed: int) -> tuple[Fold, ...]:
    """Draw folds in which every case is validated exactly once.

    The same seed and names give the same folds, whatever the order of the names. With fewer cases
    than folds there is a fold for each case.
    """
    names = sorted(names)
    if len(names) < 2:
        raise DatasetError(
            f"the data set has {counted(len(names), 'labelled case')}; it needs two, one to train "
            "on and one to validate on; add cases, or train without validation: --fold none"
        )
    if len(names) < num_folds:
        logger.warning(
            "only %d cases, so %d folds instead of %d", len(names), len(names), num_folds
        )
        num_folds = len(names)
    order = np.random.default_rng(seed).permutation(len(names))
    drawn = (sorted(names[index] for index in order[fold::num_folds]) for fold in range(num_folds))
    return tuple(Fold(validation=tuple(validated)) for validated in drawn)


def folds_from_numbers(number_of: Mapping[str, Any], path: Path) -> tuple[Fold, ...]:
    """Return folds, given the number of the fold in which each case validates.

    Empty if no case has a number.
    """
    given = list(number_of.values())
    if given.count(None) == len(given):
        return ()
    found: set[Any] = {number if type(number) is int else shown(number) for number in given}
    numbers = range(len(found))
    if found != {*numbers} or len(found) < 2:
        named = some(sorted(printable(str(number)) for number in found))
        raise DatasetError(
            f"{path}: the folds are {named}; give each case one of 0, 1, ... and use at least two"
        )
    validated: list[list[str]] = [[] for _ in numbers]
    for name in sorted(number_of):
        validated[number_of[name]].append(name)
    return tuple(Fold(validation=tuple(names)) for names in validated)


def read_folds(path: Path, known: Sequence[str]) -> tuple[Fold, ...]:
    """Read nnU-Net's ``splits_final.json``: a list of ``{"train": [...], "val": [...]}``."""
    tree = read_description(path)
    if not isinstance(tree, list) or not tree:
        raise DatasetError(f"{path} needs a list of folds, each with 'train' and 'val'")
    cases = set(known)
    folds = []
    for number, entry in enumerate(tree):
        where = f"{path}: fold {number}"
        lists = [entry.get(key) if isinstance(entry, dict) else None for key in ("train", "val")]
        if not all(_are_names(names) for names in lists):
            raise DatasetError(f"{where} needs names of cases under 'train' and under 'val'")
        train, validation = (
            tuple(unicodedata.normalize("NFC", name) for name in names or ()) for names in lists
        )
        counts = Counter((*train, *validation))
        unknown = sorted(counts.keys() - cases)
        if unknown:
            raise DatasetError(
                f"{where} names {printable(unknown[0])}, which is not a case of the data set; "
                f"cases are named like {known[0]}"
            )
        repeated, count = counts.most_common(1)[0]
        if count > 1:
            raise DatasetError(f"{where} names {repeated} twice; a case must be in one list only")
        folds.append(Fold(train=train, validation=validation))
    return tuple(folds)


def read_description(path: Path) -> Any:
    """Return the content of a JSON file of a data set."""
    try:
        return read_json(path)
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {reason_of(error)}") from error
    except ValueError as error:
        advice = "name the folder of a data set, or its dataset.json"
        if path.suffix.lower() == ".json":
            advice = "correct it" + ", often a comma" * isinstance(error, JSONDecodeError)
        raise DatasetError(f"{path} is not valid JSON: {error}; {advice}") from error


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and {*map(type, names)} == {str}
