"""The meaning of values in label maps: classes, regions, and the names for scores."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from unet3d.errors import VolumeError, some
from unet3d.inputs.plain_data import PLAIN, Name, at_most

BACKGROUND = 0

Mask = npt.NDArray[np.bool_]

Label = int | tuple[int, ...]
"""A label by its value, or a region by its several values in ascending order."""

MAX_LABEL_VALUE = 2**32 - 1
"""The largest value of a label: segmentations are written in uint32."""

MAX_CLASSES = 2**16
"""Most classes, the background included, because class indices are uint16."""


LabelValue = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Labels that are segmented as one; regions may overlap, as in BraTS.

    These are the regions of nnU-Net's ``dataset.json``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    name: Name
    """What it is called."""
    values: Annotated[tuple[LabelValue, ...], Field(min_length=1), at_most(2**16)]
    """The values of its labels in label maps."""
    written: LabelValue
    """Its value in segmentations, unless a later region overwrites it."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The meaning of values in label maps, of a data set or of the data of a trained network."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    label_names: Annotated[tuple[Name, ...], at_most(2**16)]
    """Name of each class; class 0 is the background."""
    label_values: Annotated[tuple[LabelValue, ...], at_most(2**16)]
    """Value of each class in segmentations; class 0 has 0."""
    raw_values: Annotated[
        tuple[Annotated[tuple[LabelValue, ...], at_most(2**16)], ...], at_most(2**16)
    ] = ()
    """Values of each class in label maps; empty: each class has only its own value."""
    ignore_value: LabelValue | None = None
    """Value of unlabelled voxels, above the value of every class; None: all are labelled. In
    prepared label maps, unlabelled voxels have the index after the last class."""
    regions: Annotated[tuple[Region, ...], at_most(2**16)] = ()
    """Regions that are segmented instead of classes, in the order of writing."""

    @property
    def class_of(self) -> dict[int, int]:
        """The class index of each value in label maps, in ascending order of the values."""
        raw = self.raw_values or [(value,) for value in self.label_values]
        ignored = [] if self.ignore_value is None else [(self.ignore_value,)]
        found = {v: index for index, values in enumerate([*raw, *ignored]) for v in values}
        return dict(sorted(found.items()))


def class_indices(
    array: npt.NDArray[np.integer[Any]], values: Sequence[int], classes: Sequence[int] = ()
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the class of each voxel.

    The class is the index of the voxel's value in ``values``; if ``classes`` are given, it is their
    entry at this index.

    A binary search in ``values``, which ascend from 0, makes time and memory independent of how
    large the values are. Classes are uint8, or uint16 if there are more than 256. A VolumeError
    names values that belong to no class.
    """
    highest = np.iinfo(array.dtype).max
    known = np.array([value for value in values if value <= highest], array.dtype)
    num_classes = max(classes, default=len(values) - 1) + 1
    table = np.array(classes or range(len(values)), np.uint8 if num_classes <= 256 else np.uint16)
    indices = np.empty(array.shape, table.dtype)
    for plane, found in zip(array, indices, strict=True):
        places = known.searchsorted(plane)
        if not np.array_equal(known.take(places, mode="clip"), plane):
            unknown = sorted({*np.unique(array).tolist()}.difference(values))
            raise VolumeError(
                f"the label map holds values that dataset.json does not name: {some(unknown)} "
                f"(it names {some(values)}); correct one of them"
            )
        found[...] = table.take(places) if classes else places
    return indices


@dataclass(frozen=True, kw_only=True)
class ScoredLabels:
    """The labels and regions to score."""

    names: Mapping[Label, str] = field(default_factory=dict)
    """Names of labels and regions; any other value is scored without a name."""
    ignore: int | None = None
    """Value of voxels that are not scored; None: all are scored."""
    left_out: frozenset[int] = frozenset()
    """Values in label maps that count as background."""

    @classmethod
    def of(cls, labels: Labels) -> "ScoredLabels":
        """Return the labels to score of a data set or network: its regions, or its labels."""
        left_out, *values = labels.raw_values or [(), *((v,) for v in labels.label_values[1:])]
        names = dict(zip(map(label_of, values), labels.label_names[1:], strict=True))
        if labels.regions:
            names = {label_of(region.values): region.name for region in labels.regions}
        return cls(names=names, ignore=labels.ignore_value, left_out=frozenset(left_out))

    def among(self, values: Iterable[int]) -> list[Label]:
        """Return the labels and regions to score in label maps with some values.

        Named labels and regions come first, in the order of their names, then unnamed values,
        ascending.
        """
        there = set(values) - {BACKGROUND, self.ignore} - self.left_out
        named = [label for label in self.names if not there.isdisjoint(values_of(label))]
        known = {value for label in self.names for value in values_of(label)}
        return [*named, *sorted(there - known)]

    def name_of(self, label: Label) -> str:
        """Return the name of a label, or else its values."""
        return self.names.get(label, key_of(label))


EVERY_VALUE = ScoredLabels()
"""Every value but the background, without names."""


def label_of(values: Iterable[int]) -> Label:
    """Return the label or region with some values, at least one."""
    first, *more = sorted(set(values))
    return (first, *more) if more else first


def values_of(label: Label) -> tuple[int, ...]:
    """Return the values of a label or region."""
    return label if isinstance(label, tuple) else (label,)


def key_of(label: Label) -> str:
    """Return the values of a label or region as text, separated by commas."""
    return ",".join(map(str, values_of(label)))


def mask_of(array: npt.NDArray[np.integer[Any]], label: Label) -> Mask:
    """Return where a label or region is in an array of label values, of any shape."""
    mask: Mask = np.isin(array, label) if isinstance(label, tuple) else array == label
    return mask


def box_of(mask: Mask) -> tuple[slice, ...]:
    """Return the smallest box around a mask, which must not be empty."""
    box = []
    for axis in range(mask.ndim):
        others = tuple(other for other in range(mask.ndim) if other != axis)
        (filled,) = np.nonzero(mask.any(axis=others))
        box.append(slice(int(filled[0]), int(filled[-1]) + 1))
    return tuple(box)
