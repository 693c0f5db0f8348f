"""What a trained network computes in, before it is known what its devices have."""

from collections.abc import Sequence

import torch

from unet3d.runs.checkpoint import Checkpoint


def wanted_precision(network: Checkpoint, setting: str, devices: Sequence[torch.device]) -> str:
    """Return what a network is to compute in; ``auto``: what is best on its devices.

    What was trained in float16 stays in its range, and float16 has more digits than bfloat16.

    Args:
        network: The network.
        setting: Of inference.precision.
        devices: Of all ranks.
    """
    if network.dtype == torch.float64:
        return "float64"
    trained = network.config.training.precision
    if setting != "auto" or trained == "bfloat16":  # which suits the devices of training
        return setting
    if trained == "float16":
        return trained if all(device.type == "cuda" for device in devices) else "float32"
    return trained
