"""The largest patch that a training may have on its devices."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from unet3d.config import Shape
from unet3d.planning.memory_estimate import MemoryEstimate, Step, predict_memory


def largest_size(
    step: Step,
    device_bytes: Mapping[torch.device, int],
    predicted: MemoryEstimate | None = None,
) -> Shape | None:
    """Return the largest patch that fits, or None where even the smallest does not.

    Over shards the whole patch grows, and the fullest one counts.

    The memory of a step grows nearly linearly with the voxels. So the search goes to where a line
    through the last two sizes reaches the limit, and then verifies it.

    Args:
        step: The step. Only the aspect of its patch's size matters.
        device_bytes: Memory of each device.
        predicted: What was predicted for that step; None: it is predicted here.
    """
    stride = step.topology.total_stride
    units = [max(1, round(voxels / one)) for voxels, one in zip(step.size, stride, strict=True)]

    def scaled(scale: int) -> Shape:
        x, y, z = (
            max(1, round(unit * scale / max(units))) * one
            for unit, one in zip(units, stride, strict=True)
        )
        return x, y, z

    # The network refuses a single voxel at its lowest level.
    smallest = 0 if scaled(1) != stride else 1
    while not replace(step, size=scaled(smallest + 1)).can_be_divided():
        smallest += 1
    fitting = smallest
    too_large: int | None = None
    scale = max(max(units), smallest + 1)
    last = (0, 0.0)
    while too_large is None or too_large - fitting > 1:
        voxels = math.prod(scaled(scale))
        sized = replace(step, size=scaled(scale)).fullest()
        if predicted is not None and sized == predicted.step:
            load = predicted.load(device_bytes)
        else:
            load = predict_memory(sized).load(device_bytes)
        if load <= 1:
            fitting = scale
        else:
            too_large = scale
        slope = (load - last[1]) / (voxels - last[0])
        last = (voxels, load)
        wanted = voxels + (1 - load) / slope if slope > 0 else 0
        scale = int(scale * (max(wanted, 0) / voxels) ** (1 / 3))
        if too_large is not None:
            scale = min(scale, too_large - 1)
        scale = max(scale, fitting + 1)
    return scaled(fitting) if fitting > smallest else None
