"""Extremes, mean and deviation of an image's channels, in one pass over its blocks."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError
from unet3d.images.image import Image

MOST_THREADS = 8
"""Memory is no faster for more."""

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Place = tuple[slice, slice, slice]
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False, kw_only=True)
class Intensities:
    """What the voxels of one channel that count have in common."""

    mean: float
    std: float
    """Around the mean, with the number of voxels as the divisor."""
    lowest: Array
    """Of each plane along an axis, or of all voxels, (1,); infinite where no voxel counts."""
    highest: Array


def measured(
    image: Image, masks: Sequence[Mask | None], axis: int | None = None
) -> list[Intensities]:
    """Return the intensities of each channel, or refuse an image with NaN or infinity.

    Of each channel, those voxels count that are in its mask (X, Y, Z), or all of them. Extremes are
    those of the planes along an axis of X, Y, Z, if one is given.
    """
    others = tuple(one for one in range(3) if one != axis)

    def of_block(place: Place) -> list[_Block]:
        with np.errstate(invalid="ignore"):  # the sum of infinity and its negative
            return [
                _Block.of(values, None if mask is None else mask[place], others)
                for values, mask in zip(image.read(place), masks, strict=True)
            ]

    places = list(image.pieces())
    blocks = list(_in_threads(of_block, places))
    num_wrong = sum(one.num_wrong for channels in blocks for one in channels)
    if num_wrong:
        num_voxels = math.prod(image.shape)
        raise VolumeError(
            f"the image has {num_wrong} voxels of {num_voxels} that are NaN or infinite; replace "
            "them, for example by 0"
        )
    num_planes = 1 if axis is None else image.geometry.shape[axis]
    planes = [slice(None) if axis is None else place[axis] for place in places]
    return [_together(channel, planes, num_planes) for channel in zip(*blocks, strict=True)]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Block:
    """What is known of a channel in one block."""

    num_wrong: int
    count: int
    mean: float
    squares: float
    """Sum of the squares of the distances to the mean."""
    lowest: Array
    highest: Array

    @classmethod
    def of(cls, values: Array, mask: Mask | None, others: tuple[int, ...]) -> "_Block":
        where = True if mask is None else mask
        lowest = values.min(axis=others, where=where, initial=np.inf)
        highest = values.max(axis=others, where=where, initial=-np.inf)
        counted = values if mask is None else values[mask]
        mean, squares, num_wrong = 0.0, 0.0, 0
        if counted.size:
            mean = float(counted.mean(dtype=np.float64))
        if not math.isfinite(mean):  # sums of float32 never overflow in float64
            num_wrong = counted.size - int(np.count_nonzero(np.isfinite(counted)))
        else:
            distances = np.subtract(counted, mean, dtype=np.float64).ravel(order="K")
            squares = float(distances @ distances)
        return cls(
            num_wrong=num_wrong,
            count=counted.size,
            mean=mean,
            squares=squares,
            lowest=np.atleast_1d(lowest),
            highest=np.atleast_1d(highest),
        )


def _together(blocks: Sequence[_Block], planes: Sequence[slice], num_planes: int) -> Intensities:
    """Join blocks as Chan, Golub and LeVeque do, which loses no digits to a large mean."""
    count = sum(one.count for one in blocks)
    mean = math.fsum(one.count * one.mean for one in blocks) / max(1, count)
    squares = math.fsum(one.squares + one.count * (one.mean - mean) ** 2 for one in blocks)
    lowest = np.full(num_planes, np.inf, np.float32)
    highest = np.full(num_planes, -np.inf, np.float32)
    for one, place in zip(blocks, planes, strict=True):
        lowest[place] = np.minimum(lowest[place], one.lowest)
        highest[place] = np.maximum(highest[place], one.highest)
    std = math.sqrt(squares / max(1, count))
    return Intensities(mean=mean, std=std, lowest=lowest, highest=highest)


def _in_threads(part: Callable[[Place], Found], places: Sequence[Place]) -> Iterator[Found]:
    """Yield what a function returns for each place, in their order."""
    num_threads = min(MOST_THREADS, num_cores())
    with ThreadPoolExecutor(num_threads, thread_name_prefix="intensities") as threads:
        # No more than that: a process that ends waits for all that has been handed out.
        waiting: deque[Future[Found]] = deque()
        for place in places:
            if len(waiting) == 2 * num_threads:
                yield waiting.popleft().result()
            waiting.append(threads.submit(part, place))
        while waiting:
            yield waiting.popleft().result()
