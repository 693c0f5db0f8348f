"""Devices and slots: where the stages of a network, or its replicas, live."""

import re
from dataclasses import dataclass
from typing import Literal

import torch

from unet3d.config import Offload, ParallelSettings, Recompute
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one stage or replica.

    Two slots may name one device, as in ``cpu,cpu``.
    """

    index: int
    """Its number, from 0."""
    device: torch.device
    """Where it computes."""
    blocks: tuple[str, ...]
    """Names of the blocks that it runs."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a network is to be spread."""

    devices: tuple[torch.device, ...]
    """One for each stage; a single one runs the whole network."""
    cuts: tuple[int, ...] | None = None
    """Index in the block list at which each stage but the first starts; None: the default."""
    num_micro_batches: int = 1
    """Portions that a training batch is divided into, along N."""
    autocast: torch.dtype | None = None
    """Lower precision for the GPU stages, or None for the network's own."""
    schedule: Literal["1f1b", "all-forward"] = "1f1b"
    """In which order the micro-batches run."""
    recompute: Recompute = "norm"
    """What is made again in backward instead of being kept."""
    offload: Offload = "none"
    """What GPUs park in host memory while they do not need it."""
    num_replicas: int = 1
    """How many ranks each have a network on such devices, and share a batch."""


def resolve_devices(
    settings: ParallelSettings, must_exist: bool = True
) -> tuple[torch.device, ...]:
    """Return the devices to use, after a look at what the machine has.

    Args:
        settings: The mode and the devices' names, such as ``0``, ``cuda:1`` or ``cpu``.
        must_exist: Whether to refuse GPUs that are not here.

    Raises:
        DeviceError: A device is unknown or absent, or their number does not suit the mode.
    """
    names = settings.devices
    if names is None:
        names = _default_names(settings.mode, settings.replicas)
    devices = tuple(_device(name, must_exist) for name in names)
    if settings.mode == "none" and len(devices) != 1:
        raise DeviceError(
            f"devices {','.join(names)} but parallel mode none uses one; "
            "add --parallel model or --parallel data, or name one device"
        )
    if settings.mode == "model" and len(devices) < 2:
        raise DeviceError(
            f"parallel mode model needs a device for each of two stages or more, got "
            f"{','.join(names) or 'none'}; name two (one device may be named twice)"
        )
    return devices


def devices_of_replicas(
    settings: ParallelSettings, must_exist: bool = True
) -> tuple[tuple[torch.device, ...], ...]:
    """Return the devices of each process that is needed, after a look at what the machine has.

    Args:
        settings: Mode, engine, devices and replicas.
        must_exist: Whether to refuse GPUs that are not here.

    Raises:
        DeviceError: A device is unknown or absent, or their number does not suit the mode.
    """
    devices = resolve_devices(settings, must_exist)
    if settings.mode == "data" and settings.engine == "ddp":
        return _divided(devices, len(devices), "replicas")
    groups = _divided(devices, settings.replicas, "replicas")
    if settings.mode == "model" and len(groups[0]) < 2:
        raise DeviceError(
            f"devices {','.join(map(str, devices))} give each of {settings.replicas} replicas one, "
            "but parallel mode model needs a device for each of two stages or more; name more "
            "devices, or fewer --replicas"
        )
    return groups


def output_device(settings: ParallelSettings) -> torch.device | None:
    """Return where the engine ``dataparallel`` gathers logits, if the settings say so.

    Raises:
        DeviceError: The device is unknown or absent.
    """
    name = settings.output_device
    return None if name is None else _device(name, must_exist=True)


def devices_of_rank(settings: ParallelSettings, ranks: Ranks) -> tuple[torch.device, ...]:
    """Return the devices that one of several ranks drives.

    Args:
        settings: Their devices are those of each machine, divided over its ranks in their order.
        ranks: The place of this one.

    Raises:
        DeviceError: The devices do not divide by the ranks of this machine.
        ConfigError: The settings ask for another number of replicas than there are ranks.
    """
    if settings.engine == "dataparallel":
        raise ConfigError(
            f"parallel.engine dataparallel is one process, but there are {ranks.world_size}; "
            "use parallel.engine=ddp under torchrun"
        )
    if settings.replicas not in (1, ranks.world_size):
        raise ConfigError(
            f"parallel.replicas is {settings.replicas} but {ranks.world_size} ranks were started, "
            "each of which drives one replica; leave parallel.replicas out"
        )
    num_ranks, names = ranks.local_world_size, settings.devices
    if names is None:
        count = torch.cuda.device_count()
        per_rank = 1 if settings.mode == "data" else max(2, count // num_ranks)
        names = tuple(map(str, range(num_ranks * per_rank))) if count else ("cpu",) * per_rank
        names = names if count else names * num_ranks
    devices = tuple(_device(name, must_exist=True) for name in names)
    mine = _divided(devices, num_ranks, "ranks of this machine")[ranks.local_rank]
    if (len(mine) == 1) != (settings.mode == "data"):
        raise DeviceError(
            f"rank {ranks.rank} has {len(mine)} of the devices {','.join(names)}, but parallel "
            f"mode {settings.mode} needs {'one' if settings.mode == 'data' else 'at least two'}"
        )
    return mine


def _divided(
    devices: tuple[torch.device, ...], num_groups: int, what: str
) -> tuple[tuple[torch.device, ...], ...]:
    """Divide devices in their order; no GPU may be in two groups, for NCCL refuses that."""
    size, rest = divmod(len(devices), num_groups)
    named = ",".join(map(str, devices))
    if rest or not size:
        raise DeviceError(f"devices {named} do not divide by {num_groups} {what}; name as many")
    groups = tuple(devices[i * size : (i + 1) * size] for i in range(num_groups))
    for stage in zip(*groups, strict=True):
        if len({device.type for device in stage}) > 1:
            raise DeviceError(
                f"devices {named} make replicas that differ: {' and '.join(map(str, stage))} "
                "cannot exchange gradients; name the same kinds in the same order for each"
            )
    gpus = [gpu for group in groups for gpu in set(group) if gpu.type == "cuda"]
    if len(gpus) != len(set(gpus)):
        raise DeviceError(
            f"devices {named} put two replicas on one GPU, which NCCL refuses; name each GPU once"
        )
    return groups


def describe_devices() -> str:
    """Return the devices of this machine as a phrase."""
    count = torch.cuda.device_count()
    gpus = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
    return f"cpu and {gpus}" if gpus else "cpu and no CUDA GPU"


def _device(name: str, must_exist: bool) -> torch.device:
    match = re.fullmatch(r"(?:cuda:)?(\d+)|(cpu)|(cuda)", name.strip())
    if match is None:
        raise DeviceError(f"device {name!r} is unknown; write 0, cuda:0 or cpu")
    if match[2]:
        return torch.device("cpu")
    index = int(match[1] or 0)
    if must_exist and index >= torch.cuda.device_count():
        raise DeviceError(f"device {name!r} does not exist; this machine has {describe_devices()}")
    return torch.device("cuda", index)


def _default_names(mode: str, num_replicas: int) -> tuple[str, ...]:
    count = torch.cuda.device_count()
    if mode == "none":
        return ("0",) if count else ("cpu",)
    if mode == "data" and count:
        return tuple(map(str, range(count)))
    if count == 1:
        raise DeviceError(
            f"parallel mode {mode} spreads the network over devices, but this machine has "
            f"{describe_devices()}; name the devices, such as --devices 0,cpu"
        )
    num_devices = 2 * num_replicas
    return tuple(map(str, range(num_devices))) if count else ("cpu",) * num_devices
