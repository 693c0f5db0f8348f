"""Extremes, mean and deviation of an image's channels, in one pass over its blocks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError
from unet3d.images.image import Image
from unet3d.inputs.ahead import in_threads

MOST_THREADS = 8
"""Memory is no faster for more."""

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Place = tuple[slice, slice, slice]
Found = TypeVar("Found")

_Moments = tuple[int, int, float, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Intensities:
    """What the voxels of one channel that count have in common."""

    mean: float
    std: float
    """Around the mean, with the number of voxels as the divisor."""
    lowest: Array
    """Of each plane along an axis, or of all voxels, (1,)."""
    highest: Array


def measured(
    image: Image, masks: Sequence[Mask | None], axis: int | None = None
) -> list[Intensities]:
    """Return the intensities of each channel, or refuse an image with NaN or infinity.

    Of each channel, those voxels count that are in its mask (X, Y, Z), or all of them. Extremes are
    those of the planes along an axis of X, Y, Z, if one is given; where a plane has other voxels,
    the mean is among them.
    """
    others = tuple(one for one in range(3) if one != axis)

    def of_block(place: Place) -> list[tuple[_Moments, Array, Array]]:
        found = []
        for values, mask in zip(image.read(place), masks, strict=True):
            where = True if mask is None else mask[place]
            lowest = values.min(axis=others, where=where, initial=np.inf)
            highest = values.max(axis=others, where=where, initial=-np.inf)
            counted = values if mask is None else values[mask[place]]
            found.append((_moments(counted), lowest, highest))
        return found

    places = list(image.pieces())
    blocks = on_pieces(of_block, places)
    moments = np.array([[one[0] for one in block] for block in blocks], np.float64)
    num_wrong, count, mean, squares = moments.T
    if num_wrong.any():
        raise VolumeError(
            f"the image has {int(num_wrong.sum())} voxels of {math.prod(image.shape)} that are NaN "
            "or infinite; replace them, for example by 0"
        )
    # As Chan, Golub and LeVeque join them, which loses no digits to a large mean.
    total = count.sum(axis=1).clip(1)
    joined = (count * mean).sum(axis=1) / total
    squares += count * np.square(mean - joined[:, None])
    std = np.sqrt(squares.sum(axis=1) / total)
    lowest = np.full((len(masks), 1 if axis is None else image.geometry.shape[axis]), np.inf)
    highest = -lowest
    for place, block in zip(places, blocks, strict=True):
        planes = slice(None) if axis is None else place[axis]
        for channel, (_, low, high) in enumerate(block):
            lowest[channel, planes] = np.minimum(lowest[channel, planes], low)
            highest[channel, planes] = np.maximum(highest[channel, planes], high)
    for channel, mask in enumerate(masks):
        if mask is not None:
            has_others = np.atleast_1d(~mask.all(axis=others))
            lowest[channel, has_others] = lowest[channel, has_others].clip(max=joined[channel])
            highest[channel, has_others] = highest[channel, has_others].clip(joined[channel])
    return [
        Intensities(mean=float(joined[one]), std=float(std[one]), lowest=low, highest=high)
        for one, (low, high) in enumerate(
            zip(lowest.astype(np.float32), highest.astype(np.float32), strict=True)
        )
    ]


def _moments(values: Array) -> _Moments:
    """Return how many voxels are not finite, how many count, their mean, and the squares around it.

    The squares are summed up.
    """
    if not values.size:
        return 0, 0, 0, 0
    with np.errstate(invalid="ignore"):  # infinity and its negative
        mean = float(values.mean(dtype=np.float64))
    if not math.isfinite(mean):  # sums of float32 never overflow in float64
        return values.size - int(np.count_nonzero(np.isfinite(values))), 0, 0, 0
    distances = np.subtract(values, mean, dtype=np.float64).ravel(order="K")
    return 0, values.size, mean, float(distances @ distances)


def on_pieces(part: Callable[[Place], Found], places: Sequence[Place]) -> list[Found]:
    """Return what a function returns for each place."""
    return in_threads(part, places, min(MOST_THREADS, num_cores()))
