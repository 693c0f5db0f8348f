"""What windows take of memory: how many fit at a time, and where the image around them has room."""

import math
from collections.abc import Sequence

import torch

from unet3d.config import Shape
from unet3d.errors import DoesNotFitError
from unet3d.images.files import times
from unet3d.images.memory_limits import FLOAT32_BYTES
from unet3d.memory.fake_devices import is_gpu
from unet3d.memory.host import shortage
from unet3d.model import Topology
from unet3d.runs.checkpoint import Checkpoint

CPU_VOXELS = 2**20
"""Voxels of the windows that a CPU computes at a time. Small windows alone take longer: of channels
4 and 8, one of 16^3 takes 2.7 ms, with 63 others 0.4; of 32 to 320 channels, one of 64^3 172 ms,
with three others 153. Beyond so many voxels there is nothing to gain (docs/benchmarks.md)."""

GPU_VOXELS = 2**23
"""Voxels of the windows that a GPU computes at a time, if it has the memory: on an H200 588 windows
of 128^3 took 5.1 s one by one, 3.3 s in pairs and 2.7 s four at a time."""

GPU_SHARE = 1 / 4
"""Of what is free on it, the part that they may take."""

MAPS_OF_FINEST_LEVEL = 3
"""The skip, what is upsampled to it, and the result of both."""

BFLOAT16_BYTES = 2


def bytes_of_maps(topology: Topology) -> int:
    """Return what the maps of a voxel of a window take while it is computed."""
    return MAPS_OF_FINEST_LEVEL * topology.channels[0] * BFLOAT16_BYTES


def bytes_of_voxel(
    topology: Topology, dtype: torch.dtype, num_replicas: int = 1, *, is_mirrored: bool = False
) -> int:
    """Return what a voxel of a window takes of a GPU while it is computed: maps and logits.

    The logits of several replicas come together; those of mirror images are added up.
    """
    # As they arrive, and joined.
    num_logits = 2 * num_replicas if num_replicas > 1 else 1
    logits = num_logits * BFLOAT16_BYTES + dtype.itemsize
    if is_mirrored:  # the sum, and those of an image turned back
        logits += FLOAT32_BYTES + BFLOAT16_BYTES
    return bytes_of_maps(topology) + topology.num_classes * logits


def windows_at_a_time(
    window: Shape,
    devices: Sequence[torch.device],
    voxel_bytes: int | None = None,
    free_bytes: int | None = None,
) -> int:
    """Return how many windows are best computed in one forward pass on a network's devices.

    One on GPUs of which it is not known what a voxel takes, or where ranks know it differently.
    ``free_bytes`` of each GPU may be given, of one that is not here.
    """
    voxels = math.prod(window)
    gpus = [device for device in devices if is_gpu(device)]
    if not gpus:
        return max(1, CPU_VOXELS // voxels)
    if voxel_bytes is None:
        return 1
    if free_bytes is None:
        free_bytes = min(torch.cuda.mem_get_info(device)[0] for device in gpus)
    return max(1, min(GPU_VOXELS, int(free_bytes * GPU_SHARE) // voxel_bytes) // voxels)


def slab_device(network: Checkpoint, slab: Shape, device: torch.device) -> torch.device:
    """Return where the image around windows has room: where they are computed, or the CPU."""
    if device.type != "cuda":
        return device
    needed = network.topology.in_channels * math.prod(slab) * network.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    return device if needed <= free * GPU_SHARE else torch.device("cpu")


def refuse_beyond_host(network: Checkpoint, slab: Shape, window: Shape, num_computing: int) -> None:
    """Refuse a window that the host cannot hold: the image around it, and on a CPU the rest.

    So many ranks of this host compute each window together on a CPU; 0: on GPUs. Linux would
    promise the memory, and end this process once it is used.
    """
    topology, itemsize = network.topology, network.dtype.itemsize
    needed = topology.in_channels * math.prod(slab) * itemsize
    if num_computing:
        # Each rank has all of them for a moment, of its maps a slab.
        logits = topology.num_classes * itemsize * num_computing
        needed += (bytes_of_maps(topology) + logits) * math.prod(window)
    lacking = shortage(needed)
    if lacking is not None:
        raise DoesNotFitError(
            f"a window of {times(window)} voxels, with the image around it, {lacking}, at "
            "least; use a smaller inference.window"
        )
