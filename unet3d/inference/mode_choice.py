"""Which mode trained networks predict in, where the settings leave that open."""

import math
from collections.abc import Sequence

import torch

from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.inference.networks import Networks
from unet3d.inference.window_memory import GPU_SHARE, bytes_of_voxel
from unet3d.inference.windows import computed_window, window_of
from unet3d.memory.record import device_bytes
from unet3d.parallel import ParallelDims
from unet3d.parallel.spatial.division import SlabRule
from unet3d.runs.checkpoint import Checkpoint


def choose_mode(
    settings: ParallelSettings,
    networks: Networks,
    inference: Sequence[InferenceSettings],
    ranks: Ranks,
) -> ParallelSettings:
    """Return the settings with a mode in place of ``auto``.

    Devices of one kind each take a replica, and a part of every batch of windows. Where windows are
    too large for one of them, or are whole volumes, each takes a slab of every window, if it has
    enough planes for them. Other devices take a stage of the network each.
    """
    if ranks.world_size > 1:
        if settings.mode not in ("auto", "data", "spatial"):
            raise ConfigError(
                f"{ranks.world_size} ranks were started, but --parallel {settings.mode} predicts "
                "in one process; use --parallel spatial, or do not use torchrun"
            )
        # In mode data each of them has scans of its own.
        of_ranks = "spatial" if settings.mode == "auto" else settings.mode
        return settings.model_copy(update={"mode": of_ranks})
    if settings.mode != "auto":
        return settings
    dims = ParallelDims.resolve(settings)
    mode = dims.mode
    if mode == "spatial":
        wanted = list(zip(networks.described, inference, strict=True))
        if all(_fits_each(network, one, dims.all_devices) for network, one in wanted):
            mode = "data"
        elif not all(_is_divisible(network, one, dims.num_shards) for network, one in wanted):
            mode = "model"
    return settings.model_copy(update={"mode": mode})


def _fits_each(
    checkpoint: Checkpoint, settings: InferenceSettings, devices: Sequence[torch.device]
) -> bool:
    """Return whether windows have a size, of which a batch would not be too large for any device.

    What others hold of its memory does not count: asking for it would take some, for a process that
    may only start others.
    """
    window, topology = window_of(checkpoint, settings), checkpoint.topology
    if window == "whole":
        return False
    voxels = math.prod(computed_window(window, topology.total_stride))
    of_voxel = bytes_of_voxel(
        topology,
        checkpoint.dtype,
        len(devices),
        is_mirrored=bool(checkpoint.mirrored_axes(settings)),
    )
    needed = voxels * of_voxel
    return all(needed <= GPU_SHARE * device_bytes(device) for device in devices)


def _is_divisible(network: Checkpoint, settings: InferenceSettings, num_shards: int) -> bool:
    """Return whether windows have planes for all shards, as far as their size is known."""
    topology, window = network.topology, window_of(network, settings)
    if topology.norm == "batch":
        return False
    if window == "whole":
        return True
    voxels = computed_window(window, topology.total_stride)
    return SlabRule(topology=topology, num_shards=num_shards).most_shards(voxels) >= num_shards
