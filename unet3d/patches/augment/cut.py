"""The box that is cut out of a case for one patch, and the places of the patch's voxels in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from unet3d.config import Shape
from unet3d.images.image import Box
from unet3d.patches.augment.draw import Axes, DrawnChannel, Matrix

Rows = tuple[Axes, Axes, Axes]
"""A matrix (3, 3)."""

NEGLIGIBLE_VOXEL = 1e-6
"""A point closer to a voxel than this, in voxels, counts as lying on it, so the box ends there."""


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Some planes along X of a batch; a patch smaller than the batch is centred in it."""

    planes: range
    num_planes: int
    """Planes of the whole batch."""

    def part(self, size: Shape) -> Box:
        """Return the part of a patch that lies in the slab; it may be empty."""
        before = middle(self.num_planes, size[0])
        first, last = (
            min(max(plane - before, 0), size[0]) for plane in (self.planes.start, self.planes.stop)
        )
        return slice(first, last), slice(0, size[1]), slice(0, size[2])

    def place(self, extent: "Extent", shape: Sequence[int]) -> Box:
        """Return the box of the wanted part of a patch in a slab of a given shape."""
        size, part = extent.size, extent.part
        first_x = middle(self.num_planes, size[0]) + part[0].start - self.planes.start
        starts = (first_x, middle(shape[1], size[1]), middle(shape[2], size[2]))
        x, y, z = (
            slice(first, first + voxels)
            for first, voxels in zip(starts, shape_of(part), strict=True)
        )
        return x, y, z


def shape_of(box: Box) -> Shape:
    """Return the voxels of a box along X, Y, Z."""
    x, y, z = (part.stop - part.start for part in box)
    return x, y, z


def start_of(box: Box) -> Shape:
    """Return the first voxel of a box."""
    x, y, z = (part.start for part in box)
    return x, y, z


def inside(box: Box, outer: Box) -> Box:
    """Return a box relative to the first voxel of a larger one."""
    x, y, z = (
        slice(part.start - whole.start, part.stop - whole.start)
        for part, whole in zip(box, outer, strict=True)
    )
    return x, y, z


def middle(available: int, voxels: int) -> int:
    """Return the index of the first of ``voxels`` that are centred in ``available`` ones."""
    return (available - voxels) // 2


class Extent(NamedTuple):
    """A part of a patch."""

    size: Shape
    """Voxels of the whole patch along X, Y, Z."""
    part: Box
    """The voxels of the patch that are wanted."""
    made: Box
    """The voxels that are computed: :attr:`part` and all voxels that it depends on."""


class Placement(NamedTuple):
    """Where the voxels of a patch lie in a case, or in a box of it: ``matrix @ voxel + offset``."""

    matrix: Rows
    offset: Axes
    """Place of the patch's first voxel, in voxels of the case."""

    @staticmethod
    def centred(matrix: Matrix | None, start: Sequence[int], size: Shape) -> "Placement":
        """Return the placement of a patch that a drawn matrix rotates about its centre.

        ``start`` is the first voxel of the unrotated patch in the case.
        """
        if matrix is None:
            matrix = np.eye(3)
        centre = (np.array(size) - 1) / 2
        x, y, z = (np.array(start) + centre - matrix @ centre).tolist()
        rows = tuple((a, b, c) for a, b, c in matrix.tolist())
        return Placement(matrix=(rows[0], rows[1], rows[2]), offset=(x, y, z))

    def moved(self, by: Sequence[int]) -> "Placement":
        """Return the placement in a box of the case that begins at a voxel."""
        x, y, z = (at - first for at, first in zip(self.offset, by, strict=True))
        return self._replace(offset=(x, y, z))

    def box(self, part: Box, available: Shape) -> Box:
        """Return the voxels of a case that a part of the patch is interpolated from.

        The box ends at the borders of the case, but has at least one voxel, even if the part is
        empty or outside.
        """
        if min(shape_of(part)) == 0:
            return slice(0, 1), slice(0, 1), slice(0, 1)
        first, last = np.array([(one.start, one.stop - 1) for one in part]).T
        matrix = np.array(self.matrix)
        centre = matrix @ ((first + last) / 2) + np.array(self.offset)
        reach = np.abs(matrix) @ ((last - first) / 2)
        low = np.floor(centre - reach + NEGLIGIBLE_VOXEL).astype(int)
        high = np.ceil(centre + reach - NEGLIGIBLE_VOXEL).astype(int) + 1
        start = np.clip(low, 0, np.array(available) - 1)
        stop = np.maximum(np.minimum(high, available), start + 1)
        x, y, z = map(slice, start.tolist(), stop.tolist())
        return x, y, z


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A box of a case with all voxels that a patch, or a part of it, is made from."""

    image: Tensor
    """float16 or float32 (C, X, Y, Z), intensities as they are stored."""
    label: Tensor
    """Class indices (X, Y, Z): uint8, or int64 where there are more than 256 classes."""
    placement: Placement
    """Where the patch's voxels lie in the box."""
    channels: tuple[DrawnChannel, ...]
    """Changes of the intensities of each channel; empty: none."""
    extent: Extent
    """The part of the patch that is made."""
    name: str
    """Name of the case."""
