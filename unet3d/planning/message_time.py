"""How long ranks take to tell one another what a step needs: planes, sums and gradients.

Seconds of messages add to those of the blocks: a rank waits for them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from unet3d.config import Shape
from unet3d.model import Topology
from unet3d.parallel.spatial.division import Division

BESIDE_SECONDS = 36e-6
"""What a normalisation of a slab takes on a GPU besides its messages, in small kernels for the
planes of its neighbours: four, three times, at 3 us each as in a captured step."""
SUM_BYTES = 4
"""Of a number that is summed over ranks: float32."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """How fast the devices of one machine tell one another something."""

    latency_seconds: float
    """Of any message."""
    planes_per_second: float
    """Bytes a second to a neighbour, while as many come from there, and of maps that are
    gathered."""
    sums_per_second: float
    """Bytes a second that go through a device in a sum over all: twice those that are summed, less
    the share of one."""

    def exchange(self, num_bytes: float) -> float:
        """Return the seconds in which neighbours exchange a plane of so many bytes."""
        return self.latency_seconds + num_bytes / self.planes_per_second

    def gather(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds in which all get what each has a part of."""
        others = (num_ranks - 1) / num_ranks
        return self.latency_seconds + others * num_bytes / self.planes_per_second

    def sum(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds in which all get the sum of what each has."""
        through = 2 * (num_ranks - 1) / num_ranks * num_bytes
        return self.latency_seconds + through / self.sums_per_second


NVLINK = Links(latency_seconds=12e-6, planes_per_second=175e9, sums_per_second=291e9)
"""NCCL inside a CUDA graph, measured on two H200 of one host: an exchange of half a KiB each way
takes 11 us, of half a MiB 17, of 2 MiB 24 and of 8 MiB 57; a gather of 640 floats 8 to 13 us, a sum
12; a sum of 125 MB 0.44 ms (``benchmarks/results/spatial-2026-11-23.json``)."""
LAUNCHED_LATENCY_SECONDS = 65e-6
"""Of a message that is launched and not replayed: 36 to 124 us on such GPUs."""
GLOO = Links(latency_seconds=1e-3, planes_per_second=1e9, sums_per_second=1e9)
"""Gloo between processes of one machine: orders of magnitude. Between two that shared two busy
cores, a message took 1 to 4 ms."""


def links_between(on_cpu: bool, captured: bool) -> Links:
    """Return how fast the devices of one machine tell one another something."""
    if on_cpu:
        return GLOO
    if captured:
        return NVLINK
    return Links(
        latency_seconds=LAUNCHED_LATENCY_SECONDS,
        planes_per_second=NVLINK.planes_per_second,
        sums_per_second=NVLINK.sums_per_second,
    )


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The messages of the shards of one volume in one step, but for that of the gradients."""

    division: Division
    """The slabs."""
    topology: Topology
    """The network."""
    size: Shape
    """Voxels of the whole volume along X, Y, Z."""
    element_bytes: int
    """Of a number in a map."""

    def count(self, norm_levels: Iterable[int]) -> int:
        """Return how many there are for each micro-batch; the levels are those of the norms."""
        divided = sum(level < self.division.num_divided for level in norm_levels)
        # The image's planes and the loss take the place of the last normalisation's planes.
        return 4 * divided + (2 if self._has_whole_levels() else 0)

    def seconds(self, norm_levels: Iterable[int], links: Links, num_samples: int) -> float:
        """Return what they take for one micro-batch.

        Of each normalisation in a divided level, the moments are gathered forward, and sums of its
        gradient in backward. Each time the planes beside the slab are exchanged, but not those of
        the last one, which the head reads. The map that enters the levels that are whole is
        gathered, and the gradient of what leaves them is averaged. The loss is one sum.
        """
        division, num_shards = self.division, self.division.num_shards
        divided = [level for level in norm_levels if level < division.num_divided]
        num_neighbours = min(2, num_shards - 1)

        def exchange(level: int, channels: int) -> float:
            elements = channels * self._voxels(level) / division.planes(level)
            return links.exchange(num_neighbours * num_samples * self.element_bytes * elements)

        channels = self.topology.channels
        seconds = links.latency_seconds + exchange(0, self.topology.in_channels)
        seconds += len(divided) * (2 * links.latency_seconds + BESIDE_SECONDS)
        seconds += 2 * sum(exchange(level, channels[level]) for level in divided)
        seconds -= 2 * exchange(0, channels[0])
        if self._has_whole_levels():
            above, below = division.num_divided - 1, division.num_divided
            gathered = num_samples * self.element_bytes * channels[above] * self._voxels(above)
            averaged = num_samples * SUM_BYTES * channels[below] * self._voxels(below)
            seconds += links.gather(gathered, num_shards) + links.sum(averaged, num_shards)
        return seconds

    def _has_whole_levels(self) -> bool:
        return self.division.num_divided < self.topology.num_levels

    def _voxels(self, level: int) -> int:
        """Return the voxels of a whole map."""
        strides = self.topology.strides[: level + 1]
        return math.prod(
            length // math.prod(stride[axis] for stride in strides)
            for axis, length in enumerate(self.size)
        )


def gradient_seconds(num_parameters: int, num_ranks: int, links: Links) -> float:
    """Return what it takes to average the gradients over all ranks, after a step."""
    return links.sum(SUM_BYTES * num_parameters, num_ranks)
