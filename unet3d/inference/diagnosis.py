"""What is wrong with an image that a network can do nothing with, in words."""

import math
from collections.abc import Iterator

import numpy as np

from unet3d.config import Shape
from unet3d.errors import some
from unet3d.images.files import times
from unet3d.images.image import Image
from unet3d.inference.windows import Window

LARGEST_USUAL = 1e4
"""Intensities beyond this are named as the cause of an output that is not finite."""

MAX_FLOAT16 = 65504

FAR_SMALLER = 16
"""How many times the voxels of a scan a window may have that a network was trained for."""

MAX_LABELS = 20
"""Whole numbers that an image may hold and be taken for a label map."""


def cause_of_non_finite(largest: float, precision: str) -> str:
    """Return the likely cause of an output that is not finite, and what to do about it.

    The normalised intensities of the image reach so far, in magnitude.
    """
    if not largest <= LARGEST_USUAL:
        return (
            f"its normalised intensities reach {largest:.3g}; look for single voxels that are far "
            "from all others"
        )
    if precision == "float16":
        return (
            f"in float16, numbers beyond {MAX_FLOAT16} overflow; add --precision bfloat16, which "
            "reaches further"
        )
    return (
        "its intensities are unlike those of the training, or the training has diverged; look at "
        "the image, or use another checkpoint"
    )


def doubts(image: Image, shape: Shape, window: Window) -> Iterator[str]:
    """Yield why an image is probably not what the network was trained for, to warn about.

    Prepared it has so many voxels along X, Y, Z, and is segmented in such windows.
    """
    path = image.geometry.path
    if min(image.geometry.shape) == 1:
        yield f"{path} is a single slice; the network was trained on volumes, and may find nothing"
    elif window != "whole" and FAR_SMALLER * math.prod(shape) <= math.prod(window):
        yield (
            f"{path} has {times(shape)} voxels at the spacing of the network, whose windows have "
            f"{times(window)}; look at the spacing in its header"
        )
    values = [_few_values(image, channel) for channel in range(image.num_channels)]
    if all(values):
        yield (
            f"{path} holds the whole numbers {some(values[0])} alone, as a label map does; name "
            "the scan itself"
        )


def _few_values(image: Image, channel: int) -> list[int]:
    """Return the values in the middle of a channel, if they are a few whole numbers."""
    found: set[float] = set()
    for axis, size in enumerate(image.geometry.shape):
        plane = image.read(image.planes(axis, slice(size // 2, size // 2 + 1)), channel)
        values = np.sort(plane, axis=None)
        found.update(values[np.diff(values, prepend=np.nan) != 0].tolist())
        if len(found) > MAX_LABELS or not all(value.is_integer() for value in found):
            return []
    return sorted(map(int, found))
