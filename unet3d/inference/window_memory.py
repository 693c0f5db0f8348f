"""Where windows of a network have room, and what stands where there are none."""

import math

import torch

from unet3d.errors import DoesNotFitError
from unet3d.images.files import times
from unet3d.inference.windows import GPU_SHARE, Windows, bytes_of_maps
from unet3d.memory.host import shortage
from unet3d.runs.checkpoint import Checkpoint

CERTAIN_LOGIT = 15.0
"""A sigmoid of it is 1 to six digits, and it is a finite number in every type."""


def slab_device(network: Checkpoint, windows: Windows, device: torch.device) -> torch.device:
    """Return where the image around windows has room.

    Args:
        network: The network.
        windows: Its windows.
        device: Where they are computed.
    """
    if device.type != "cuda":
        return device
    needed = network.topology.in_channels * math.prod(windows.slab) * network.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    return device if needed <= free * GPU_SHARE else torch.device("cpu")


def empty_logits(network: Checkpoint) -> list[float]:
    """Return logits of voxels that nobody looked at: of the background, or of no region.

    Args:
        network: The network.
    """
    logits = [-CERTAIN_LOGIT] * network.topology.num_classes
    if not network.preprocessing.regions:
        logits[0] = CERTAIN_LOGIT
    return logits


def refuse_beyond_host(network: Checkpoint, windows: Windows, num_computing: int) -> None:
    """Refuse a window that the host cannot hold: the image around it, and on a CPU the rest.

    Linux would promise the memory, and end this process once it is used.

    Args:
        network: The network.
        windows: Its windows.
        num_computing: Ranks on this host that compute each window together on a CPU; 0: on GPUs.

    Raises:
        DoesNotFitError: The host has too little memory.
    """
    topology, itemsize = network.topology, network.dtype.itemsize
    needed = topology.in_channels * math.prod(windows.slab) * itemsize
    if num_computing:
        # Each rank has all of them for a moment, of its maps a slab.
        logits = topology.num_classes * itemsize * num_computing
        needed += (bytes_of_maps(topology) + logits) * math.prod(windows.shape)
    lacking = shortage(needed)
    if lacking is not None:
        raise DoesNotFitError(
            f"a window of {times(windows.shape)} voxels, with the image around it, {lacking}, at "
            "least; use a smaller inference.window"
        )
