"""The three planes through the largest structure of a label map, and their visible part.

Arrays are ``(X, Y, Z)``. Only some planes are read at once, so arrays may be memory-mapped files
larger than the memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.images.scratch import parts

MARGIN = 0.15
"""Margin around the structures on either side, as a share of their extent."""

MIN_SHARE = 1 / 3
"""Least share of the volume shown along each axis, so that the position is recognisable."""

Ends = tuple[int, int]
"""The first voxel along an axis, and the voxel after the last."""

Labels = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A label or region, outlined in one colour."""

    name: str
    values: tuple[int, ...]
    """Values in the label map."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Where the structures of a label map lie."""

    num_voxels: tuple[int, ...]
    """Number of voxels of each structure, in their order."""
    largest: int | None
    """Index of the structure with the most voxels; None without any structure."""
    position: tuple[int, int, int]
    """Along X, Y and Z, the plane in which the largest structure has its largest area; without any
    structure the middle one."""
    box: tuple[Ends, Ends, Ends] | None
    """Bounding box of all structures along X, Y and Z; None without any structure."""


def survey(labels: Labels, structures: Sequence[Structure]) -> Survey:
    """Return the positions of structures, reading a label map twice, part by part."""
    shape = labels.shape
    values = np.array(sorted({value for one in structures for value in one.values}), np.int64)
    counts = np.zeros(len(values), np.int64)
    filled = [np.zeros(size, bool) for size in shape]
    for part in parts(labels):
        plane = np.asarray(labels[part])
        inside = np.isin(plane, values)
        for axis, there in enumerate(filled):
            there[part[axis]] |= inside.any(axis=_others(axis))
        found = np.searchsorted(values, plane[inside])
        counts += np.bincount(found, minlength=len(values))
    num_voxels = tuple(int(counts[np.searchsorted(values, one.values)].sum()) for one in structures)
    if not any(num_voxels):
        middle = (shape[0] // 2, shape[1] // 2, shape[2] // 2)
        return Survey(num_voxels=num_voxels, largest=None, position=middle, box=None)
    largest = int(np.argmax(num_voxels))
    areas = [np.zeros(size, np.int64) for size in shape]
    for part in parts(labels):
        inside = np.isin(labels[part], structures[largest].values)
        for axis, area in enumerate(areas):
            area[part[axis]] += inside.sum(axis=_others(axis))
    x_box, y_box, z_box = (_ends(there) for there in filled)
    x, y, z = (_fullest(area) for area in areas)
    return Survey(
        num_voxels=num_voxels, largest=largest, position=(x, y, z), box=(x_box, y_box, z_box)
    )


def plane_of(labels: Labels, axis: int, index: int) -> Labels:
    """Return a copy of one plane along an axis."""
    plane = np.moveaxis(labels, axis, 0)[index]
    copied = np.empty(plane.shape, labels.dtype)
    for part in parts(plane, part_bytes=1):  # one line at a time, which may lie in many pages
        copied[part] = plane[part]
    return copied


def visible_box(surveys: Sequence[Survey], shape: Sequence[int]) -> tuple[Ends, Ends, Ends]:
    """Return the visible part along X, Y and Z: the structures of all maps, with a margin."""
    boxes = [found.box for found in surveys if found.box is not None]
    shown = []
    for axis, size in enumerate(shape):
        first = min((box[axis][0] for box in boxes), default=0)
        last = max((box[axis][1] for box in boxes), default=size)
        extent = math.ceil((last - first) * (1 + 2 * MARGIN))
        wanted = min(size, max(extent, math.ceil(size * MIN_SHARE)))
        begin = min(max((first + last - wanted) // 2, 0), size - wanted)
        shown.append((begin, begin + wanted))
    return shown[0], shown[1], shown[2]


def _others(axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(3) if other != axis)


def _ends(there: npt.NDArray[np.bool_]) -> Ends:
    found = np.flatnonzero(there)
    return int(found[0]), int(found[-1]) + 1


def _fullest(areas: npt.NDArray[np.int64]) -> int:
    """Return the middle one of the planes with the largest area."""
    best = np.flatnonzero(areas == areas.max())
    return int(best[len(best) // 2])


@dataclass(frozen=True, kw_only=True)
class View:
    """A direction of view."""

    name: str
    across: int
    """The axis perpendicular to the plane."""
    horizontal: int
    vertical: int
    """The axis that runs to the top of the picture."""


CORONAL = View(name="coronal", across=1, horizontal=0, vertical=2)
SAGITTAL = View(name="sagittal", across=0, horizontal=1, vertical=2)
AXIAL = View(name="axial", across=2, horizontal=0, vertical=1)


VIEWS = (CORONAL, SAGITTAL, AXIAL)
