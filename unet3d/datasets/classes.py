"""What the values in label maps mean, and from these values to the indices of classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from unet3d.errors import VolumeError, some
from unet3d.inputs.plain_data import PLAIN, Name, at_most

MAX_LABEL_VALUE = 2**32 - 1
"""The largest value of a label: what predictions are written with, uint32, holds no larger one."""

MAX_CLASSES = 2**16
"""As many as uint16 can tell apart, the background included."""


LabelValue = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Labels that are segmented as one, also where they are in other regions too, as in BraTS.

    These are the regions of nnU-Net's ``dataset.json``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    name: Name
    """What it is called."""
    values: Annotated[tuple[LabelValue, ...], Field(min_length=1), at_most(2**16)]
    """The values in label maps that it is made of."""
    written: LabelValue
    """The value that a segmentation has in it, unless a later region writes over it."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What the values in the label maps of a data set mean, or meant in a training."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    label_names: Annotated[tuple[Name, ...], at_most(2**16)]
    """Name of each class; class 0 is the background."""
    label_values: Annotated[tuple[LabelValue, ...], at_most(2**16)]
    """Value of each class in segmentations; that of class 0 is 0."""
    raw_values: Annotated[
        tuple[Annotated[tuple[LabelValue, ...], at_most(2**16)], ...], at_most(2**16)
    ] = ()
    """Values in label maps that each class is made of; none: each of its own value alone."""
    ignore_value: LabelValue | None = None
    """Value of voxels that nobody has labelled, above that of every class; None: there is none. In
    prepared label maps they have the index after the last class."""
    regions: Annotated[tuple[Region, ...], at_most(2**16)] = ()
    """What is segmented instead of the classes, in the order in which it is written."""

    @property
    def class_of(self) -> dict[int, int]:
        """The index in prepared label maps of each value that label maps may hold, ascending."""
        raw = self.raw_values or [(value,) for value in self.label_values]
        ignored = [] if self.ignore_value is None else [(self.ignore_value,)]
        found = {v: index for index, values in enumerate([*raw, *ignored]) for v in values}
        return dict(sorted(found.items()))


def class_indices(
    array: npt.NDArray[np.integer[Any]], values: Sequence[int], classes: Sequence[int] = ()
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the class of each voxel: the place of its value in a list, or the class given there.

    Values, ascending from 0, are searched for plane by plane, so time and memory do not depend on
    how large they are. Classes are uint8, or uint16 where there are more than 256. A VolumeError
    names a value that belongs to no class.
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
                f"the label map holds the value(s) {some(unknown)}, which dataset.json does not "
                f"name (it names {some(values)}); correct one of them"
            )
        found[...] = table.take(places) if classes else places
    return indices
