"""Intensities that cannot be trained on: not finite, or so large that nothing else counts.

Nothing is repaired here: which number should stand in such a voxel is the user's to say. Images are
refused with the number of their voxels, whatever their scale: one in units of 1e-30 or 1e30 is as
good as any other.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError
from unet3d.images.image_voxels import Counts, ImageVoxels, Values

HUGE_RATIO = 1e5
"""Beside a voxel so many times larger, the others look alike. No 16-bit image holds both."""

MAX_HUGE_SHARE = 1e-3
"""A larger share of the voxels that differ from 0 is taken for a part of the picture."""

MIN_OTHERS_SHARE = 0.01
"""Fewer small voxels for each large one are noise around the picture, not the picture."""


def refuse_non_finite(path: Path, array: npt.NDArray[Any]) -> None:
    """Refuse NaN and infinity.

    Args:
        path: The file, for the message.
        array: Its voxels.

    Raises:
        VolumeError: There are some.
    """
    _refuse_wrong(path, array.size - int(np.count_nonzero(np.isfinite(array))), array.size)


def refuse_unusable(path: Path, image: ImageVoxels) -> None:
    """Refuse an image with NaN or infinity, or a channel in which a few voxels dwarf all others.

    The latter are marks for "no data" (-1e30, the largest float) and damaged bytes: normalised by
    mean and deviation, everything else would become one number. Two kinds of voxels are not taken
    for it: those that are a larger share of the picture and differ among themselves, and others
    than these that are all alike, as in a mask.

    Args:
        path: The file, for the message.
        image: Its voxels.

    Raises:
        VolumeError: There are some.
    """
    channels = range(image.num_channels)
    size = math.prod(image.shape)
    found = [image.measure(channel, _extent) for channel in channels]
    num_wrong = sum(one.num_wrong for of_channel in found for one in of_channel)
    _refuse_wrong(path, num_wrong, size * image.num_channels)
    for channel, of_channel in zip(channels, found, strict=True):
        _refuse_huge(path, image, channel, max(one.largest for one in of_channel))


def _refuse_wrong(path: Path, num_wrong: int, size: int) -> None:
    if num_wrong:
        raise VolumeError(
            f"{path} has {num_wrong} voxels of {size} that are NaN or infinite; "
            "replace them, for example by 0"
        )


@dataclass(frozen=True, kw_only=True)
class _Extent:
    """What some intensities tell of all."""

    num_wrong: int
    """Those that are not finite."""
    largest: float
    """The largest magnitude."""


@dataclass(frozen=True, kw_only=True)
class _Magnitudes:
    """Some magnitudes."""

    count: int
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Values, counts: Counts | None) -> "_Magnitudes":
        if not values.size:
            return cls(count=0, lowest=math.inf, highest=-math.inf)
        return cls(
            count=_number(values, counts), lowest=float(values.min()), highest=float(values.max())
        )

    @classmethod
    def together(cls, parts: Iterable["_Magnitudes"]) -> "_Magnitudes":
        parts = list(parts)
        return cls(
            count=sum(part.count for part in parts),
            lowest=min(part.lowest for part in parts),
            highest=max(part.highest for part in parts),
        )


def _number(values: Values, counts: Counts | None) -> int:
    return values.size if counts is None else int(counts.sum())


def _extent(values: Values, counts: Counts | None) -> _Extent:
    if not values.size:
        return _Extent(num_wrong=0, largest=0.0)
    largest = max(float(values.max()), -float(values.min()))
    if math.isfinite(largest):  # NaN anywhere is the least and the largest
        return _Extent(num_wrong=0, largest=largest)
    wrong = ~np.isfinite(values)
    num_wrong = _number(values[wrong], None if counts is None else counts[wrong])
    return _Extent(num_wrong=num_wrong, largest=0.0)


def _refuse_huge(path: Path, image: ImageVoxels, channel: int, largest: float) -> None:
    """Refuse a channel in which a few voxels, or one value, dwarf all others."""
    limit = np.float32(largest / HUGE_RATIO)

    def divide(values: Values, counts: Counts | None) -> tuple[_Magnitudes, _Magnitudes]:
        magnitudes = np.abs(values)
        is_small = magnitudes < limit
        kinds = (is_small & (magnitudes != 0), ~is_small)
        others, huge = (
            _Magnitudes.of(magnitudes[kind], None if counts is None else counts[kind])
            for kind in kinds
        )
        return others, huge

    parts = image.measure(channel, divide)
    others = _Magnitudes.together(part[0] for part in parts)
    huge = _Magnitudes.together(part[1] for part in parts)
    if others.count <= huge.count * MIN_OTHERS_SHARE or others.lowest == others.highest:
        return
    is_rare = huge.count <= MAX_HUGE_SHARE * (huge.count + others.count)
    if is_rare or huge.lowest == huge.highest:
        raise VolumeError(
            f"{path} has {huge.count} voxels of {math.prod(image.shape)} with values up to "
            f"{largest:.3g}, beside which the others, up to {others.highest:.3g}, would all look "
            "alike; replace them, for example by 0"
        )
