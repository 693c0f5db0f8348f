"""What the channels and labels of a data set are called, by its description or by its volumes."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.errors import DatasetError
from unet3d.volumes.header import read_header
from unet3d.volumes.nifti import read_label

logger = logging.getLogger(__name__)


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
    if isinstance(given, dict):
        by_number = {str(key): str(name) for key, name in given.items()}
        numbers = [str(number) for number in range(len(by_number))]
        if set(numbers) != by_number.keys():
            raise DatasetError(
                f"{path}: the channels are numbered {', '.join(by_number)}; use 0, 1, ..."
            )
        return tuple(by_number[number] for number in numbers)
    if given:
        return tuple(str(name) for name in (given if isinstance(given, list) else [given]))
    if not images:
        raise DatasetError(f"{path}: channel_names is empty; name each channel")
    num_channels = sum(read_header(image).num_channels for image in images)
    return tuple(f"channel {channel}" for channel in range(num_channels))


def label_names(path: Path, tree: Mapping[str, Any], label_maps: Sequence[Path]) -> dict[int, str]:
    """Return the name of each label value, in ascending order, the background first.

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
        return _labels_found_in(label_maps, path)
    if not isinstance(given, dict):
        raise DatasetError(f"{path}: labels is {given!r}; it needs names and values")
    # The Decathlon writes {"1": "tumour"}, nnU-Net {"tumour": 1}.
    by_value = all(str(key).isdigit() for key in given)
    pairs = [(value, key) if not by_value else (key, value) for key, value in given.items()]
    labels: dict[int, str] = {}
    for value, name in pairs:
        number = _label_value(path, str(name), value)
        if number in labels:
            raise DatasetError(
                f"{path}: {labels[number]} and {name} are both {number}; give each a value"
            )
        labels[number] = str(name)
    labels.setdefault(0, "background")
    if len(labels) < 2:
        raise DatasetError(
            f"{path}: labels names nothing but the background; name what is labelled"
        )
    return dict(sorted(labels.items()))


def _label_value(path: Path, name: str, value: Any) -> int:
    if name == "ignore":
        raise DatasetError(f"{path}: the label 'ignore' is not supported; give every voxel a label")
    if isinstance(value, list):
        raise DatasetError(
            f"{path}: label {name} is the region {value}; overlapping regions are not "
            "supported, give each label one value"
        )
    if isinstance(value, (bool, float)) or not str(value).isdecimal():
        raise DatasetError(
            f"{path}: label {name} has the value {value!r}; use whole numbers from 0"
        )
    return int(value)


def _labels_found_in(label_maps: Sequence[Path], path: Path) -> dict[int, str]:
    logger.warning(
        "%s names no labels: reading all %d label maps to find them; add "
        '"labels": {"background": 0, ...} to save the time',
        path,
        len(label_maps),
    )
    values = {0}
    for label_map in label_maps:
        values.update(int(value) for value in np.unique(read_label(label_map).array))
    if min(values) < 0 or len(values) < 2:
        raise DatasetError(
            f"{path}: the label maps hold the values {sorted(values)}; the background "
            "is 0 and labels are above it"
        )
    return {value: f"label {value}" if value else "background" for value in sorted(values)}
