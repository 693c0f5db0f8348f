"""Devices that exist or that settings name or imply, and their division over processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unet3d.config import ParallelSettings
from unet3d.errors import DeviceError
from unet3d.memory.gpus import gpu_index

Devices = tuple[torch.device, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of a machine, existing or described."""

    num_gpus: int
    """CUDA GPUs, numbered from 0."""
    is_real: bool = True
    """Whether missing devices are an error; a plan may be for another machine."""
    description: str = "the described machine"
    """The machine's devices in words, for errors."""

    @classmethod
    def here(cls) -> "Machine":
        """Return the devices of this machine."""
        count = torch.cuda.device_count()
        gpus = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        description = f"cpu and {gpus}" if gpus else "cpu and no CUDA GPU"
        return cls(num_gpus=count, description=description)

    def device(self, name: str) -> torch.device:
        """Return a device by its name, such as ``0``, ``cuda:1`` or ``cpu``.

        Raises:
            DeviceError: The device is unknown or does not exist.
        """
        index = gpu_index(name)
        if index is None:
            return torch.device("cpu")
        if self.is_real and index >= self.num_gpus:
            raise DeviceError(
                f"device {name!r} does not exist; this machine has {self.description}"
            )
        return torch.device("cuda", index)


def default_names(settings: ParallelSettings, machine: Machine) -> tuple[str, ...]:
    """Return the default devices of settings that name none."""
    count, mode = machine.num_gpus, settings.mode
    if mode in ("auto", "none"):
        return ("0",) if count else ("cpu",)
    if count and (mode == "data" or (mode == "spatial" and count > 1)):
        return tuple(map(str, range(count)))
    if count == 1:
        raise DeviceError(
            f"parallel mode {mode} spreads the network over devices, but this machine has "
            f"{machine.description}; "
            + ("use --parallel none" if mode == "spatial" else "name the devices: --devices 0,cpu")
        )
    num_devices = 2 * settings.replicas
    return tuple(map(str, range(num_devices))) if count else ("cpu",) * num_devices


def names_of_ranks(mode: str, machine: Machine, num_ranks: int) -> tuple[str, ...]:
    """Return the default devices of the ranks of a machine."""
    per_rank = max(2, machine.num_gpus // num_ranks) if mode == "model" else 1
    count = num_ranks * per_rank
    return tuple(map(str, range(count))) if machine.num_gpus else ("cpu",) * count


def divided(devices: Devices, num_groups: int, what: str) -> tuple[Devices, ...]:
    """Divide devices in order over processes; NCCL refuses a GPU that two processes share."""
    size, rest = divmod(len(devices), num_groups)
    named = listed(devices)
    if rest or not size:
        raise DeviceError(
            f"devices {named} cannot be divided equally among {num_groups} {what}; name a "
            f"multiple of {num_groups}"
        )
    groups = tuple(devices[i * size : (i + 1) * size] for i in range(num_groups))
    for stage in zip(*groups, strict=True):
        if len({device.type for device in stage}) > 1:
            raise DeviceError(
                f"devices {named} make unequal {what}: {' and '.join(map(str, stage))} cannot "
                f"exchange gradients; name the same kinds of devices in the same order for each"
            )
    gpus = [gpu for group in groups for gpu in set(group) if gpu.type == "cuda"]
    if len(gpus) != len(set(gpus)):
        raise DeviceError(
            f"devices {named} put two {what} on one GPU, which NCCL refuses; name each GPU once"
        )
    return groups


def check_thread_devices(devices: Sequence[torch.device], gather: torch.device | None) -> None:
    """Refuse devices that ``nn.DataParallel`` cannot use."""
    named = listed(devices)
    if any(device.type != "cuda" for device in devices) or len(set(devices)) != len(devices):
        raise DeviceError(
            f"parallel.data_parallel=true needs GPUs, each named once, not {named}; leave it out"
        )
    if gather is not None and gather not in devices:
        raise DeviceError(
            f"parallel.data_parallel is {gather}, which is none of {named}; name one of them"
        )


def listed(devices: Sequence[torch.device]) -> str:
    """Return devices as ``--devices`` takes them, such as ``cuda:0,cuda:1``."""
    return ",".join(map(str, devices))
