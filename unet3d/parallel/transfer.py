"""Copies of tensors between the devices of two stages."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's values on another device, without its graph.

    Between GPUs and onto a GPU the copy is queued, and later work on either device's current
    stream waits for it by itself. A copy to the CPU is complete on return.

    Args:
        tensor: Any; it is returned itself, detached, where it is already on the device.
        device: Where to.
    """
    return tensor.detach().to(device, non_blocking=device.type == "cuda")
