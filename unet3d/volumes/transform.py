"""Preparation of one image or label map: crop, normalise, resample; and the way back for logits.

A :class:`Preprocessing` says how. Training keeps it with the network, so that prediction prepares
an image exactly as training did.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, Field, model_validator

from unet3d.config import Spacing
from unet3d.errors import VolumeError
from unet3d.inputs.plain_data import PLAIN, Name, at_most
from unet3d.kernels import strongest_class, written_regions
from unet3d.volumes.classes import LabelValue, Region, class_indices
from unet3d.volumes.cropping import Box, inside_mask, nonzero_box, whole_box
from unet3d.volumes.image_voxels import ImageVoxels
from unet3d.volumes.memory_limits import explaining_memory
from unet3d.volumes.normalization import ChannelNormalization, ChannelScaling
from unet3d.volumes.resample import (
    Resampling,
    affordable_shape,
    grid_shape,
    resample_classes,
    thick_axes,
    visible_shape,
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
    ignore_value: LabelValue | None = None
    """Value of voxels that nobody has labelled; None: there is none. In prepared label maps they
    have the index after the last class."""
    crops_to_nonzero: Annotated[bool, Field(strict=True)] = False
    """Whether the image is cut to the box of its voxels that are not zero in every channel; not in
    files of the first versions."""
    masks_outside: Annotated[bool, Field(strict=True)] = False
    """Whether ``z-score`` counts the voxels that are not zero in every channel, and those that they
    enclose, and sets all others to 0."""
    regions: Annotated[tuple[Region, ...], at_most(2**16)] = ()
    """What the network segments instead of classes, in the order in which it is written."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, for a checkpoint or JSON."""
        return {
            "spacing_mm": None if self.spacing_mm is None else list(self.spacing_mm),
            "channels": [asdict(channel) for channel in self.channels],
            "channel_names": list(self.channel_names),
            "label_names": list(self.label_names),
            "label_values": list(self.label_values),
            "ignore_value": self.ignore_value,
            "crops_to_nonzero": self.crops_to_nonzero,
            "masks_outside": self.masks_outside,
            "regions": [asdict(region) for region in self.regions],
        }

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
    def stored_values(self) -> tuple[int, ...]:
        """The label value of each index in prepared label maps."""
        ignored = () if self.ignore_value is None else (self.ignore_value,)
        return (*self.label_values, *ignored)

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
        if self.ignore_value is not None and self.ignore_value <= max(self.label_values):
            raise ValueError(f"ignores the label {self.ignore_value}, which is not the highest one")
        if self.regions:
            in_regions = {value for region in self.regions for value in region.values}
            written = {region.written for region in self.regions}
            if in_regions != {*self.label_values} - {0} or not written <= in_regions:
                raise ValueError("has regions that are not made of its labels")
        return self


def kept_box(image: ImageVoxels, preprocessing: Preprocessing) -> Box:
    """Return the part of an image that is prepared, and to which its label map is cut too.

    Args:
        image: The whole image.
        preprocessing: The plan.
    """
    if preprocessing.crops_to_nonzero:
        return nonzero_box(image)
    return whole_box(image.shape)


class PreparedImage:
    """An image that is normalised and resampled where its planes are asked for."""

    def __init__(
        self, image: ImageVoxels, spacing_mm: Spacing, preprocessing: Preprocessing
    ) -> None:
        """Look at its intensities.

        Args:
            image: Cut to its :func:`kept_box`; it is kept and not changed.
            spacing_mm: Its spacing.
            preprocessing: The plan.

        Raises:
            VolumeError: It has another number of channels than the plan, or nothing of it would be
                left at the target spacing.
        """
        num_channels = len(preprocessing.channels)
        if image.num_channels != num_channels:
            raise VolumeError(
                f"the image has {image.num_channels} channel(s); {num_channels} are needed: "
                f"{', '.join(preprocessing.channel_names)}"
            )
        target_mm = preprocessing.spacing_mm
        self.shape = visible_shape(image.shape, spacing_mm, target_mm)
        """Voxels along X, Y, Z at the target spacing."""
        self._image = image
        with explaining_memory("the image cannot be prepared"):
            self._inside = inside_mask(image) if preprocessing.masks_outside else None
            self._scalings = [
                ChannelScaling.of(image, channel, how, self._inside)
                for channel, how in enumerate(preprocessing.channels)
            ]
        thick = thick_axes(spacing_mm, target_mm or spacing_mm)
        self._resampling = Resampling(image.shape, self.shape, thick)

    @property
    def num_channels(self) -> int:
        """Channels."""
        return self._image.num_channels

    @property
    def largest(self) -> float:
        """The largest magnitude of its normalised intensities."""
        magnitudes = []
        for channel, scaling in enumerate(self._scalings):
            with np.errstate(over="ignore", invalid="ignore"):
                extremes = scaling.apply(np.array(self._extremes(channel), np.float32))
            magnitudes.append(np.abs(extremes).max())
        return float(np.max(magnitudes))  # Python's own max overlooks a NaN

    def _extremes(self, channel: int) -> tuple[float, float]:
        found = self._image.measure(
            channel, lambda values, counts: (float(values.min()), float(values.max()))
        )
        lowest, highest = zip(*found, strict=True)
        return min(lowest), max(highest)

    def planes(self, axis: int, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return some planes at the target spacing.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of them.
            end: The one after the last.

        Returns:
            Shape (C, X', Y', Z'), in any order of memory.

        Raises:
            VolumeError: They do not fit in memory, or are not finite.
        """
        source = self._resampling.needed(axis, begin, end)
        inside = None
        if self._inside is not None:
            inside = self._inside[(slice(None),) * axis + (source,)]
        with (
            explaining_memory("the image cannot be prepared"),
            np.errstate(over="ignore", invalid="ignore", divide="ignore"),  # looked for below
        ):
            image = self._image.planes(axis, source)
            for channel, scaling in zip(image, self._scalings, strict=True):
                scaling.apply(channel, inside, out=channel)
            prepared = self._resampling.planes(image, axis, begin, end)
            # NaN anywhere is the least and the largest, and this takes no memory.
            if not (np.isfinite(prepared.min()) and np.isfinite(prepared.max())):
                largest = max(
                    abs(extreme)
                    for channel in range(self.num_channels)
                    for extreme in self._extremes(channel)
                )
                raise VolumeError(
                    f"intensities up to {largest:.3g} become infinite when they "
                    "are prepared; scale the image, or train with data.normalization=z-score"
                )
        return prepared


def prepare_image(
    image: ImageVoxels, spacing_mm: Spacing, preprocessing: Preprocessing
) -> npt.NDArray[np.float32]:
    """Normalise an image and resample it to the target spacing, all of it at once.

    Args:
        image: As for :class:`PreparedImage`.
        spacing_mm: As there.
        preprocessing: As there.

    Returns:
        Shape (C, X', Y', Z'), C-contiguous.

    Raises:
        VolumeError: As there; or at the target spacing it does not fit in memory, or what comes out
            is not finite.
    """
    target_mm = preprocessing.spacing_mm
    affordable_shape(image.shape, spacing_mm, target_mm, len(preprocessing.channels))
    prepared = PreparedImage(image, spacing_mm, preprocessing)
    return np.ascontiguousarray(prepared.planes(0, 0, prepared.shape[0]))


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
    classes = class_indices(array, preprocessing.stored_values)
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
