"""Geometry of voxel grids: what an affine says about spacing, volume, shear and order of axes."""

import math
from collections.abc import Sequence

import nibabel as nib
import numpy as np
import numpy.typing as npt

from unet3d.config import Shape

Affine = npt.NDArray[np.float64]

MIN_SPACING_MM = 1e-9
MAX_SPACING_MM = 1e9
"""Spacings beyond these, a picometre and a thousand kilometres, are faults of a header."""

MIN_DETERMINANT = 1e-6
"""Determinant of the three axis directions, 1 for right angles; below this they are flat."""

SHEARED_DEGREES = 0.1
"""Axes that miss a right angle by more are sheared; rounding of headers stays far below it."""

DECIMALS_MM = 6
SIGNIFICANT_DIGITS = 6

FLOAT32_ROUNDING = 2.0**-22
"""How far two roundings of one coordinate in float32 may lie apart, relative to it."""

MAX_DISTANCE = 0.4
"""Corners that lie further apart than this part of the finest spacing are never one."""


def rounded_mm(spacing_mm: float) -> float:
    """Return a spacing to 1e-6 mm, and below 0.1 mm to six digits, so that rounding noise goes.

    Args:
        spacing_mm: Any positive length.
    """
    decimals = max(DECIMALS_MM, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(spacing_mm)))
    # 500 mm / 512 is 0.9765625: rounding up from 0.4 keeps such a common spacing from depending on
    # the last bit.
    return math.floor(spacing_mm * 10.0**decimals + 0.6) / 10.0**decimals


def column_lengths(affine: Affine) -> npt.NDArray[np.float64]:
    """Return the lengths of the three columns of an affine, (3,), whatever their magnitude."""
    lengths: npt.NDArray[np.float64]
    largest = np.abs(affine[:3, :3]).max()
    if not np.isfinite(largest) or largest == 0:
        lengths = np.abs(affine[:3, :3]).max(axis=0)
        return lengths
    lengths = largest * np.linalg.norm(affine[:3, :3] / largest, axis=0)
    return lengths


def is_flat(affine: Affine) -> bool:
    """Tell whether the three axes lie in one plane, so that the affine cannot be inverted."""
    return bool(abs(np.linalg.det(affine[:3, :3] / column_lengths(affine))) < MIN_DETERMINANT)


def voxel_mm3(affine: Affine) -> float:
    """Return the volume of a voxel in mm3, also where axes are not at right angles."""
    return float(abs(np.linalg.det(affine[:3, :3])))


def shear_degrees(affine: Affine) -> float:
    """Return by how much the two axes that miss a right angle most miss it, in degrees."""
    directions = affine[:3, :3] / column_lengths(affine)
    cosines = np.abs(directions.T @ directions - np.eye(3))
    return math.degrees(math.asin(min(1.0, float(cosines.max()))))


def is_sheared(affine: Affine) -> bool:
    """Tell whether axes are not at right angles, as in a CT of a tilted gantry."""
    return shear_degrees(affine) > SHEARED_DEGREES


def axes_between(source: Affine, target: Affine) -> npt.NDArray[np.float64]:
    """Return which axis of one grid runs along which of another, in nibabel's form, (3, 2).

    It is the order and direction that brings an array of the source closest to the target. Near 45
    degrees the nearest anatomical axes of two grids may differ by noise; these do not.

    Args:
        source: Affine of the array that would be reoriented.
        target: Affine of the grid that it is to lie on.
    """
    orientation: npt.NDArray[np.float64] = nib.io_orientation(np.linalg.solve(target, source))
    return orientation


def corners_apart_mm(a: Affine, b: Affine, shape: Shape) -> float:
    """Return how far apart the same corner of two grids of one shape lies at most, in mm."""
    return float(np.linalg.norm((_corners(a, shape) - _corners(b, shape)), axis=0).max())


def corner_tolerance_mm(affine: Affine, shape: Shape, spacing_mm: Sequence[float]) -> float:
    """Return how far apart corners of one grid may lie in two files, in mm.

    A tenth of the finest spacing; more where single precision, in which files store affines, cannot
    tell so small a distance that far from the origin.

    Args:
        affine: Of either grid.
        shape: Its voxels.
        spacing_mm: Its spacing.
    """
    rounding_mm = FLOAT32_ROUNDING * float(np.abs(_corners(affine, shape)).max())
    return min(max(min(spacing_mm) / 10, rounding_mm), MAX_DISTANCE * min(spacing_mm))


def _corners(affine: Affine, shape: Shape) -> npt.NDArray[np.float64]:
    corners = np.indices((2, 2, 2)).reshape(3, -1) * (np.array(shape)[:, None] - 1)
    located: npt.NDArray[np.float64] = affine[:3, :3] @ corners + affine[:3, 3:]
    return located
