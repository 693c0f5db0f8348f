"""Intensities of one channel brought to a mean of 0 and a standard deviation of 1.

What depends on the whole image is found first, some planes at a time; then any part of it can be
normalised by itself.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from unet3d.inputs.plain_data import PLAIN

Kind = Literal["ct", "z-score", "none"]

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

CONSTANT_DEVIATION = 1e-8
"""A channel counts as constant below this deviation, as a part of its largest intensity."""

SAFE_EXPONENT = 60
"""Intensities above 2 to this power, or all below its inverse, are scaled before they are used."""

MAX_INTENSITY = 1e38
"""No image in float32 has a larger one."""

PIECE_VOXELS = 2**23
"""Voxels that are looked at together."""

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
    def of(cls, array: Array, how: ChannelNormalization, inside: Mask | None) -> "ChannelScaling":
        """Look at a whole channel.

        Args:
            array: Shape (X, Y, Z).
            how: What is wanted.
            inside: The voxels that ``z-score`` counts, of the same shape; None: those not 0.
        """
        if how.kind == "none":
            return cls()
        if how.kind == "ct":
            return cls(limits=(how.low, how.high), mean=how.mean, std=how.std)
        largest, count = 0.0, 0
        for part in _parts(array, inside):
            largest = max(largest, float(part.max()), -float(part.min()))
            count += part.size
        if not largest:
            return cls()
        exponent = math.frexp(largest)[1]
        exponent = -exponent if abs(exponent) > SAFE_EXPONENT else 0
        largest = math.ldexp(largest, exponent)
        # Sums of 10^8 voxels in float32 lose digits.
        parts = (np.ldexp(part, exponent, dtype=np.float64) for part in _parts(array, inside))
        mean = math.fsum(float(part.sum()) for part in parts) / count
        parts = (np.ldexp(part, exponent, dtype=np.float64) for part in _parts(array, inside))
        variance = math.fsum(float(np.square(part - mean).sum()) for part in parts) / count
        std = math.sqrt(variance)
        if std < CONSTANT_DEVIATION * largest:
            std = largest
        return cls(exponent=exponent, mean=mean, std=std, masks=inside is not None)

    def apply(self, array: Array, inside: Mask | None = None) -> Array:
        """Normalise a part of the channel.

        Args:
            array: The part, which is not changed.
            inside: Which of its voxels are inside.
        """
        if self == ChannelScaling():
            return array
        if self.limits is not None:
            array = array.clip(*self.limits)
        if self.exponent:
            array = np.ldexp(array, self.exponent)
        normal: Array = (array - np.float32(self.mean)) / np.float32(self.std)
        if self.masks and inside is not None:
            normal[~inside] = 0
        return normal


def _parts(array: Array, inside: Mask | None) -> Iterator[Array]:
    """Yield the voxels that count, in pieces that are not empty."""
    num_planes = max(1, PIECE_VOXELS * len(array) // max(1, array.size))
    for first in range(0, len(array), num_planes):
        planes = slice(first, first + num_planes)
        block = array[planes]
        counted: Array = block[block != 0 if inside is None else inside[planes]]
        if counted.size:
            yield counted
