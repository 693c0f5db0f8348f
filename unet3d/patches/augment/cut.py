"""What is cut out of a case for one patch, and where the patch's voxels lie in it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.patches.augment.draw import Axes, DrawnChannel, Matrix
from unet3d.patches.augment.filters import ChannelFilters

Rows = tuple[Axes, Axes, Axes]
"""A matrix (3, 3)."""

NEGLIGIBLE_VOXEL = 1e-6
"""A point that is so close to a voxel is at it; the box need not reach beyond."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A box of a patch."""

    start: Shape
    """Its first voxel along X, Y, Z."""
    stop: Shape
    """The voxel after its last one."""

    @property
    def shape(self) -> Shape:
        """Voxels along X, Y, Z."""
        x, y, z = (stop - start for start, stop in zip(self.start, self.stop, strict=True))
        return (x, y, z)

    @property
    def is_empty(self) -> bool:
        """Whether it has no voxel."""
        return min(self.shape) == 0

    def inside(self, outer: "Region") -> tuple[slice, slice, slice]:
        """Return where it lies in a larger region.

        Args:
            outer: The larger one.
        """
        x, y, z = (
            slice(first - outer_first, last - outer_first)
            for first, last, outer_first in zip(self.start, self.stop, outer.start, strict=True)
        )
        return (x, y, z)


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Some planes along X of a batch; a patch that is smaller than the batch lies in its middle."""

    planes: range
    """The planes."""
    num_planes: int
    """Those of the whole batch."""

    def region(self, size: Shape) -> Region:
        """Return what of a patch lies in the slab; it may be nothing.

        Args:
            size: Voxels of the patch along X, Y, Z.
        """
        before = middle(self.num_planes, size[0])
        first, last = (
            min(max(plane - before, 0), size[0]) for plane in (self.planes.start, self.planes.stop)
        )
        return Region(start=(first, 0, 0), stop=(last, size[1], size[2]))

    def place(self, cut: "Cut", shape: Sequence[int]) -> tuple[slice, slice, slice]:
        """Return where what is made of a cut lies in the slab.

        Args:
            cut: Of :meth:`region`.
            shape: Voxels of the slab along X, Y, Z.
        """
        first_x = middle(self.num_planes, cut.size[0]) + cut.region.start[0] - self.planes.start
        starts = (first_x, middle(shape[1], cut.size[1]), middle(shape[2], cut.size[2]))
        x, y, z = (
            slice(first, first + voxels)
            for first, voxels in zip(starts, cut.region.shape, strict=True)
        )
        return (x, y, z)


def middle(available: int, voxels: int) -> int:
    """Return where voxels begin that lie in the middle of others.

    Args:
        available: How many there are.
        voxels: How many lie there.
    """
    return (available - voxels) // 2


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the voxels of a patch lie in a case, or in a box of it: ``matrix @ voxel + offset``."""

    matrix: Rows
    offset: Axes
    """Place of the patch's first voxel, in voxels of the case."""

    @staticmethod
    def centred(matrix: Matrix | None, start: Sequence[int], size: Shape) -> "Placement":
        """Return the placement of a patch that is turned about its centre.

        Args:
            matrix: As drawn; None: the identity.
            start: First voxel of the patch in the case, were it not turned.
            size: Voxels of the patch.
        """
        if matrix is None:
            matrix = np.eye(3)
        centre = (np.array(size) - 1) / 2
        x, y, z = (np.array(start) + centre - matrix @ centre).tolist()
        rows = tuple((a, b, c) for a, b, c in matrix.tolist())
        return Placement(matrix=(rows[0], rows[1], rows[2]), offset=(x, y, z))

    def moved(self, by: Sequence[int]) -> "Placement":
        """Return the placement in a box.

        Args:
            by: The first voxel of the box in the case.
        """
        x, y, z = (at - first for at, first in zip(self.offset, by, strict=True))
        return replace(self, offset=(x, y, z))

    def box(self, region: Region, available: Shape) -> Region:
        """Return the voxels of a case that a region of the patch is interpolated from.

        Args:
            region: Of the patch.
            available: Voxels of the case; what lies outside is not in the box, but at least one
                voxel is, where the region lies outside altogether or is empty.
        """
        if region.is_empty:
            return Region(start=(0, 0, 0), stop=(1, 1, 1))
        first, last = np.array(region.start), np.array(region.stop) - 1
        matrix = np.array(self.matrix)
        middle = matrix @ ((first + last) / 2) + np.array(self.offset)
        reach = np.abs(matrix) @ ((last - first) / 2)
        start, stop = [], []
        for centre, half, voxels in zip(middle, reach, available, strict=True):
            low = math.floor(centre - half + NEGLIGIBLE_VOXEL)
            high = math.ceil(centre + half - NEGLIGIBLE_VOXEL) + 1
            start.append(min(max(low, 0), voxels - 1))
            stop.append(max(min(high, voxels), start[-1] + 1))
        return Region(start=(start[0], start[1], start[2]), stop=(stop[0], stop[1], stop[2]))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A box of a case that holds all that a patch, or a region of it, is made from."""

    image: Tensor
    """float16 or float32 (C, X, Y, Z), intensities as they are stored."""
    label: Tensor
    """Class indices (X, Y, Z): uint8, or int64 where there are more than 256 classes."""
    placement: Placement
    """Where the patch's voxels lie in the box."""
    channels: tuple[DrawnChannel, ...]
    """What happens to the intensities of each channel; empty: nothing."""
    filters: tuple[ChannelFilters, ...]
    """What blurs each channel and takes its resolution."""
    size: Shape
    """Voxels of the whole patch along X, Y, Z."""
    region: Region
    """The voxels of the patch that are wanted."""
    made: Region
    """The voxels that are made for that, :attr:`region` and what it depends on."""
    name: str
    """The case."""

    def to(self, device: torch.device) -> "Cut":
        """Return a copy on a device; from page-locked memory nobody waits for it.

        Args:
            device: Any device.
        """
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, move: Callable[[Tensor], Tensor]) -> "Cut":
        """Return it with its tensors elsewhere.

        Args:
            move: Returns a tensor like a given one; it is called in the same order for equal cuts.
        """
        return replace(
            self,
            image=move(self.image),
            label=move(self.label),
            filters=tuple(filters.each(move) for filters in self.filters),
        )


def with_margin(region: Region, filters: Sequence[ChannelFilters], size: Shape) -> Region:
    """Return a region with the voxels around it that its intensities depend on.

    Args:
        region: Of a patch.
        filters: Those of its channels.
        size: Voxels of the patch.
    """
    start, stop = [], []
    for axis, voxels in enumerate(size):
        margin = max((channel.reach(axis) for channel in filters), default=0)
        start.append(max(0, region.start[axis] - margin))
        stop.append(min(voxels, region.stop[axis] + margin))
    return Region(start=(start[0], start[1], start[2]), stop=(stop[0], stop[1], stop[2]))
