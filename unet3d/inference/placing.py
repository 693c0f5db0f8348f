"""Where a trained network predicts: the mode, the precision, and the executor of this process."""

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from unet3d.config import ParallelSettings, Shape
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.inference.sliding_window import computed_window
from unet3d.model import BlockNetwork
from unet3d.parallel import (
    Executor,
    Layout,
    ParallelDims,
    autocast_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.precision import precision_on
from unet3d.parallel.spatial.division import SlabRule
from unet3d.runs.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

Window = Shape | Literal["auto", "whole"]


@dataclass(frozen=True, kw_only=True)
class PlacedNetwork:
    """A network on the devices of this process."""

    executor: Executor | SharedExecutor
    """What predicts; of several ranks, what the first one predicts with and the others follow."""
    precision: str
    """Its number type."""


def choose_mode(
    settings: ParallelSettings, checkpoint: Checkpoint, window: Window, ranks: Ranks
) -> ParallelSettings:
    """Return the settings with a mode in place of ``auto``.

    Devices of one kind each take a slab of every window, if it has enough planes for them; others
    take a stage of the network each.

    Args:
        settings: Mode and devices.
        checkpoint: The network.
        window: Voxels along X, Y, Z; ``auto``: those of training.
        ranks: The place of this process.

    Raises:
        ConfigError: Several ranks were started for a mode that runs in one.
        DeviceError: A device is unknown or absent.
    """
    if ranks.world_size > 1:
        if settings.mode not in ("auto", "spatial"):
            raise ConfigError(
                f"{ranks.world_size} ranks were started, but --parallel {settings.mode} predicts "
                "in one process; use --parallel spatial, or do not use torchrun"
            )
        return settings.model_copy(update={"mode": "spatial"})
    if settings.mode != "auto":
        return settings
    dims = ParallelDims.resolve(settings)
    mode: str = dims.mode
    if mode == "spatial" and not _is_divisible(checkpoint, window, dims.num_shards):
        mode = "model"
    return settings.model_copy(update={"mode": mode})


def _is_divisible(checkpoint: Checkpoint, window: Window, num_shards: int) -> bool:
    """Return whether windows have planes for all shards, as far as their size is known."""
    topology = checkpoint.topology
    if topology.norm == "batch":
        return False
    wanted = checkpoint.patch_size if window == "auto" else window
    if wanted is None or wanted == "whole":
        return True
    voxels = computed_window(wanted, topology.total_stride)
    return SlabRule(topology=topology, num_shards=num_shards).most_shards(voxels) >= num_shards


def place_network(
    checkpoint: Checkpoint, parallel: ParallelSettings, group: Group
) -> PlacedNetwork:
    """Place a trained network on devices; all ranks call it.

    Args:
        checkpoint: A network trained in any mode.
        parallel: Where to run; it need not be where the network was trained.
        group: The ranks, connected; each has a slab of every window.

    Raises:
        DeviceError: A device does not exist, or has too little memory.
        ConfigError: The mode needs ranks that are not there.
        CheckpointError: The parameters do not belong to the network.
    """
    dims = ParallelDims.resolve(parallel, ranks=group.ranks)
    if dims.num_shards != group.size:
        raise ConfigError(
            f"parallel mode {dims.mode} over {len(dims.all_devices)} devices needs a process for "
            "each, which unet3d predict starts; here, use parallel mode model"
        )
    # A network trained in float64 or float32 stays there.
    is_double = any(value.dtype == torch.float64 for value in checkpoint.model.values())
    wanted = "float64" if is_double else checkpoint.config.training.precision
    # Lower ones suit the devices of training, which need not be these.
    precision = resolve_precision(
        wanted if wanted in ("float32", "float64") else "auto", dims.devices, group.exchange
    )
    layout = Layout(
        devices=dims.devices,
        cuts=parallel.cuts,
        autocast=autocast_dtype(precision),
        num_shards=dims.num_shards,
        shard=dims.shard_of(group.ranks.rank),
    )
    logger.info(
        "computing %s%s",
        " and ".join(
            f"on {device} in {precision_on(device, precision)}"
            for device in dict.fromkeys(dims.all_devices)
        ),
        f", each window in {dims.num_shards} slabs" if dims.num_shards > 1 else "",
    )

    def make_executor() -> Executor:
        return _executor(checkpoint.build_model(), layout, group)

    if group.size == 1:
        executor: Executor | SharedExecutor = make_executor()
    else:
        executor = SharedExecutor(make_executor, group, parallel.timeout_seconds)
    executor.module.eval()
    return PlacedNetwork(executor=executor, precision=precision)


def _executor(model: BlockNetwork, layout: Layout, group: Group) -> Executor:
    try:
        return parallelize(model, layout, group if group.size > 1 else None)
    except torch.OutOfMemoryError as error:
        devices = ", ".join(map(str, dict.fromkeys(layout.devices)))
        raise DoesNotFitError(
            f"the network does not fit on {devices} beside what others hold there; use other "
            "devices, or more of them"
        ) from error
