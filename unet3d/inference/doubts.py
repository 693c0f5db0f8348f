"""Why an image is probably not what the networks were trained for."""

import math
from collections.abc import Iterator

import numpy as np

from unet3d.config import Shape
from unet3d.errors import some
from unet3d.images.files import times
from unet3d.images.image import Image
from unet3d.inference.windows import Window

LARGEST_USUAL = 1e4
"""Intensities beyond this are reported as the cause of an output that is not finite."""

MAX_FLOAT16 = 65504

FAR_SMALLER = 16
"""Smallest ratio of a window's voxels to a scan's at which the scan is reported as too small."""

MAX_LABELS = 20
"""Most different whole numbers in an image that is reported as a label map."""


def cause_of_non_finite(largest: float, precision: str) -> str:
    """Return the likely cause of an output that is not finite, and what to do about it.

    ``largest`` is the largest magnitude of the normalised intensities.
    """
    if not largest <= LARGEST_USUAL:
        return f"its normalised intensities reach {largest:.3g}; look for outlier voxels"
    if precision == "float16":
        return (
            f"float16 overflows beyond {MAX_FLOAT16}; add --precision bfloat16, which has a larger "
            "range"
        )
    return (
        "its intensities differ from those in training, or training had diverged; look at the "
        "image, or use another checkpoint"
    )


def doubts(image: Image, shape: Shape, window: Window) -> Iterator[str]:
    """Yield warnings about an image that is probably not what the network was trained for.

    ``shape`` is the shape of the prepared image.
    """
    path = image.geometry.path
    if min(image.geometry.shape) == 1:
        yield f"{path} is a single slice; the network was trained on volumes, and may find nothing"
    elif window != "whole" and FAR_SMALLER * math.prod(shape) <= math.prod(window):
        yield (
            f"{path} has {times(shape)} voxels at the spacing of the network, far fewer than a "
            f"window ({times(window)}); look at the spacing in its header"
        )
    values = [_few_values(image, channel) for channel in range(image.num_channels)]
    if all(values):
        yield (
            f"{path} holds the whole numbers {some(values[0])} only, as a label map does; name "
            "the scan itself"
        )


def _few_values(image: Image, channel: int) -> list[int]:
    """Return the values in three middle planes of a channel, if they are a few whole numbers."""
    found: set[float] = set()
    for axis, size in enumerate(image.geometry.shape):
        plane = image.read(image.planes(axis, slice(size // 2, size // 2 + 1)), channel)
        values = np.sort(plane, axis=None)
        found.update(values[np.diff(values, prepend=np.nan) != 0].tolist())
        if len(found) > MAX_LABELS or not all(value.is_integer() for value in found):
            return []
    return sorted(map(int, found))
