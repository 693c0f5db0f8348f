"""What the channels and labels of a data set are called, by its description or by its volumes.

Names become keys of metrics and statistics, titles of curves and lines of a terminal. So they are
short text without control characters, and no two labels have one name.
"""

import logging
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.datasets.classes import MAX_CLASSES, MAX_LABEL_VALUE, Region
from unet3d.errors import DatasetError, some
from unet3d.images.header import read_header
from unet3d.images.nifti import read_label
from unet3d.inputs.plain_data import is_printable, printable, shown

logger = logging.getLogger(__name__)

MAX_CHANNELS = 1000
"""Many more than the sequences of any scan: a time series is not meant as channels."""

MAX_NAME_LETTERS = 200

IGNORE = "ignore"
"""Name of the label of voxels that nobody has labelled, as nnU-Net has it."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What the values in the label maps of a data set mean."""

    names: dict[int, str]
    """Name of each class by its value, in ascending order, the background first."""
    ignore_value: int | None = None
    """Value of voxels that nobody has labelled, the highest of all; None: every voxel is."""
    regions: tuple[Region, ...] = ()
    """What is segmented instead of classes; none: the classes."""


def channel_names(path: Path, tree: Mapping[str, Any], images: Sequence[Path]) -> tuple[str, ...]:
    """Return the name of each channel.

    Args:
        path: The description, for messages.
        tree: What it holds.
        images: Files of one case, whose channels are counted where the description names none.

    Raises:
        DatasetError: The description names no channels, or does not number them 0, 1, ...
        VolumeError: A header cannot be read.
    """
    given = tree.get("channel_names") or tree.get("modality")
    if not given:
        if not images:
            raise DatasetError(f"{path}: channel_names is empty; name each channel")
        num_channels = sum(read_header(image).num_channels for image in images)
        _refuse_many(path, num_channels)
        return tuple(f"channel {channel}" for channel in range(num_channels))
    names = given if isinstance(given, (list, dict)) else [given]
    _refuse_many(path, len(names))
    if isinstance(names, dict):
        numbers = [str(number) for number in range(len(names))]
        if set(numbers) != names.keys():
            keys = some([printable(key) for key in names])
            raise DatasetError(f"{path}: the channels are numbered {keys}; use 0, 1, ...")
        names = [names[number] for number in numbers]
    return tuple(clean_name(path, f"channel {number}", name) for number, name in enumerate(names))


def read_labels(path: Path, tree: Mapping[str, Any], label_maps: Sequence[Path]) -> Labels:
    """Return what the values in the label maps mean.

    Args:
        path: The description, for messages.
        tree: What it holds.
        label_maps: Files that are searched for values where the description names none.

    Raises:
        DatasetError: The names cannot be understood, or there is nothing but background.
        VolumeError: A label map cannot be read.
    """
    given = tree.get("labels")
    if given is None:
        return Labels(names=_labels_found_in(label_maps, path))
    if not isinstance(given, dict):
        raise DatasetError(f"{path}: labels is {shown(given)}; it needs names and values")
    if any(isinstance(value, list) for value in given.values()):
        return _labels_in_regions(path, given, tree.get("regions_class_order"))
    # The Decathlon writes {"1": "tumour"}, nnU-Net {"tumour": 1}.
    by_value = all(key.isdecimal() for key in given)
    labels: dict[int, str] = {}
    for key, other in given.items():
        text, value = (other, key) if by_value else (key, other)
        name = clean_name(path, f"label {printable(str(value))}" if by_value else "a label", text)
        number = _label_value(path, name, value)
        if number in labels:
            raise DatasetError(
                f"{path}: {labels[number]} and {name} are both {number}; give each a value"
            )
        labels[number] = name
    labels.setdefault(0, "background")
    value_of: dict[str, int] = {}
    for value, name in labels.items():
        if value_of.setdefault(name, value) != value:
            raise DatasetError(
                f"{path}: the labels {value_of[name]} and {value} are both called {name}; give "
                "each a name"
            )
    ignore_value = value_of.get(IGNORE)
    if ignore_value is not None:
        del labels[ignore_value]
    return _checked(path, Labels(names=dict(sorted(labels.items())), ignore_value=ignore_value))


def _checked(path: Path, labels: Labels) -> Labels:
    """Refuse what cannot be trained on."""
    names, ignored = labels.names, labels.ignore_value
    if len(names) < 2:
        raise DatasetError(
            f"{path}: labels names nothing but the background; name what is labelled"
        )
    if ignored is not None and ignored <= max(names):
        raise DatasetError(
            f"{path}: the label {IGNORE} is {ignored}, but {names[max(names)]} is {max(names)}; "
            f"give {IGNORE} the highest value"
        )
    if len(names) > MAX_CLASSES:
        raise DatasetError(f"{path} names {len(names)} labels; use at most {MAX_CLASSES}")
    return labels


def _labels_in_regions(path: Path, given: Mapping[str, Any], order: Any) -> Labels:
    """Read labels as nnU-Net names regions: each a value or a list of them, which may overlap."""
    values_of: dict[str, tuple[int, ...]] = {}
    for key, value in given.items():
        name = clean_name(path, "a label", key)
        if name in values_of:
            raise DatasetError(f"{path}: two labels are both called {name}; give each a name")
        values = value if isinstance(value, list) else [value]
        numbers = tuple(sorted({_label_value(path, name, one) for one in values}))
        if not numbers or (0 in numbers and len(numbers) > 1):
            raise DatasetError(
                f"{path}: region {name} is {shown(value)}; a region is made of labels above 0"
            )
        values_of[name] = numbers
    ignored = values_of.pop(IGNORE, None)
    if ignored is not None and len(ignored) > 1:
        raise DatasetError(
            f"{path}: the label {IGNORE} is {shown(given[IGNORE])}; give it one value"
        )
    background = [name for name, values in values_of.items() if values == (0,)]
    regions = {name: values for name, values in values_of.items() if values != (0,)}
    written = order if isinstance(order, list) else []
    known = {value for values in regions.values() for value in values}
    if len(written) != len(regions) or not all(type(v) is int and v in known for v in written):
        raise DatasetError(
            f"{path}: regions_class_order is {shown(order)}; name the value that is written for "
            f"each of the {len(regions)} regions ({some(list(regions))}), in their order"
        )
    if len(set(regions.values())) < len(regions):
        raise DatasetError(f"{path}: two regions are made of the same labels; name one of them")
    single = {values[0]: name for name, values in regions.items() if len(values) == 1}
    names = {0: background[0] if background else "background"}
    names |= {value: single.get(value, f"label {value}") for value in sorted(known)}
    return _checked(
        path,
        Labels(
            names=names,
            ignore_value=None if ignored is None else ignored[0],
            regions=tuple(
                Region(name=name, values=values, written=value)
                for (name, values), value in zip(regions.items(), written, strict=True)
            ),
        ),
    )


def clean_name(path: Path, what: str, text: Any) -> str:
    """Return a name that can be shown, in Unicode's composed form.

    Args:
        path: The description, for messages.
        what: What has the name.
        text: The name as the description has it.

    Raises:
        DatasetError: It is no text, empty, too long, or has control characters.
    """
    name = unicodedata.normalize("NFC", text).strip() if isinstance(text, str) else ""
    if not name or len(name) > MAX_NAME_LETTERS or not is_printable(name):
        raise DatasetError(
            f"{path}: {what} is called {shown(text)}; a name is text of 1 to {MAX_NAME_LETTERS} "
            "characters, none of them a control character"
        )
    return name


def _refuse_many(path: Path, num_channels: int) -> None:
    if num_channels > MAX_CHANNELS:
        raise DatasetError(
            f"{path}: a case has {num_channels} channels; use at most {MAX_CHANNELS}"
        )


def _label_value(path: Path, name: str, value: Any) -> int:
    digits = str(value) if type(value) in (int, str) else ""
    if not digits.isdecimal():
        raise DatasetError(
            f"{path}: label {name} has the value {shown(value)}; use whole numbers from 0"
        )
    if len(digits) > len(str(MAX_LABEL_VALUE)) or int(digits) > MAX_LABEL_VALUE:
        raise DatasetError(
            f"{path}: label {name} has the value {printable(digits)}; segmentations hold values up "
            f"to {MAX_LABEL_VALUE}"
        )
    return int(digits)


def _labels_found_in(label_maps: Sequence[Path], path: Path) -> dict[int, str]:
    logger.warning(
        "%s names no labels: reading all %d label maps to find them; add "
        '"labels": {"background": 0, ...} to save the time',
        path,
        len(label_maps),
    )
    found: set[int] = {0}
    for label_map in filter(os.path.lexists, label_maps):  # others are no reason to stop
        values = np.unique(read_label(label_map).array)
        if len(values) > MAX_CLASSES:
            raise DatasetError(
                f"{label_map} holds {len(values)} different values; is it an image? name label maps"
            )
        found.update(values.tolist())
    labels = sorted(found)
    if labels[0] < 0 or not 2 <= len(labels) <= MAX_CLASSES or labels[-1] > MAX_LABEL_VALUE:
        raise DatasetError(
            f"{path}: the label maps hold {len(labels)} values, {some(labels)}; the background "
            f"is 0, labels are above it, up to {MAX_LABEL_VALUE}, and {MAX_CLASSES} at most"
        )
    return {value: f"label {value}" if value else "background" for value in labels}


SIDES = (("left", "right"), ("l", "r"), ("lt", "rt"), ("lh", "rh"))
"""How names tell left from right; the short ones only where both sides are labelled."""


def has_sides(names: Sequence[str]) -> bool:
    """Return whether labels are told by their names to be on the left or on the right.

    Args:
        names: Of the labels: ``left ventricle``, ``LungLeft``; or a pair such as ``kidney_l`` and
            ``kidney_r``, ``lungleft`` and ``lungright``.
    """
    known = {tuple(_words(name)) for name in names}
    for words in known:
        if any(word.startswith(SIDES[0]) for word in words):
            return True
        left_ends = tuple(re.sub(f"{SIDES[0][0]}$", SIDES[0][1], word) for word in words)
        pairs = [tuple(r if word == left else word for word in words) for left, r in SIDES[1:]]
        if any(other != words and other in known for other in (left_ends, *pairs)):
            return True
    return False


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case: ``LungLeft_2`` is lung, left and 2."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return [part.lower() for part in parts]
