"""The ways in which a training can be placed on its devices, and what each of them needs."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from unet3d.config import Config, ParallelSettings, Shape
from unet3d.errors import ConfigError, DeviceError
from unet3d.memory.record import device_bytes
from unet3d.parallel import Layout, Machine, ParallelDims
from unet3d.planning.largest import largest_size
from unet3d.planning.memory_estimate import MemoryEstimate, Step, predict_memory, predict_shards
from unet3d.planning.network_plan import NetworkPlan, check_shards, check_stages
from unet3d.planning.step_time import step_seconds

CPU = torch.device("cpu")

Devices = tuple[torch.device, ...]


@dataclass(frozen=True, kw_only=True)
class PlacementOption:
    """One option for placing a training. What it needs is predicted when it is first asked for."""

    dims: ParallelDims
    """The mode, and the devices of each copy of the network."""
    step: Step
    """The step of the replica with the largest share of the batch, on the first one's devices; of
    shards, a fullest one."""
    limits: Mapping[torch.device, int]
    """Bytes that each device of the step may hold, so that every replica and shard fits."""
    seconds: float | None
    """How long a step takes; None: that is not known without measuring."""
    is_measured: bool = False
    """Whether that was measured, not predicted."""
    balance: str | None = None
    """What its cut balances, where that is not the default."""

    @cached_property
    def prediction(self) -> MemoryEstimate:
        """The memory of the step; what allocators reserve for it is not counted."""
        return predict_memory(self.step)

    @cached_property
    def shards(self) -> tuple[MemoryEstimate, ...]:
        """All that is predicted, for each shard of a replica, or for the one that it is."""
        return predict_shards(self.step)

    @property
    def load(self) -> float:
        """The needed share of the fullest device; up to 1 it fits."""
        return self.prediction.load(self.limits)

    @property
    def fits(self) -> bool:
        """Whether each device has that much memory."""
        return self.load <= 1

    def largest(self) -> Shape | None:
        """Search for the largest patch of the same aspect that fits, if any; it takes a while."""
        return largest_size(self.step, self.limits, self.prediction)


def make_option(
    config: Config,
    network: NetworkPlan,
    dims: ParallelDims,
    *,
    precision: str,
    num_micro_batches: int,
    memory: Mapping[torch.device, int],
) -> PlacementOption:
    """Return one option, cut at the default place, without predicting its memory yet."""
    layout = replace(
        Layout.of(config, dims, precision), cuts=None, num_micro_batches=num_micro_batches
    )
    step = network.step(config, dims, layout, precision).fullest()
    return PlacementOption(
        dims=dims,
        step=step,
        limits=_limits(dims, memory),
        seconds=step_seconds(step),
    )


def divided(
    option: PlacementOption, num_micro_batches: int, cuts: tuple[int, ...] | None = None
) -> PlacementOption:
    """Return the same placement with other micro-batches and cuts; its time is the predicted."""
    layout = replace(option.step.layout, num_micro_batches=num_micro_batches, cuts=cuts)
    step = replace(option.step, layout=layout)
    return replace(option, step=step, seconds=step_seconds(step), is_measured=False)


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
    spread = []
    # A batch norm has statistics of the whole batch, which replicas and shards do not have.
    if config.model.norm != "batch":
        # Each replica has a patch for each of its micro-batches.
        most = network.batch_size // config.training.num_micro_batches
        counts = [
            count for count in _divisors(len(devices)) if wanted in (1, count) and count <= most
        ]
        ways = [("data" if count == len(devices) else "spatial", count) for count in counts]
        for mode, count in sorted(ways):
            with suppress(DeviceError):
                dims = placed(config.parallel, mode, devices, count)
                check_shards(network, dims.num_shards)
                spread.append(dims)
    if not spread:
        with suppress(DeviceError):
            stages = placed(config.parallel, "model", devices, wanted)
            check_stages(config, network, stages.num_stages)
            spread.append(stages)
    return (one, *spread) if wanted == 1 else tuple(spread)


def placed(
    settings: ParallelSettings, mode: str, devices: Devices, num_replicas: int = 1
) -> ParallelDims:
    """Return a mode on devices, which need not be here, or raise DeviceError."""
    return ParallelDims.resolve(
        settings_of(settings, mode, devices, num_replicas), Machine(num_gpus=0, is_real=False)
    )


def settings_of(
    settings: ParallelSettings, mode: str, devices: Devices, num_replicas: int
) -> ParallelSettings:
    """Return settings for a mode on devices."""
    return settings.model_copy(
        update={
            "mode": mode,
            "devices": tuple(map(str, devices)),
            "replicas": num_replicas if mode in ("model", "spatial") else 1,
            "engine": "ddp",
        }
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def memory_of(devices: Iterable[torch.device], memory_bytes: int | None) -> dict[torch.device, int]:
    """Return the bytes that each device has, which need not be here.

    ``memory_bytes`` is that of each GPU, or of the CPU without GPUs; None: that of this machine.
    """
    several = tuple(dict.fromkeys(devices))
    return {device: _device_bytes(device, several, memory_bytes) for device in several}


def is_here(device: torch.device) -> bool:
    """Return whether this machine has a device."""
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()


def _limits(dims: ParallelDims, memory: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Return the limit of each device of the step, so that every replica and shard fits."""
    limits: dict[torch.device, int] = {}
    size = len(dims.all_devices) // dims.num_processes
    ranks = list(zip(*[iter(dims.all_devices)] * size, strict=True))
    for places in zip(*ranks, strict=True):
        least = min(memory[device] for device in places)
        if places[0] == CPU:  # they share the machine's memory
            least //= len(ranks)
        limits[places[0]] = min(least, limits.get(places[0], least))
    return limits


def _device_bytes(device: torch.device, devices: Devices, memory_bytes: int | None) -> int:
    is_meant = device.type == "cuda" or all(other == CPU for other in devices)
    if memory_bytes is not None and is_meant:
        return memory_bytes
    if is_here(device):
        return device_bytes(device)
    if torch.cuda.device_count() > 0:  # another device like those that are here
        return device_bytes(torch.device("cuda", 0))
    raise ConfigError(
        f"{device} is not on this machine, so its memory is unknown; give it with --device-memory "
        "GIB, such as --device-memory 80"
    )
