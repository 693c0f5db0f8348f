"""Names of devices, and how many GPUs there can be, before PyTorch is imported."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from unet3d.errors import ConfigError, DeviceError

DEVICES = Path("/dev")

OTHER_GPUS = ("dxg", "kfd", "nvmap")
"""Device files on Linux of GPUs without NVIDIA's numbering: WSL, AMD and Jetson."""


NEEDS = {
    "model": "needs two devices or more, one for each stage",
    "spatial": "needs two devices or more, one for each slab",
}
"""Error text for modes with groups of devices."""


def gpu_index(name: str) -> int | None:
    """Return the number of the GPU that ``0``, ``cuda:0`` or ``cuda`` names; None: the CPU."""
    match = re.fullmatch(r"(?:cuda:)?(\d+)|(cpu)|(cuda)", name.strip())
    if match is None:
        raise DeviceError(f"device {name!r} is unknown; write 0, cuda:0 or cpu")
    return None if match[2] else int(match[1] or 0)


def most_gpus() -> float:
    """Return an upper bound on the number of GPUs; only PyTorch knows the exact number."""
    if any((DEVICES / name).exists() for name in OTHER_GPUS):
        return math.inf
    num_gpus = len([*DEVICES.glob("nvidia[0-9]*")])
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        num_gpus = min(num_gpus, len([one for one in visible.split(",") if one.strip()]))
    return num_gpus


def refuse_missing(names: Sequence[str]) -> None:
    """Refuse devices that this machine cannot have."""
    indices, num_gpus = [gpu_index(name) for name in names], most_gpus()
    for name, index in zip(names, indices, strict=True):
        if index is not None and index >= num_gpus:
            has = "no CUDA GPU" if num_gpus == 0 else f"cuda:0 to cuda:{num_gpus - 1}"
            raise DeviceError(f"device {name!r} does not exist; this machine has cpu and {has}")


def refuse_unknown_memory(names: Sequence[str]) -> None:
    """Refuse GPUs whose memory is not stated, on a machine without GPUs."""
    indices = [index for index in map(gpu_index, names) if index is not None]
    if indices and most_gpus() == 0:
        raise unknown_memory(f"cuda:{indices[0]}")


def unknown_memory(device: object) -> ConfigError:
    """Return the error for a GPU whose memory is unknown."""
    return ConfigError(
        f"{device} is not on this machine, so its memory is unknown; give it with "
        "--device-memory GIB, such as --device-memory 80"
    )


def check_count(mode: str, names: Sequence[str], num_replicas: int) -> None:
    """Refuse a number of devices that does not suit mode and replicas."""
    listed = ",".join(names)
    if mode in ("none", "auto") and len(names) == 1 and num_replicas > 1:
        raise ConfigError(
            f"parallel.replicas is {num_replicas}, but there is one device, {listed}; name more "
            "with --devices, or leave replicas out"
        )
    if mode == "none" and len(names) != 1:
        raise DeviceError(
            f"there are the devices {listed}, but parallel mode none uses one; use --parallel "
            "auto, or name one device"
        )
    if mode in NEEDS and len(names) < 2:
        raise DeviceError(
            f"parallel mode {mode} {NEEDS[mode]}, not {listed}; name two "
            + ("(one device may be named twice)" if mode == "model" else "(cpu may be named twice)")
        )


def refuse_impossible(
    names: Sequence[str] | None,
    mode: str,
    num_replicas: int,
    precisions: Mapping[str, str],
    is_alone: bool,
) -> None:
    """Refuse devices and precisions that are impossible; check only what does not need PyTorch.

    Without ``is_alone``, several ranks or folds share the devices, and the number of devices is not
    checked.
    """
    refuse_missing(names or ())
    if names is not None and is_alone:
        check_count(mode, names, num_replicas)
    if names is None:
        on_gpu = most_gpus() > 0
    else:
        on_gpu = any(gpu_index(name) is not None for name in names)
    for setting, precision in precisions.items():
        refuse_float16(precision, on_gpu, setting)


def refuse_float16(precision: str, on_gpu: bool, setting: str) -> None:
    """Refuse float16 where there is no GPU to compute in it."""
    if precision == "float16" and not on_gpu:
        raise DeviceError(f"{setting}=float16 needs a GPU; use {setting}=auto")
