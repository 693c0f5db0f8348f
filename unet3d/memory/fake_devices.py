"""Devices that stand for GPUs that are not here, so that memory can be predicted without them.

A fake tensor has a shape, a type and a device, but no memory. PyTorch built for CPUs cannot record
a backward pass of fake tensors on CUDA devices, but it can on numbered CPU devices, which real
tensors never name: ``cpu:1`` stands for ``cuda:1``, and ``cpu`` for itself.
"""

import torch


def fake_device(device: torch.device) -> torch.device:
    """Return the device on which a fake tensor stands for a real one on ``device``."""
    return torch.device("cpu", device.index or 0) if device.type == "cuda" else device


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or is_fake_device(device)


def is_fake_device(device: torch.device) -> bool:
    """Return whether a device only stands for a GPU."""
    return device.type == "cpu" and device.index is not None
