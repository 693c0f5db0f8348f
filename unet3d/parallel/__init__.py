"""Spreading one network over devices.

``placement`` names devices and slots, ``partition`` cuts the block list into stages, ``schedule``
says when each micro-batch runs where, ``transfer`` copies between devices, ``offload`` parks skips
in host memory, ``pipeline`` does it, and ``graphs`` replays it on GPUs. ``replicas`` keeps the
copies of a network equal, ``process_group`` is what their ranks say to one another, ``launcher``
starts them and ``joining`` brings them together. ``costs`` counts bytes and takes times of blocks,
``balance`` finds the cut that they ask for.
"""

from typing import Any

from unet3d.distributed.group import Group
from unet3d.distributed.rendezvous import joined
from unet3d.model import UNet3d
from unet3d.parallel.balance.cuts import choose_cuts
from unet3d.parallel.cuda_graphs import RecordedPipeline
from unet3d.parallel.executor import Executor, LossFunction
from unet3d.parallel.partition import default_cuts, make_stages
from unet3d.parallel.placement import (
    Layout,
    Slot,
    devices_of_rank,
    devices_of_replicas,
    output_device,
    resolve_devices,
)
from unet3d.parallel.precision import (
    check_precision,
    default_precision,
)
from unet3d.parallel.replicas import DataParallelExecutor, ReplicaExecutor, check_data_parallel
from unet3d.parallel.schedule import SCHEDULES

__all__ = [
    "DataParallelExecutor",
    "Executor",
    "Group",
    "Layout",
    "LossFunction",
    "Slot",
    "check_data_parallel",
    "check_precision",
    "choose_cuts",
    "default_precision",
    "devices_of_rank",
    "devices_of_replicas",
    "joined",
    "output_device",
    "parallelize",
    "resolve_devices",
]


def parallelize(model: UNet3d, layout: Layout, group: Group | None = None) -> Executor:
    """Place a network on devices.

    Args:
        model: The network; its parameters are moved.
        layout: Devices, cuts, micro-batches and precision.
        group: The ranks that train copies of it together; None: this process alone.

    Raises:
        DeviceError: There are more devices than blocks, or the cuts do not fit them.
        ConfigError: The network cannot be trained in this layout.
    """
    cuts = default_cuts(model, len(layout.devices)) if layout.cuts is None else layout.cuts
    stages = make_stages(model.blocks(), layout.devices, cuts, model.outputs())
    settings: dict[str, Any] = {
        "module": model,
        "stages": stages,
        "num_micro_batches": layout.num_micro_batches,
        "schedule": SCHEDULES[layout.schedule],
        "autocast": layout.autocast,
        "recompute": layout.recompute,
        "offloads_skips": layout.offload == "skips",
    }
    if group is not None and group.size > 1:
        return ReplicaExecutor(**settings, group=group)
    return RecordedPipeline(**settings)
