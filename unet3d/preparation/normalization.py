"""Intensities of one channel brought to a mean of 0 and a deviation of 1, or to 0 ... 1.

What depends on the whole image is found first, some planes at a time; then any part of it can be
normalised by itself.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from unet3d.errors import VolumeError
from unet3d.images.image_voxels import Counts, ImageVoxels, Values
from unet3d.inputs.plain_data import PLAIN

Kind = Literal["ct", "z-score", "z-score-all", "z-score-inside", "rescale", "rgb", "none"]

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

CONSTANT_DEVIATION = 1e-8
"""A channel counts as constant below this deviation, as a part of its largest intensity."""

MOST_COLOUR = 255.0
"""The largest intensity of an image of colours."""

SAFE_EXPONENT = 60
"""Intensities above 2 to this power, or all below its inverse, are scaled before they are used."""

MAX_INTENSITY = 1e38
"""No image in float32 has a larger one."""

Intensity = Annotated[float, Field(ge=-MAX_INTENSITY, le=MAX_INTENSITY, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ChannelNormalization:
    """How the intensities of one channel become comparable.

    ``ct``: clipped to ``low`` and ``high``, then shifted and scaled with the data set's ``mean``
    and ``std``, because Hounsfield units mean the same in every scan. ``z-score-all``: with mean
    and deviation of all voxels of the image. ``z-score-inside``: with those of what is inside, and
    0 outside. ``none``: unchanged.

    ``rescale``, from 0 for the lowest intensity to 1 for the highest, and ``rgb``, where 255
    becomes 1, are in models of nnU-Net alone. ``z-score`` is in files of the first versions: with
    mean and deviation of the voxels that are not 0, or of what is inside
    (``Preprocessing.masks_outside``).
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    kind: Kind
    low: Intensity = 0.0
    high: Intensity = 0.0
    mean: Intensity = 0.0
    std: Annotated[float, Field(gt=0, le=MAX_INTENSITY, strict=True)] = 1.0
    least_std: Annotated[float, Field(ge=0, le=MAX_INTENSITY, strict=True)] = 0.0
    """What the deviation of a z-score, or the range of ``rescale``, is taken for at least, in
    intensities of the image. 0: the result does not depend on their unit."""


@dataclass(frozen=True, kw_only=True)
class ChannelScaling:
    """What is done with the intensities of one channel of one image."""

    limits: tuple[float, float] | None = None
    """Where they are clipped."""
    exponent: int = 0
    """Of the power of two that they are multiplied with before all else: it changes no digit, and
    differences of numbers that large would overflow."""
    mean: float = 0.0
    std: float = 1.0
    masks: bool = False
    """Whether what is outside becomes 0."""

    @classmethod
    def of(
        cls, image: ImageVoxels, channel: int, how: ChannelNormalization, inside: Mask | None
    ) -> "ChannelScaling":
        """Look at a whole channel.

        Args:
            image: The image.
            channel: Number of the channel.
            how: What is wanted.
            inside: The voxels that ``z-score`` and ``z-score-inside`` count, shape (X, Y, Z); None:
                those not 0.

        Raises:
            VolumeError: There are other intensities than colours have.
        """
        if how.kind == "none":
            return cls()
        if how.kind == "ct":
            return cls(limits=(how.low, how.high), mean=how.mean, std=how.std)
        if how.kind == "rescale":
            return cls._of_range(*extremes(image, channel), how.least_std)
        if how.kind == "rgb":
            lowest, highest = extremes(image, channel)
            if lowest < 0 or highest > MOST_COLOUR:
                raise VolumeError(
                    f"channel {channel} has intensities from {lowest:.6g} to {highest:.6g}, but "
                    "colours are expected, from 0 to 255; choose images like those of the training"
                )
            return cls(std=MOST_COLOUR)
        counted = None if how.kind == "z-score-all" else inside
        counts_zero = how.kind != "z-score" or inside is not None
        return cls._of_mean(image, channel, counted, how.least_std, counts_zero=counts_zero)

    @classmethod
    def _of_range(cls, lowest: float, highest: float, least: float) -> "ChannelScaling":
        if lowest == highest:
            return cls(mean=lowest)
        exponent = _safe_exponent(max(-lowest, highest))
        lowest, highest = math.ldexp(lowest, exponent), math.ldexp(highest, exponent)
        std = max(highest - lowest, math.ldexp(least, exponent))
        return cls(exponent=exponent, mean=lowest, std=std)

    @classmethod
    def _of_mean(
        cls,
        image: ImageVoxels,
        channel: int,
        inside: Mask | None,
        least: float,
        *,
        counts_zero: bool,
    ) -> "ChannelScaling":
        """Look for mean and deviation, which is taken for ``least`` if it is less."""
        extents = image.measure(channel, partial(_extent, counts_zero=counts_zero), inside)
        largest, count = max(one[0] for one in extents), sum(one[1] for one in extents)
        if not largest:
            return cls()
        exponent = _safe_exponent(largest)
        largest = math.ldexp(largest, exponent)

        # Sums of 10^8 voxels in float32 lose digits.
        def total(values: Values, counts: Counts | None) -> float:
            return _sum(np.ldexp(values, exponent, dtype=np.float64), counts)

        mean = math.fsum(image.measure(channel, total, inside)) / count

        def deviations(values: Values, counts: Counts | None) -> float:
            if not counts_zero:
                is_counted = values != 0
                values, counts = values[is_counted], None if counts is None else counts[is_counted]
            scaled = np.ldexp(values, exponent, dtype=np.float64)
            return _sum(np.square(scaled - mean), counts)

        variance = math.fsum(image.measure(channel, deviations, inside)) / count
        std = math.sqrt(variance)
        if std < CONSTANT_DEVIATION * largest:
            std = largest
        std = max(std, math.ldexp(least, exponent))
        return cls(exponent=exponent, mean=mean, std=std, masks=inside is not None)

    def apply(self, array: Array) -> Array:
        """Return normalised intensities, none of them outside.

        Args:
            array: Intensities of the channel, which are not changed.
        """
        normal = array.copy("K")
        self.apply_(torch.from_numpy(normal))
        return normal

    def apply_(self, values: Tensor, inside: Tensor | None = None) -> None:
        """Normalise a part of the channel in place.

        Args:
            values: The part, in float32, on any device.
            inside: Which of its voxels are inside, on that device.
        """
        if self.limits is not None:
            values.clamp_(*self.limits)
        if self.exponent:
            half = self.exponent // 2  # float32 does not hold the power of every exponent
            values.mul_(2.0**half).mul_(2.0 ** (self.exponent - half))
        if self.mean:
            values.sub_(self.mean)
        if self.std != 1:
            values.div_(self.std)
        if self.masks and inside is not None:
            values.masked_fill_(~inside, 0)


def extremes(image: ImageVoxels, channel: int, inside: Mask | None = None) -> tuple[float, float]:
    """Return the lowest and the highest intensity of a channel, as they are stored.

    Args:
        image: The image.
        channel: Number of the channel.
        inside: The voxels that count, shape (X, Y, Z), at least one; None: all.
    """

    def look(values: Values, counts: Counts | None) -> tuple[float, float]:
        if not values.size:
            return math.inf, -math.inf
        return float(values.min()), float(values.max())

    lowest, highest = zip(*image.measure(channel, look, inside), strict=True)
    return min(lowest), max(highest)


def _safe_exponent(largest: float) -> int:
    """Return that of a power of two with which no difference of intensities overflows."""
    exponent = math.frexp(largest)[1]
    return -exponent if abs(exponent) > SAFE_EXPONENT else 0


def _extent(values: Values, counts: Counts | None, *, counts_zero: bool) -> tuple[float, int]:
    """Return the largest magnitude, and how many voxels count."""
    if not values.size:
        return 0.0, 0
    largest = max(float(values.max()), -float(values.min()))
    if counts is not None:
        return largest, int(counts.sum() if counts_zero else counts[values != 0].sum())
    return largest, values.size if counts_zero else int(np.count_nonzero(values))


def _sum(values: npt.NDArray[np.float64], counts: Counts | None) -> float:
    return float(values.sum() if counts is None else values @ counts.astype(np.float64))
