"""Preparation of one image or label map: crop, normalise, resample; and the way back for logits.

A :class:`Preprocessing` says how. Training keeps it with the network, so that prediction prepares
an image exactly as training did.
"""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, Field, model_validator

from unet3d.config import Spacing
from unet3d.datasets.classes import LabelValue, Region, class_indices
from unet3d.images.image import Image
from unet3d.images.memory_limits import explaining_memory
from unet3d.inputs.plain_data import PLAIN, Name, at_most
from unet3d.kernels import strongest_class, written_regions
from unet3d.preparation.cropping import Box, nonzero_box, whole_box
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.plane_resampling import resample_classes
from unet3d.preparation.resample import (
    Interpolation,
    affordable_shape,
    grid_shape,
)

CLASS_ARRAYS = 2
"""What resampling keeps of a label map: the strongest class of each voxel, and how strong it is."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Everything that is needed to prepare an image at prediction as in training."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    spacing_mm: Spacing | None
    """Target spacing; None: each image's own."""
    channels: Annotated[tuple[ChannelNormalization, ...], at_most(2**14)]
    channel_names: Annotated[tuple[Name, ...], at_most(2**14)]
    label_names: Annotated[tuple[Name, ...], at_most(2**16)]
    label_values: Annotated[tuple[LabelValue, ...], at_most(2**16)]
    raw_values: Annotated[
        tuple[Annotated[tuple[LabelValue, ...], at_most(2**16)], ...], at_most(2**16)
    ] = ()
    """Values in label maps that each class is made of; none: each of its own value alone."""
    ignore_value: LabelValue | None = None
    """Value of voxels that nobody has labelled; None: there is none. In prepared label maps they
    have the index after the last class."""
    crops_to_nonzero: Annotated[bool, Field(strict=True)] = False
    """Whether the image is cut to the box of its voxels that are not zero in every channel."""
    regions: Annotated[tuple[Region, ...], at_most(2**16)] = ()
    """What the network segments instead of classes, in the order in which it is written."""
    orientation: Literal["ras", "stored"] = "ras"
    """Axes of the arrays: to the right, to the front and up, or those of the file."""
    interpolation: Interpolation = Interpolation()
    """How images come to the target spacing, and logits back."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, for a checkpoint or JSON."""
        return {
            "spacing_mm": None if self.spacing_mm is None else list(self.spacing_mm),
            "channels": [asdict(channel) for channel in self.channels],
            "channel_names": list(self.channel_names),
            "label_names": list(self.label_names),
            "label_values": list(self.label_values),
            "raw_values": [list(values) for values in self.raw_values],
            "ignore_value": self.ignore_value,
            "crops_to_nonzero": self.crops_to_nonzero,
            "regions": [asdict(region) for region in self.regions],
            "orientation": self.orientation,
            "interpolation": asdict(self.interpolation),
        }

    def without_least_std(self) -> Self:
        """Return the plan with no least deviation: two that differ in nothing else go together.

        No image has so small a deviation but one of nearly one intensity, or of a unit that is far
        too large.
        """
        channels = tuple(replace(channel, least_std=0.0) for channel in self.channels)
        return replace(self, channels=channels)

    @property
    def num_outputs(self) -> int:
        """How many logits a voxel has: of each region, or of each class."""
        return len(self.regions) or len(self.label_values)

    @property
    def region_classes(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the classes that each region is made of."""
        index_of = {value: index for index, value in enumerate(self.label_values)}
        return tuple(tuple(index_of[value] for value in one.values) for one in self.regions)

    @property
    def scored(self) -> dict[str, tuple[int, ...]]:
        """What segmentations are compared in, by name: each region, or each class but background.

        The values are indices of classes.
        """
        if self.regions:
            names = [region.name for region in self.regions]
            return dict(zip(names, self.region_classes, strict=True))
        return {name: (index,) for index, name in enumerate(self.label_names) if index}

    @property
    def class_of(self) -> dict[int, int]:
        """The index in prepared label maps of each value that label maps may hold, ascending."""
        raw = self.raw_values or [(value,) for value in self.label_values]
        ignored = [] if self.ignore_value is None else [(self.ignore_value,)]
        found = {v: index for index, values in enumerate([*raw, *ignored]) for v in values}
        return dict(sorted(found.items()))

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        """Refuse what a file says of channels and labels that do not belong together."""
        if not len(self.channels) == len(self.channel_names) > 0:
            raise ValueError(
                f"has {len(self.channels)} channels but {len(self.channel_names)} names of channels"
            )
        if not len(self.label_names) == len(set(self.label_values)) == len(self.label_values) > 0:
            raise ValueError(
                f"has {len(self.label_names)} names of labels but {len(set(self.label_values))} "
                "different values"
            )
        raw = [value for values in self.raw_values for value in values]
        if self.raw_values and (
            self.regions
            or len(set(raw)) < len(raw)
            or len(self.raw_values) != len(self.label_values)
            or any(
                one not in of for one, of in zip(self.label_values, self.raw_values, strict=True)
            )
        ):
            raise ValueError("has labels that are not made of values of their own")
        if self.ignore_value is not None and self.ignore_value <= max(self.label_values):
            raise ValueError(f"ignores the label {self.ignore_value}, which is not the highest one")
        if self.regions:
            in_regions = {value for region in self.regions for value in region.values}
            written = {region.written for region in self.regions}
            if in_regions != {*self.label_values} - {0} or not written <= in_regions:
                raise ValueError("has regions that are not made of its labels")
        return self


def kept_box(image: Image, preprocessing: Preprocessing) -> Box:
    """Return the part of an image that is prepared, and to which its label map is cut too.

    Args:
        image: The whole image.
        preprocessing: The plan.
    """
    if preprocessing.crops_to_nonzero:
        return nonzero_box(image)
    return whole_box(image.geometry.shape)


def prepare_label(
    array: npt.NDArray[np.integer[Any]], spacing_mm: Spacing, preprocessing: Preprocessing
) -> npt.NDArray[np.unsignedinteger]:
    """Turn label values into class indices and resample them to the target spacing.

    Args:
        array: Label values, shape (X, Y, Z), cut as the image is.
        spacing_mm: Their spacing.
        preprocessing: The plan.

    Returns:
        Class indices, shape (X', Y', Z'): uint8, or uint16 for more than 256 of them. Voxels that
        nobody has labelled have the index after the last class.

    Raises:
        VolumeError: A value belongs to no class, or at the target spacing the label map does not
            fit in memory.
    """
    known = preprocessing.class_of
    classes = class_indices(array, tuple(known), tuple(known.values()))
    target_mm = preprocessing.spacing_mm
    shape = affordable_shape(grid_shape(array), spacing_mm, target_mm, CLASS_ARRAYS)
    with explaining_memory("the label map cannot be prepared"):
        return resample_classes(classes, shape)


def classes_of(logits: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Return the index of the class of each voxel.

    Args:
        logits: Shape (K, X, Y, Z), or (R, X, Y, Z) where the network segments regions.
        preprocessing: What they are logits of.

    Returns:
        Shape (X, Y, Z) of an integer type, on the device of the logits.
    """
    if not preprocessing.regions:
        return strongest_class(logits)
    written = [preprocessing.label_values.index(one.written) for one in preprocessing.regions]
    return written_regions(logits, written)
