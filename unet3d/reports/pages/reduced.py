"""Volumes reduced for a page: fewer voxels, 256 grey levels, labels numbered consecutively.

A page holds them as NIfTI, compressed, in base64. Each block of voxels becomes one voxel: the mean
of an image, the middle label of a label map.
"""

import base64
import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

MAX_VOXELS = 12_000_000
"""Most voxels of an image, a byte each: 256 x 256 x 180 fit; pure noise makes a page of 17 MB."""

MAX_SIDE = 1024
"""Most voxels along an axis, because some phones limit textures to this size."""

LEVELS = 255
GREY_PERCENTILES = (0.1, 99.9)
"""Percentiles of the intensities at the first and the last grey level."""
SHOWN_PERCENTILES = (1.0, 99.0)
"""Percentiles of the intensities that are initially shown as black and as white."""

Affine = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Greys:
    """An image in a page."""

    nifti: str
    """Its NIfTI file, compressed, in base64."""
    lowest: float
    """Intensity of the first grey level."""
    highest: float
    """Intensity of the last grey level."""
    black: float
    white: float


def steps_for(shape: Sequence[int], spacing_mm: Sequence[float]) -> tuple[int, int, int]:
    """Return how many voxels along X, Y, Z become one.

    The finest axis comes first, so that blocks become as near to cubes as whole numbers allow.
    """
    steps = [1, 1, 1]

    def size(axis: int) -> int:
        return math.ceil(shape[axis] / steps[axis])

    while True:
        long = [axis for axis in range(3) if size(axis) > MAX_SIDE]
        if not long and math.prod(map(size, range(3))) <= MAX_VOXELS:
            return steps[0], steps[1], steps[2]
        candidates = long or [axis for axis in range(3) if size(axis) > 1]
        steps[min(candidates, key=lambda axis: (spacing_mm[axis] * steps[axis], -size(axis)))] += 1


def reduced_affine(affine: Affine, steps: Sequence[int]) -> Affine:
    """Return the affine (4, 4) of reduced voxels, which maps to the centres of their blocks."""
    blocks = np.diag([*steps, 1.0])
    blocks[:3, 3] = [(step - 1) / 2 for step in steps]
    return np.asarray(affine @ blocks)


def means(image: npt.NDArray[np.float32], steps: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the mean of each block of an image (X, Y, Z); blocks at the end may be smaller."""
    for axis, step in enumerate(steps):
        if step > 1:
            size = image.shape[axis]
            starts = np.arange(0, size, step)
            counts = np.minimum(starts + step, size) - starts
            sums = np.add.reduceat(image, starts, axis=axis)
            along = [-1 if other == axis else 1 for other in range(3)]
            image = np.divide(sums, counts.reshape(along), dtype=np.float32)
    return image


def middles(labels: npt.NDArray[Any], steps: Sequence[int]) -> npt.NDArray[Any]:
    """Return the label in the middle of each block of labels (X, Y, Z)."""
    for axis, step in enumerate(steps):
        if step > 1:
            size = labels.shape[axis]
            where = np.minimum(np.arange(0, size, step) + step // 2, size - 1)
            labels = labels.take(where, axis=axis)
    return labels


def greys_of(image: npt.NDArray[np.float32], affine: Affine) -> Greys:
    """Return intensities (X, Y, Z), with an affine (4, 4), for a page."""
    if not np.isfinite(image).all():  # gaps of a mosaic, for example
        known = image[np.isfinite(image)]
        low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
        image = np.nan_to_num(image, nan=low, posinf=high, neginf=low)
    ends = [*GREY_PERCENTILES, *SHOWN_PERCENTILES]
    lowest, highest, black, white = np.percentile(image, ends).tolist()
    if black == white:  # nearly everything is background
        lowest, highest = float(image.min()), float(image.max())
        black, white = lowest, highest
    step = (highest - lowest) / LEVELS or 1.0
    levels = np.rint((np.clip(image, lowest, highest) - lowest) / step).astype(np.uint8)
    return Greys(
        nifti=_in_base64(levels, affine, slope=step, intercept=lowest),
        lowest=lowest,
        highest=lowest + LEVELS * step,
        black=black,
        white=white,
    )


def numbered(labels: npt.NDArray[Any], values: Sequence[int], affine: Affine) -> str:
    """Return a label map (X, Y, Z) for a page, as a NIfTI file in base64.

    ``values``, in ascending order, become 1, 2, ...; all other labels become background.
    """
    labels = labels.astype(np.uint64)  # has room for labels without voxels, too
    known = np.array([0, *values], np.uint64)
    places = np.minimum(np.searchsorted(known, labels), len(known) - 1)
    numbers = np.where(known[places] == labels, places, 0)
    kind = np.uint8 if len(values) < 256 else np.uint16
    return _in_base64(numbers.astype(kind), affine)


def _in_base64(
    array: npt.NDArray[Any], affine: Affine, slope: float = 1.0, intercept: float = 0.0
) -> str:
    file = nib.Nifti1Image(array, affine)
    file.header.set_slope_inter(slope, intercept)  # else nibabel would scale the array itself
    file.header.set_xyzt_units("mm")
    return base64.b64encode(gzip.compress(file.to_bytes(), 6, mtime=0)).decode()
