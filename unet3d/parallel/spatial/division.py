"""How a volume is divided into slabs along X.

Planes are contiguous in channels-last memory, and folding needs Z, so X is the axis that is
divided. The low levels of a network are tiny: exchanging planes takes longer than computing them,
and there may be fewer planes than devices. So low levels stay whole, and every device computes
them.
"""

import itertools
import math
import operator
from dataclasses import dataclass

from unet3d.config import Shape
from unet3d.errors import DeviceError
from unet3d.model import Topology

MIN_DIVIDED_ELEMENTS = 2**21
"""Elements of a whole map above which its level is divided. On an H200 a smaller map takes less
time than the messages of its normalisations."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """A volume in slabs."""

    bounds: tuple[int, ...]
    """First plane of each slab at level 0, and the end of the last slab."""
    num_divided: int
    """Number of divided levels, from level 0 on; the others are whole on every device."""
    steps: tuple[int, ...]
    """Planes of level 0 per plane of each level."""

    @property
    def num_shards(self) -> int:
        """Number of slabs."""
        return len(self.bounds) - 1

    def planes(self, level: int = 0) -> int:
        """Return the number of planes of the whole volume at a level."""
        return self.bounds[-1] // self.steps[level]

    def slab(self, shard: int, level: int = 0) -> range:
        """Return the planes of a shard's slab at a divided level."""
        step = self.steps[level]
        return range(self.bounds[shard] // step, self.bounds[shard + 1] // step)

    def most_planes(self) -> int:
        """Return the number of planes of level 0 in the largest slab."""
        return max(stop - start for start, stop in itertools.pairwise(self.bounds))


@dataclass(frozen=True, kw_only=True)
class SlabRule:
    """Divides volumes of any size for a network."""

    topology: Topology
    """The network."""
    num_shards: int
    """Number of slabs."""

    def divide(self, size: Shape) -> Division:
        """Divide a volume of a size along X, Y, Z, multiples of the total stride.

        Raises:
            DeviceError: The volume has fewer planes than slabs, at full resolution or at the lowest
                level with a head.
        """
        steps = _steps(self.topology)
        num_divided = self.topology.num_heads
        most = self.most_shards(size)
        if most < self.num_shards:
            heads = " at the lowest level with a head" if num_divided > 1 else ""
            raise DeviceError(
                f"a volume of {'x'.join(map(str, size))} voxels has {most} planes along X{heads}, "
                f"too few for {self.num_shards} devices of one replica; use at most {most}"
            )
        while num_divided < self.topology.num_levels and self._is_worth_it(num_divided, size):
            num_divided += 1
        return divide(size[0], self.num_shards, steps, num_divided)

    def slab(self, shard: int, size: Shape) -> range:
        """Return the planes of one slab at full resolution; see :meth:`divide`."""
        return self.divide(size).slab(shard)

    def most_shards(self, size: Shape) -> int:
        """Return the largest number of slabs of a volume of a size along X, Y, Z."""
        return size[0] // _steps(self.topology)[self.topology.num_heads - 1]

    def _is_worth_it(self, level: int, size: Shape) -> bool:
        """Return whether a level has a plane for each slab, and large enough maps."""
        strides = self.topology.strides[: level + 1]
        x, y, z = (
            voxels // math.prod(stride[axis] for stride in strides)
            for axis, voxels in enumerate(size)
        )
        elements = self.topology.channels[level] * x * y * z
        return x >= self.num_shards and elements > MIN_DIVIDED_ELEMENTS


def divide(planes: int, num_shards: int, steps: tuple[int, ...], num_divided: int) -> Division:
    """Return slabs of nearly equal size, the larger ones first.

    ``planes`` of level 0 are a multiple of the step of the lowest divided level, and at least one
    such step for each shard.
    """
    unit = steps[num_divided - 1]
    size, rest = divmod(planes // unit, num_shards)
    sizes = ((size + (shard < rest)) * unit for shard in range(num_shards))
    bounds = tuple(itertools.accumulate(sizes, initial=0))
    return Division(bounds=bounds, num_divided=num_divided, steps=steps)


def _steps(topology: Topology) -> tuple[int, ...]:
    return tuple(itertools.accumulate((stride[0] for stride in topology.strides), operator.mul))
