"""Spreading one network over devices.

``device_groups`` names devices and divides them over processes, ``placement`` states the result,
``precision`` chooses the number type. ``step`` trains on one device; ``pipeline`` drives the
``stages`` that ``partition`` makes, and ``mail`` carries tensors between them. ``executor`` feeds
micro-batches to ``step`` or ``pipeline``, ``exchange`` averages the gradients of ranks, and
``graph`` decides when a step is captured. ``spatial`` divides volumes instead of the network;
``data_parallel`` wraps ``nn.DataParallel``.
"""

from functools import partial

from unet3d.distributed.group import Group
from unet3d.errors import ConfigError
from unet3d.kernels import triton_support
from unet3d.kernels.conv.hopper import api as hopper
from unet3d.model import BlockNetwork, UNet3d
from unet3d.parallel.data_parallel import DataParallelExecutor
from unet3d.parallel.device_groups import Machine
from unet3d.parallel.exchange import FlatExchange
from unet3d.parallel.executor import Executor, NetworkExecutor
from unet3d.parallel.losses import LossFunction
from unet3d.parallel.placement import Layout, ParallelDims, Slot
from unet3d.parallel.precision import autocast_dtype, image_dtype, resolve_precision

__all__ = [
    "DataParallelExecutor",
    "Executor",
    "Layout",
    "LossFunction",
    "Machine",
    "ParallelDims",
    "Slot",
    "autocast_dtype",
    "image_dtype",
    "parallelize",
    "resolve_precision",
]


def parallelize(network: BlockNetwork, layout: Layout, group: Group | None = None) -> Executor:
    """Place a network on devices.

    Args:
        network: Any list of blocks, such as :class:`~unet3d.model.UNet3d`; its parameters are
            moved.
        layout: Devices, cuts, micro-batches and precision.
        group: The ranks that train copies of the network; None: this process alone.

    Raises:
        DeviceError: There are more devices than blocks, or the cuts do not fit them.
        ConfigError: The network cannot be trained in this layout.
    """
    if group is not None and group.size > 1:
        triton_support.agree(layout.devices, group.exchange)
        if layout.num_shards > 1:
            hopper.agree(layout.devices, group.exchange)
    if layout.num_shards > 1:
        if not isinstance(network, UNet3d):
            raise ConfigError("parallel mode spatial supports only a UNet3d")
        from unet3d.parallel.spatial.executor import SpatialExecutor

        return SpatialExecutor(network, layout, group)
    has_others = layout.num_replicas > 1 if group is None else group.size > 1
    if group is not None and has_others and not network.samples_are_independent:
        raise ConfigError(
            f"batch normalisation with {group.size} replicas would take its statistics from "
            "portions of the batch; use model.norm=instance"
        )
    exchange = partial(FlatExchange, group=group) if has_others else None
    return NetworkExecutor(network, layout, exchange)
