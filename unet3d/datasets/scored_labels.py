"""What is scored in label maps: labels and regions by name, and the value that counts nowhere."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.datasets.classes import Labels

BACKGROUND = 0

Mask = npt.NDArray[np.bool_]

Label = int | tuple[int, ...]
"""A label by its value, or a region by its values in ascending order, of which it has several."""


@dataclass(frozen=True, kw_only=True)
class ScoredLabels:
    """What is scored."""

    names: Mapping[Label, str] = field(default_factory=dict)
    """Names of labels and regions; values of no label and no region here are scored without."""
    ignore: int | None = None
    """Value of the label maps whose voxels count nowhere; None: all of them count."""
    left_out: frozenset[int] = frozenset()
    """Values of the label maps that are background."""

    @classmethod
    def of(cls, labels: Labels) -> "ScoredLabels":
        """Return what is scored of a data set, or of a network: its regions, or its labels."""
        left_out, *values = labels.raw_values or [(), *((v,) for v in labels.label_values[1:])]
        names = dict(zip(map(label_of, values), labels.label_names[1:], strict=True))
        if labels.regions:
            names = {label_of(region.values): region.name for region in labels.regions}
        return cls(names=names, ignore=labels.ignore_value, left_out=frozenset(left_out))

    def among(self, values: Iterable[int]) -> list[Label]:
        """Return what is scored in label maps that hold some values.

        These are named labels and regions, in the order of their names, then values of none of
        them, ascending.
        """
        there = set(values) - {BACKGROUND, self.ignore} - self.left_out
        named = [label for label in self.names if not there.isdisjoint(values_of(label))]
        known = {value for label in self.names for value in values_of(label)}
        return [*named, *sorted(there - known)]


EVERY_VALUE = ScoredLabels()
"""Every value but the background, without names."""


def label_of(values: Iterable[int]) -> Label:
    """Return the label or region of some values, of which there is at least one."""
    first, *more = sorted(set(values))
    return (first, *more) if more else first


def values_of(label: Label) -> tuple[int, ...]:
    """Return the values of a label or region."""
    return label if isinstance(label, tuple) else (label,)


def mask_of(array: npt.NDArray[np.integer[Any]], label: Label) -> Mask:
    """Return where a label or region is, for label values of any shape."""
    mask: Mask = np.isin(array, label) if isinstance(label, tuple) else array == label
    return mask


def box_of(mask: Mask) -> tuple[slice, ...]:
    """Return the smallest box around a mask, which is not empty."""
    box = []
    for axis in range(mask.ndim):
        others = tuple(other for other in range(mask.ndim) if other != axis)
        (filled,) = np.nonzero(mask.any(axis=others))
        box.append(slice(int(filled[0]), int(filled[-1]) + 1))
    return tuple(box)
