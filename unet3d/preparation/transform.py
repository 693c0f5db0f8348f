"""The plan of preparation, and the meaning of logits.

Training keeps the plan with the network, so that prediction prepares an image exactly as training
did.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import ConfigDict, Field, model_validator

from unet3d.config import Spacing
from unet3d.datasets.labels import Labels
from unet3d.inputs.plain_data import PLAIN, Name, at_most
from unet3d.kernels import strongest_class, written_regions
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.resample import Interpolation


@dataclass(frozen=True, kw_only=True)
class Preprocessing(Labels):
    """All that prediction needs to prepare an image as training did."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    spacing_mm: Spacing | None
    """Target spacing; None: each image keeps its own."""
    channels: Annotated[tuple[ChannelNormalization, ...], at_most(2**14)]
    channel_names: Annotated[tuple[Name, ...], at_most(2**14)]
    crops_to_nonzero: Annotated[bool, Field(strict=True)] = False
    """Whether the image is cut to the box of voxels that are nonzero in any channel."""
    orientation: Literal["ras", "stored"] = "ras"
    """Axes of the arrays: ``ras``: to the right, to the front and up; ``stored``: the axes of the
    file."""
    interpolation: Interpolation = Interpolation()
    """How images are resampled to the target spacing, and logits back."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, for a checkpoint or JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def without_least_std(self) -> Self:
        """Return the plan without ``least_std``, whose differences do not matter in an ensemble."""
        channels = tuple(replace(channel, least_std=0.0) for channel in self.channels)
        return replace(self, channels=channels)

    @property
    def num_outputs(self) -> int:
        """Number of logits per voxel: one for each region, or for each class."""
        return len(self.regions) or len(self.label_values)

    @property
    def region_classes(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the classes that each region is made of."""
        index_of = {value: index for index, value in enumerate(self.label_values)}
        return tuple(tuple(index_of[value] for value in one.values) for one in self.regions)

    @property
    def scored(self) -> dict[str, tuple[int, ...]]:
        """Class indices of what is scored, by name: each region, or each class but background."""
        if self.regions:
            names = [region.name for region in self.regions]
            return dict(zip(names, self.region_classes, strict=True))
        return {name: (index,) for index, name in enumerate(self.label_names) if index}

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        """Refuse channels and labels that contradict each other."""
        if not len(self.channels) == len(self.channel_names) > 0:
            raise ValueError("has different numbers of channels and of their names")
        labels = set(self.label_values)
        if not len(self.label_names) == len(labels) == len(self.label_values) > 0:
            raise ValueError(
                "has different numbers of labels and of their names, or one value twice"
            )
        in_regions = {value for region in self.regions for value in region.values}
        written = {region.written for region in self.regions}
        raw = [value for values in self.raw_values for value in values]
        own = zip(self.label_values, self.raw_values, strict=False)
        if (
            (self.regions and (in_regions != labels - {0} or not written <= in_regions))
            or (raw and (self.regions or len(self.raw_values) != len(labels)))
            or len(set(raw)) < len(raw)
            or not all(value in values for value, values in own)
            or (self.ignore_value is not None and self.ignore_value <= max(labels))
        ):
            raise ValueError("has labels that contradict each other")
        return self


def classes_of(logits: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Return the index of the class of each voxel, (X, Y, Z), on the device of the logits.

    The logits are (K, X, Y, Z), or (R, X, Y, Z) if the network segments regions.
    """
    if not preprocessing.regions:
        return strongest_class(logits)
    written = [preprocessing.label_values.index(one.written) for one in preprocessing.regions]
    return written_regions(logits, written)
