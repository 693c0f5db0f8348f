"""Spreading one network over devices.

``placement`` names devices and slots, ``partition`` cuts the block list into stages, ``schedule``
says when each micro-batch runs where, ``transfer`` copies between devices, ``pipeline`` does it.
"""

from unet3d.model import UNet3d
from unet3d.parallel.executor import Executor, LossFunction
from unet3d.parallel.partition import default_cuts, make_stages
from unet3d.parallel.pipeline import PipelineExecutor
from unet3d.parallel.placement import (
    Layout,
    Slot,
    check_precision,
    default_precision,
    resolve_devices,
)
from unet3d.parallel.schedule import Schedule, all_forward_all_backward, one_forward_one_backward

__all__ = [
    "Executor",
    "Layout",
    "LossFunction",
    "Slot",
    "check_precision",
    "default_precision",
    "parallelize",
    "resolve_devices",
]


SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_forward_one_backward,
    "all-forward": all_forward_all_backward,
}


def parallelize(model: UNet3d, layout: Layout) -> Executor:
    """Place a network on devices.

    Args:
        model: The network; its parameters are moved.
        layout: Devices, cuts, micro-batches and precision.

    Raises:
        DeviceError: There are more devices than blocks, or the cuts do not fit them.
        ConfigError: The network cannot be trained in this layout.
    """
    cuts = default_cuts(model, len(layout.devices)) if layout.cuts is None else layout.cuts
    stages = make_stages(model.blocks(), layout.devices, cuts, model.outputs())
    schedule = SCHEDULES[layout.schedule]
    return PipelineExecutor(model, stages, layout.num_micro_batches, schedule, layout.autocast)
