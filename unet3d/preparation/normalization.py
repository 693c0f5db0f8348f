"""Intensities of one channel brought to a mean of 0 and a deviation of 1, or to 0 ... 1.

Each normalisation clips, subtracts and divides: what depends on the whole image is measured first
(:mod:`unet3d.preparation.intensities`), then any part of it can be normalised by itself.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from torch import Tensor

from unet3d.errors import VolumeError
from unet3d.inputs.plain_data import PLAIN
from unet3d.preparation.intensities import Intensities

Kind = Literal["ct", "z-score", "z-score-inside", "rescale", "rgb", "none"]

KINDS_BY_NAME: dict[str, Kind] = {
    "ct": "ct",
    "nonorm": "none",
    "rescale_to_0_1": "rescale",
    "rgb_to_0_1": "rgb",
}
"""The normalisation of a channel by its name in lower case, as in nnU-Net; of others z-score."""

MOST_COLOUR = 255.0
"""The largest intensity of an image of colours."""

Intensity = Annotated[float, Field(strict=True)]


@dataclass(frozen=True, kw_only=True)
class ChannelNormalization:
    """How the intensities of one channel become comparable.

    ``ct``: clipped to ``low`` and ``high``, then shifted and scaled with the data set's ``mean``
    and ``std``, because Hounsfield units mean the same in every scan. ``z-score``: with mean and
    deviation of all voxels of the image. ``z-score-inside``: with those of what is inside, and 0
    outside. ``rescale``: from 0 for the lowest intensity to 1 for the highest. ``rgb``: 255 becomes
    1. ``none``: unchanged.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    kind: Kind
    low: Intensity = 0.0
    high: Intensity = 0.0
    mean: Intensity = 0.0
    std: Annotated[float, Field(gt=0, strict=True)] = 1.0
    least_std: Annotated[float, Field(ge=0, strict=True)] = 0.0
    """What the deviation of a z-score, or the range of ``rescale``, is taken for at least, in
    intensities of the image. 0: the result does not depend on their unit."""


def kind_of(channel_name: str, setting: Literal["auto", "ct", "z-score", "none"]) -> Kind:
    """Return how a channel is normalised in a training, by ``data.normalization`` or its name."""
    if setting != "auto":
        return setting
    name = channel_name.strip().lower()
    if name.startswith(("ct ", "ct_", "ct-")):
        return "ct"
    return KINDS_BY_NAME.get(name, "z-score")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What is done with the intensities of one channel of one image."""

    limits: tuple[float, float] | None = None
    """Where they are clipped."""
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, how: ChannelNormalization, found: Intensities) -> "Scaling":
        """Return the scaling of a channel, or refuse colours that are none."""
        if how.kind == "none":
            return cls()
        if how.kind == "ct":
            return cls(limits=(how.low, how.high), mean=how.mean, std=how.std)
        lowest, highest = float(found.lowest.min()), float(found.highest.max())
        if how.kind == "rgb":
            if lowest < 0 or highest > MOST_COLOUR:
                raise VolumeError(
                    f"a channel has intensities from {lowest:.6g} to {highest:.6g}, but colours "
                    "are expected, from 0 to 255; choose images like those of the training"
                )
            return cls(std=MOST_COLOUR)
        start, scale = found.mean, found.std
        if how.kind == "rescale":
            start, scale = lowest, highest - lowest
        return cls(mean=start, std=max(scale, how.least_std) or 1.0)  # 1: of a constant channel

    def apply_(self, values: Tensor, inside: Tensor | None = None) -> None:
        """Normalise a part of the channel in place, in float32; outside of a mask it becomes 0."""
        if self.limits is not None:
            values.clamp_(*self.limits)
        if self.mean:
            values.sub_(self.mean)
        if self.std != 1:
            values.div_(self.std)
        if inside is not None:
            values.masked_fill_(~inside, 0)
