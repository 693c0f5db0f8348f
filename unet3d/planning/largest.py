"""The largest of rising sizes that fits, and the largest patch that a training may have."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from unet3d.config import Shape
from unet3d.planning.memory_estimate import MemoryEstimate, Step, predict_memory

MAX_EDGE = 2**14
"""Voxels along an axis above which no patch is looked for: no device holds so many."""


def largest_fitting(
    weights: Sequence[float], load: Callable[[int], float], first: int | None = None
) -> int | None:
    """Return the last of some rising sizes that fits, or None where not one does.

    Memory grows nearly linearly with the weights, such as voxels, none of which is 0. So the search
    goes to where a line through the last two answers reaches the limit. ``load`` returns the share
    of the allowed memory that the size with an index needs; it is asked about ``first`` first, by
    default about the last, which often fits.
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
    """Return the largest patch of the step's aspect that fits, or None where not one does.

    Over shards the whole patch grows, and the fullest one counts. ``predicted`` is what was
    predicted for that step, if it was.
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
        if predicted is None or sized != predicted.step:
            return predict_memory(sized).load(device_bytes)
        return predicted.load(device_bytes)

    last = largest_fitting(list(map(math.prod, sizes)), load, max(longest - least, 0))
    return None if last is None else sizes[last]
