"""Folds: which cases train and which validate, by name."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.errors import DatasetError, reason_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The names of the cases to train on, and of those to validate on."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


def drawn_folds(names: Sequence[str], num_folds: int, seed: int) -> tuple[Fold, ...]:
    """Draw folds in which every case is validated exactly once.

    Args:
        names: The cases.
        num_folds: Number of folds; with fewer cases than that, one fold for each case.
        seed: The same seed and names give the same folds, whatever the order of the names.

    Raises:
        DatasetError: There are fewer than two cases.
    """
    names = sorted(names)
    if len(names) < 2:
        raise DatasetError(
            f"the data set has {len(names)} labelled case(s); it needs at least two, one to train "
            "on and one to validate on"
        )
    if len(names) < num_folds:
        logger.warning("only %d cases, so %d folds, not %d", len(names), len(names), num_folds)
        num_folds = len(names)
    order = np.random.default_rng(seed).permutation(len(names))
    return folds_from_numbers(
        {names[index]: place % num_folds for place, index in enumerate(order)}, "the drawn folds"
    )


def folds_from_numbers(number_of: Mapping[str, int], source: str) -> tuple[Fold, ...]:
    """Return the folds of cases, each of which has the number of the fold that validates it.

    Args:
        number_of: The fold number of each case.
        source: Where the numbers come from, for messages.

    Raises:
        DatasetError: The numbers do not count 0, 1, ..., or there is only one.
    """
    numbers = sorted(set(number_of.values()))
    if numbers != list(range(len(numbers))) or len(numbers) < 2:
        raise DatasetError(
            f"{source}: the folds are {', '.join(map(str, numbers))}; number them 0, 1, ... and "
            "use at least two"
        )
    names = sorted(number_of)
    return tuple(
        Fold(
            train=tuple(name for name in names if number_of[name] != number),
            validation=tuple(name for name in names if number_of[name] == number),
        )
        for number in numbers
    )


def read_folds(path: Path, known: Sequence[str]) -> tuple[Fold, ...]:
    """Read nnU-Net's ``splits_final.json``: a list of ``{"train": [...], "val": [...]}``.

    Args:
        path: The file.
        known: Every case of the data set.

    Raises:
        DatasetError: The file is something else, or a fold names an unknown case or one twice.
    """
    tree = read_json(path)
    if not isinstance(tree, list) or not tree:
        raise DatasetError(f"{path} needs a list of folds, each with 'train' and 'val'")
    folds = []
    for number, entry in enumerate(tree):
        lists = [entry.get(key) if isinstance(entry, dict) else None for key in ("train", "val")]
        if not all(isinstance(names, list) and names for names in lists):
            raise DatasetError(f"{path}: fold {number} needs cases under 'train' and under 'val'")
        train, validation = (tuple(map(str, names or ())) for names in lists)
        unknown = sorted({*train, *validation} - set(known))
        if unknown:
            raise DatasetError(
                f"{path}: fold {number} names {unknown[0]}, which is no case of the data set; "
                f"cases are named like {known[0]}"
            )
        everything = [*train, *validation]
        if len(set(everything)) < len(everything):
            repeated = next(name for name in everything if everything.count(name) > 1)
            raise DatasetError(
                f"{path}: fold {number} names {repeated} twice; a case is in one list"
            )
        folds.append(Fold(train=train, validation=validation))
    return tuple(folds)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        DatasetError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path} is not a data set; name its folder, or its dataset.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not valid JSON: {error}") from error
