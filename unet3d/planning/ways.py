"""The ways in which a training can be placed on devices, and the memory that each may take."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from unet3d.config import Config, ParallelSettings
from unet3d.errors import ConfigError, DeviceError
from unet3d.memory.record import device_bytes
from unet3d.parallel import Machine, ParallelDims
from unet3d.planning.network_plan import NetworkPlan, check_shards, check_stages

CPU = torch.device("cpu")

Devices = tuple[torch.device, ...]


def possible_dims(
    config: Config, network: NetworkPlan, devices: Devices
) -> tuple[ParallelDims, ...]:
    """Return the ways of placing a training on devices that suit its network, patch and batch.

    One device first, unless several replicas are asked for; then over all devices a replica on
    each, shards of one volume, and replicas of fewer shards. Stages of the network only where none
    of these can be.
    """
    wanted = config.parallel.replicas
    one = placed(config.parallel, "none", devices[:1])
    if len(devices) == 1:
        return (one,)
    spread: list[ParallelDims] = []
    # A batch norm has statistics of the whole batch, which replicas and shards do not have.
    if config.model.norm != "batch":
        # Each replica has a patch for each of its micro-batches.
        most = network.batch_size // config.training.num_micro_batches
        counts = [
            count
            for count in range(1, len(devices) + 1)
            if len(devices) % count == 0 and wanted in (1, count) and count <= most
        ]
        ways = [("data" if count == len(devices) else "spatial", count) for count in counts]
        for mode, count in sorted(ways):
            spread += if_possible(config, network, mode, devices, count)
    spread = spread or if_possible(config, network, "model", devices, wanted)
    return (one, *spread) if wanted == 1 else tuple(spread)


def if_possible(
    config: Config, network: NetworkPlan, mode: str, devices: Devices, num_replicas: int
) -> list[ParallelDims]:
    """Return a mode on devices, or nothing where they or the network do not suit it."""
    with suppress(DeviceError):
        dims = placed(config.parallel, mode, devices, num_replicas)
        if mode == "model":
            check_stages(config, network, dims.num_stages)
        check_shards(network, dims.num_shards)
        return [dims]
    return []


def placed(
    settings: ParallelSettings, mode: str, devices: Devices, num_replicas: int = 1
) -> ParallelDims:
    """Return a mode on devices, which need not be here, or raise DeviceError."""
    return ParallelDims.resolve(
        _settings_of(settings, mode, devices, num_replicas), Machine(num_gpus=0, is_real=False)
    )


def settings_for(settings: ParallelSettings, dims: ParallelDims) -> ParallelSettings:
    """Return settings that name a mode, devices and replicas."""
    return _settings_of(settings, dims.mode, dims.all_devices, dims.num_replicas)


def _settings_of(
    settings: ParallelSettings, mode: str, devices: Devices, num_replicas: int
) -> ParallelSettings:
    return settings.model_copy(
        update={
            "mode": mode,
            "devices": tuple(map(str, devices)),
            "replicas": num_replicas if mode in ("model", "spatial") else 1,
            "data_parallel": False,
        }
    )


def dims_of(settings: ParallelSettings, memory_bytes: int | None) -> ParallelDims:
    """Return the devices that settings name or imply, whether or not they are here."""
    settings = settings.model_copy(update={"data_parallel": False})
    num_gpus = 2 * settings.replicas if has_gpu(memory_bytes) else 0
    return ParallelDims.resolve(settings, Machine(num_gpus=num_gpus, is_real=False))


def in_words(dims: ParallelDims) -> str:
    """Return a way of placing a training in a few words."""
    if dims.mode == "none":
        return f"none, on {dims.all_devices[0]}"
    if dims.mode == "model":
        return f"model over {','.join(map(str, dims.all_devices))}"
    kind = "GPUs" if dims.all_devices[0].type == "cuda" else "CPU processes"
    if dims.mode == "data" or dims.num_replicas == 1:
        return f"{dims.mode} over {len(dims.all_devices)} {kind}"
    return f"{dims.num_replicas} replicas of spatial over {dims.num_shards} {kind} each"


def has_gpu(memory_bytes: int | None) -> bool:
    """Return whether there is a GPU here, or one is described by its memory."""
    return torch.cuda.device_count() > 0 or memory_bytes is not None


def all_devices(ways: Iterable[ParallelDims]) -> Devices:
    """Return the devices of several ways, each once."""
    return tuple(dict.fromkeys(device for dims in ways for device in dims.all_devices))


def numbered(device: torch.device, index: int) -> torch.device:
    """Return another device like one, which for a CPU is itself."""
    return torch.device("cuda", index) if device.type == "cuda" else device


def is_here(device: torch.device) -> bool:
    """Return whether this machine has a device."""
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()


def memory_of(devices: Iterable[torch.device], memory_bytes: int | None) -> dict[torch.device, int]:
    """Return the bytes that each device has, which need not be here.

    ``memory_bytes`` is that of each GPU, or of the CPU without GPUs; None: that of this machine.
    """
    several = tuple(dict.fromkeys(devices))
    has_gpus = any(device.type == "cuda" for device in several)

    def bytes_of(device: torch.device) -> int:
        if memory_bytes is not None and (device.type == "cuda") == has_gpus:
            return memory_bytes
        if is_here(device):
            return device_bytes(device)
        if torch.cuda.device_count() > 0:  # another device like those that are here
            return device_bytes(torch.device("cuda", 0))
        raise ConfigError(
            f"{device} is not on this machine, so its memory is unknown; give it with "
            "--device-memory GIB, such as --device-memory 80"
        )

    return {device: bytes_of(device) for device in several}


def devices_of_ranks(dims: ParallelDims) -> list[Devices]:
    """Return the devices of each process."""
    size = len(dims.all_devices) // dims.num_processes
    return list(zip(*[iter(dims.all_devices)] * size, strict=True))


def limits_of(dims: ParallelDims, memory: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Return the limit of each device of the step, so that every replica and shard fits."""
    limits: dict[torch.device, int] = {}
    ranks = devices_of_ranks(dims)
    for places in zip(*ranks, strict=True):
        least = min(memory[device] for device in places)
        if places[0] == CPU:  # they share the machine's memory
            least //= len(ranks)
        limits[places[0]] = min(least, limits.get(places[0], least))
    return limits
