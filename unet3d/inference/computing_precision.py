"""What a trained network computes in, before it is known what its devices have."""

from collections.abc import Sequence

import torch


def wanted_precision(
    setting: str, dtype: torch.dtype, trained: str, devices: Sequence[torch.device]
) -> str:
    """Return what a network is to compute in; ``auto``: what is best on its devices.

    What was trained in float16 stays in its range, and float16 has more digits than bfloat16.

    Args:
        setting: Of inference.precision.
        dtype: The type of the network's parameters.
        trained: Its training.precision.
        devices: Of all ranks.
    """
    if dtype == torch.float64:
        return "float64"
    if setting != "auto" or trained == "bfloat16":  # which suits the devices of training
        return setting
    if trained == "float16":
        return trained if all(device.type == "cuda" for device in devices) else "float32"
    return trained
