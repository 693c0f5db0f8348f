"""Names of devices, and how many GPUs there can be, before PyTorch is imported."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from unet3d.errors import DeviceError

DEVICES = Path("/dev")

OTHER_GPUS = ("dxg", "kfd", "nvmap")
"""Devices of Linux for GPUs that are not numbered as NVIDIA's are: of WSL, AMD and Jetson."""


def gpu_index(name: str) -> int | None:
    """Return the number of the GPU that ``0``, ``cuda:0`` or ``cuda`` names; None: the CPU."""
    match = re.fullmatch(r"(?:cuda:)?(\d+)|(cpu)|(cuda)", name.strip())
    if match is None:
        raise DeviceError(f"device {name!r} is unknown; write 0, cuda:0 or cpu")
    return None if match[2] else int(match[1] or 0)


def refuse_missing(names: Sequence[str]) -> None:
    """Refuse devices that this machine cannot have; PyTorch knows which of the others there are."""
    indices = [gpu_index(name) for name in names]
    if any((DEVICES / name).exists() for name in OTHER_GPUS):
        return
    num_gpus = len([*DEVICES.glob("nvidia[0-9]*")])
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        num_gpus = min(num_gpus, len([one for one in visible.split(",") if one.strip()]))
    for name, index in zip(names, indices, strict=True):
        if index is not None and index >= num_gpus:
            has = "no CUDA GPU" if num_gpus == 0 else f"cuda:0 to cuda:{num_gpus - 1}"
            raise DeviceError(f"device {name!r} does not exist; this machine has cpu and {has}")
