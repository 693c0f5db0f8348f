"""Patch and batch as large as a given memory allows, and the largest patch of a given aspect.

The rules are nnU-Net's (Isensee et al., Nature Methods 2021, arXiv 1809.10486): the patch begins as
a cube in mm, clipped to the median volume, and the axis that has the largest share of that volume
shrinks until a batch of two fits; then the batch grows, up to 5 % of the voxels of the data set.
nnU-Net counts elements of feature maps; here memory is predicted, so settings that save memory make
the patch larger.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from unet3d.config import Config, Shape, Spacing
from unet3d.errors import ConfigError
from unet3d.model import Topology
from unet3d.patches.patches import padded_shape
from unet3d.planning.memory_estimate import GIB, MemoryEstimate, Step, predict_memory

GPU_SHARE = 0.9
"""Largest share of a GPU's memory that a step is planned for."""
START_VOXELS = 256**3
"""Voxels of the cube (in mm) that the search for a patch begins with, as in nnU-Net; doubled while
the cube fits."""
MIN_BATCH = 2
"""Batch size that the patch is planned for, as in nnU-Net."""
MAX_BATCH = 32
"""Most patches in a planned batch. nnU-Net has no such limit, but its learning rates were chosen
with batches of 2 to about 10."""
MIN_EDGE = 8
"""A patch is never shrunk below this many voxels along an axis: fewer cannot be halved."""
MAX_SHARE = 0.05
"""Largest share of the voxels of all cases that a planned batch has, as in nnU-Net."""
MAX_EDGE = 2**14
"""Most voxels of a patch along an axis: more than any device can hold."""


def within_gpus(config: Config, gpu_bytes: Collection[int]) -> Config:
    """Return settings with ``patches.memory_gib`` limited to 90 % of the smallest GPU.

    Settings with fixed patch and batch do not change.
    """
    if not gpu_bytes or (config.patches.size != "auto" and config.training.batch_size != "auto"):
        return config
    most = math.floor(100 * GPU_SHARE * min(gpu_bytes) / GIB) / 100
    if most >= config.patches.memory_gib:
        return config
    return config.with_values({"patches.memory_gib": most})


def plan_patch(
    load: Callable[[Shape], float],
    plan: Callable[[Shape], Topology],
    shape: Shape,
    spacing_mm: Spacing,
) -> tuple[Shape, str]:
    """Return the largest patch that fits, a multiple of its network's strides, and what limits it.

    ``load`` returns the share of the allowed memory that a batch of patches of a size takes.
    ``shape`` is the median volume's. If no patch fits, the result is the smallest patch that the
    settings allow.
    """
    voxels = START_VOXELS
    start = cube_in_mm(shape, spacing_mm, voxels)
    while start != shape and load(_padded(plan, start)) <= 1:
        voxels *= 2
        start = cube_in_mm(shape, spacing_mm, voxels)
    sizes = tuple(shrinking_sizes(plan, start, shape))[::-1]
    last = largest_fitting(list(map(math.prod, sizes)), lambda index: load(sizes[index]))
    if last is None:
        return sizes[0], "the smallest, though memory is exceeded"
    return sizes[last], f"limited by {'memory' if last < len(sizes) - 1 else 'the median volume'}"


def plan_batch(
    load: Callable[[int], float], size: Shape, num_voxels: int, least: int
) -> tuple[int, str]:
    """Return the number of patches of a given size in a batch, and what limits it.

    ``load`` returns the share of the allowed memory that a number of patches takes; ``num_voxels``
    counts the voxels of all cases; ``least`` patches are taken even if they do not fit.
    """
    share = round(MAX_SHARE * num_voxels / math.prod(size))
    most = max(least, min(MAX_BATCH, max(MIN_BATCH, share)))
    counts = range(least, most + 1)
    last = largest_fitting(counts, lambda index: load(counts[index]))
    batch_size, limit = counts[last or 0], "the smallest"
    if batch_size < most or last is None:
        limit = "limited by memory"
    elif batch_size == share:
        limit = f"limited by {MAX_SHARE:.0%} of the data's voxels"
    elif batch_size == MAX_BATCH:
        limit = "the largest that is planned"
    return batch_size, limit


def cube_in_mm(shape: Shape, spacing_mm: Spacing, num_voxels: int) -> Shape:
    """Return the voxels along X, Y, Z of a cube in mm, clipped to a volume."""
    edge_mm = (num_voxels * math.prod(spacing_mm)) ** (1 / 3)
    x, y, z = (
        max(1, min(voxels, round(edge_mm / mm)))
        for voxels, mm in zip(shape, spacing_mm, strict=True)
    )
    return x, y, z


def shrinking_sizes(
    plan: Callable[[Shape], Topology], start: Shape, shape: Shape
) -> Iterator[Shape]:
    """Yield shrinking patches, each a multiple of the strides of its own network.

    The axis that is largest relative to the volume shrinks to the next size that can be halved.
    """
    size: Shape | None = _padded(plan, start)
    while size is not None:
        yield size
        size = _next_smaller(plan, size, shape)


def _next_smaller(plan: Callable[[Shape], Topology], size: Shape, shape: Shape) -> Shape | None:
    shares = [voxels / available for voxels, available in zip(size, shape, strict=True)]
    for axis in sorted(range(3), key=shares.__getitem__, reverse=True):
        for voxels in range(size[axis] - 1, MIN_EDGE - 1, -1):
            x, y, z = (voxels if other == axis else size[other] for other in range(3))
            try:
                smaller = _padded(plan, (x, y, z))
            except ConfigError:  # too few voxels for the levels that are set
                break
            # With thick slices, fewer voxels along one axis may allow more halvings of another.
            if smaller[axis] < size[axis] and math.prod(smaller) < math.prod(size):
                return smaller
    return None


def _padded(plan: Callable[[Shape], Topology], size: Shape) -> Shape:
    return padded_shape(size, plan(size).total_stride)


def largest_fitting(
    weights: Sequence[float], load: Callable[[int], float], first: int | None = None
) -> int | None:
    """Return the index of the largest size that fits, or None.

    ``weights`` are a positive measure of each size, such as its voxels, in ascending order. Memory
    grows nearly linearly with them, so the search goes to where a line through the last two answers
    reaches the limit. ``load`` returns the share of the allowed memory that the size with an index
    needs; the search begins with the index ``first``, by default the last, which often fits.
    """
    fitting, too_large = -1, len(weights)
    weight, found = 0.0, 0.0
    asked = too_large - 1 if first is None else first
    while too_large - fitting > 1:
        before = (weight, found)
        weight, found = weights[asked], load(asked)
        fitting, too_large = (asked, too_large) if found <= 1 else (fitting, asked)
        slope = (found - before[1]) / (weight - before[0])
        aim = weight + (1 - found) / slope if slope > 0 else 0.0
        asked = min(max(bisect_right(weights, aim) - 1, fitting + 1), too_large - 1)
    return fitting if fitting >= 0 else None


def largest_size(
    step: Step,
    device_bytes: Mapping[torch.device, int],
    predicted: MemoryEstimate | None = None,
) -> Shape | None:
    """Return the largest patch with the step's aspect that fits, or None.

    With slabs, the whole patch grows, and the fullest slab counts. ``predicted`` is an existing
    prediction for the step.
    """
    stride = step.topology.total_stride
    units = [max(1, round(voxels / one)) for voxels, one in zip(step.size, stride, strict=True)]
    longest = max(units)

    def scaled(scale: int) -> Shape:
        x, y, z = (
            max(1, round(unit * scale / longest)) * one
            for unit, one in zip(units, stride, strict=True)
        )
        return x, y, z

    # The network refuses a single voxel at its lowest level.
    least = 1 if scaled(1) != stride else 2
    while replace(step, size=scaled(least)).most_shards() < step.layout.num_shards:
        least += 1
    most = max(longest, least, MAX_EDGE // stride[units.index(longest)])
    sizes = [scaled(scale) for scale in range(least, most + 1)]

    def load(index: int) -> float:
        sized = replace(step, size=sizes[index]).fullest()
        known = predicted if predicted and sized == predicted.step else predict_memory(sized)
        return known.load(device_bytes)

    last = largest_fitting(list(map(math.prod, sizes)), load, max(longest - least, 0))
    return None if last is None else sizes[last]
