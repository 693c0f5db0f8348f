"""Intensities of one channel brought to a mean of 0 and a standard deviation of 1.

What depends on the whole image is found first, some planes at a time; then any part of it can be
normalised by itself.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from unet3d.inputs.plain_data import PLAIN
from unet3d.volumes.image_voxels import Counts, ImageVoxels, Values

Kind = Literal["ct", "z-score", "none"]

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

CONSTANT_DEVIATION = 1e-8
"""A channel counts as constant below this deviation, as a part of its largest intensity."""

SAFE_EXPONENT = 60
"""Intensities above 2 to this power, or all below its inverse, are scaled before they are used."""

MAX_INTENSITY = 1e38
"""No image in float32 has a larger one."""

Intensity = Annotated[float, Field(ge=-MAX_INTENSITY, le=MAX_INTENSITY, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ChannelNormalization:
    """How the intensities of one channel get a mean of 0 and a standard deviation of 1.

    ``ct``: clipped to ``low`` and ``high``, then shifted and scaled with the data set's ``mean``
    and ``std``, because Hounsfield units mean the same in every scan. ``z-score``: with the image's
    own mean and deviation over its non-zero voxels, or over all that the image has inside
    (``Preprocessing.masks_outside``). ``none``: unchanged.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    kind: Kind
    low: Intensity = 0.0
    high: Intensity = 0.0
    mean: Intensity = 0.0
    std: Annotated[float, Field(gt=0, le=MAX_INTENSITY, strict=True)] = 1.0


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
            inside: The voxels that ``z-score`` counts, shape (X, Y, Z); None: those not 0.
        """
        if how.kind == "none":
            return cls()
        if how.kind == "ct":
            return cls(limits=(how.low, how.high), mean=how.mean, std=how.std)
        extents = image.measure(channel, partial(_extent, counts_zero=inside is not None), inside)
        largest, count = max(one[0] for one in extents), sum(one[1] for one in extents)
        if not largest:
            return cls()
        exponent = math.frexp(largest)[1]
        exponent = -exponent if abs(exponent) > SAFE_EXPONENT else 0
        largest = math.ldexp(largest, exponent)

        # Sums of 10^8 voxels in float32 lose digits.
        def total(values: Values, counts: Counts | None) -> float:
            return _sum(np.ldexp(values, exponent, dtype=np.float64), counts)

        mean = math.fsum(image.measure(channel, total, inside)) / count

        def deviations(values: Values, counts: Counts | None) -> float:
            if inside is None:
                is_counted = values != 0
                values, counts = values[is_counted], None if counts is None else counts[is_counted]
            scaled = np.ldexp(values, exponent, dtype=np.float64)
            return _sum(np.square(scaled - mean), counts)

        variance = math.fsum(image.measure(channel, deviations, inside)) / count
        std = math.sqrt(variance)
        if std < CONSTANT_DEVIATION * largest:
            std = largest
        return cls(exponent=exponent, mean=mean, std=std, masks=inside is not None)

    def apply(self, array: Array, inside: Mask | None = None, out: Array | None = None) -> Array:
        """Normalise a part of the channel.

        Args:
            array: The part, which is not changed.
            inside: Which of its voxels are inside.
            out: Takes the result; None: new memory.
        """
        normal = np.empty_like(array) if out is None else out
        if self == ChannelScaling():
            np.copyto(normal, array)
            return normal
        if self.limits is not None:
            array = np.clip(array, *self.limits, out=normal)
        if self.exponent:
            array = np.ldexp(array, self.exponent, out=normal)
        np.subtract(array, np.float32(self.mean), out=normal)
        np.divide(normal, np.float32(self.std), out=normal)
        if self.masks and inside is not None:
            normal[~inside] = 0
        return normal


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
