"""The options for placing one training: the memory each takes, and the largest patch that fits."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from unet3d.config import Config, ParallelSettings, Shape
from unet3d.errors import ConfigError
from unet3d.memory.record import device_bytes
from unet3d.model import UNet3d
from unet3d.model.optimizer import (
    num_states,
)
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import Layout, Machine, ParallelDims, choose_cuts, resolve_precision
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.planning.experiment import NetworkPlan, check_stages
from unet3d.planning.memory_estimate import MemoryEstimate, Step, largest_size, predict_memory
from unet3d.planning.tuning_cache import TuningKey, resolve_auto
from unet3d.volumes.cache import Cache

CPU = torch.device("cpu")

Replicas = tuple[tuple[torch.device, ...], ...]
"""The devices of each copy of a network."""


@dataclass(frozen=True, kw_only=True)
class PlacementOption:
    """One option for placing a training."""

    parallel: str
    """The mode."""
    replicas: Replicas
    """The devices of each copy of the network."""
    prediction: MemoryEstimate
    """The memory of the replica with the largest share of the batch, on the first one's devices."""
    limits: Mapping[torch.device, int]
    """Bytes that each device of the first replica may hold, so that every replica fits."""
    is_asked: bool
    """Whether the settings name this option."""
    balance: str | None
    """What its cut balances, where that is not the default."""

    @property
    def fits(self) -> bool:
        """Whether each device has that much memory."""
        return self.prediction.load(self.limits) <= 1

    def largest(self) -> Shape | None:
        """Search for the largest patch of the same aspect that fits; it takes a while.

        Returns:
            Voxels; None where even the smallest patch does not fit.
        """
        return largest_size(self.prediction.step, self.limits, self.prediction)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several options, and the memory that the devices have."""

    ways: tuple[PlacementOption, ...]
    """At least one device and several, with and without micro-batches."""
    device_bytes: Mapping[torch.device, int]
    """Memory of each device."""
    notes: tuple[str, ...]
    """What a reader must know, a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; slots as in a run's ``memory.json``.

        The largest patches, which take longer to find, are left out.
        """
        step = self.ways[0].prediction.step  # the option of one device, which has the whole batch
        return {
            "shape": list(step.size),
            "batch_size": step.batch_size,
            "precision": step.precision,
            "channels": list(step.topology.channels),
            "notes": list(self.notes),
            "ways": [self._way(way) for way in self.ways],
        }

    def _way(self, way: PlacementOption) -> dict[str, Any]:
        prediction = way.prediction
        slots: list[dict[str, Any]] = []
        for rank, devices in enumerate(way.replicas):
            for slot, device in zip(prediction.slots, devices, strict=True):
                row = {
                    "slot": len(slots),
                    "device": str(device),
                    "blocks": list(slot.blocks),
                    "device_bytes": self.device_bytes[device],
                    "predicted": prediction.memory[slot.index].to_dict(),
                }
                slots.append({**row, "rank": rank} if len(way.replicas) > 1 else row)
        return {
            "parallel": way.parallel,
            "replicas": len(way.replicas),
            "num_micro_batches": prediction.step.layout.num_micro_batches,
            "balance": way.balance,
            "asked": way.is_asked,
            "fits": way.fits,
            "slots": slots,
        }


def compare(
    config: Config,
    network: NetworkPlan,
    memory_bytes: int | None,
    watch: Callable[[int, int], object] = lambda number, total: None,
) -> Comparison:
    """Predict one device and several, with one micro-batch and with the configured number.

    Args:
        config: The settings; devices that are not here are allowed.
        network: What is trained.
        memory_bytes: Memory of each GPU, or of the CPU without GPUs; None: that of this machine.
        watch: Is told before each prediction how many there were and will be in all.

    Raises:
        DeviceError: A device's name is unknown, or the devices do not suit the mode.
        ConfigError: The memory of a device that is not here is not given.
        DoesNotFitError: The host cannot hold the weights.
    """
    asked = dims_of(config.parallel, memory_bytes)
    check_stages(config, network, asked.num_stages)
    refuse_beyond_memory(network.topology)  # predictions make the weights, and do not touch them
    options = _options(asked)
    several = tuple(dict.fromkeys(_joined(dims.replicas for dims in options)))
    precision = resolve_precision(config.training.precision, several)
    memory = {device: _device_bytes(device, several, memory_bytes) for device in several}
    if memory_bytes is None and all(_is_here(device) for device in _joined([asked.replicas])):
        config = resolve_auto(
            TuningKey(
                config=config,
                topology=network.topology,
                size=network.size,
                devices=asked.devices,
                precision=precision,
                num_replicas=asked.num_replicas,
            )
        )
    counts = sorted({1, config.training.num_micro_batches})
    ways: list[PlacementOption] = []
    for dims in options:
        limits = _limits(dims.replicas, memory)
        for count in counts:
            watch(len(ways), len(options) * len(counts))
            layout = replace(Layout.of(config, dims, precision), cuts=None, num_micro_batches=count)
            batch_size = dims.share_of(config.training.batch_size)
            if dims.mode == asked.mode:
                cuts = _cuts(config, network, layout, precision, batch_size)
                layout = replace(layout, cuts=cuts)
            step = Step(
                topology=network.topology,
                layout=layout,
                size=network.size,
                batch_size=batch_size,
                settings=config.training,
                precision=precision,
                augmentation=network.augmentation(config.patches.augmentation, layout.devices[0]),
            )
            is_balanced = dims.mode == asked.mode and _is_balanced(config)
            ways.append(
                PlacementOption(
                    parallel=dims.mode,
                    replicas=dims.replicas,
                    prediction=predict_memory(step),
                    limits=limits,
                    is_asked=dims == asked and count == config.training.num_micro_batches,
                    balance=config.parallel.balance if is_balanced else None,
                )
            )
    return Comparison(
        ways=tuple(ways), device_bytes=memory, notes=tuple(_notes(config.parallel, memory_bytes))
    )


def dims_of(settings: ParallelSettings, memory_bytes: int | None) -> ParallelDims:
    """Return the devices that settings name or imply, whether or not they are here.

    Args:
        settings: Mode, engine, devices and replicas.
        memory_bytes: Memory of each GPU; None: that of this machine's.

    Raises:
        DeviceError: A device's name is unknown, or the devices do not suit the mode.
    """
    if settings.engine == "dataparallel":
        settings = settings.model_copy(update={"engine": "ddp"})
    num_gpus = 2 * settings.replicas if _has_gpu(memory_bytes) else 0
    return ParallelDims.resolve(settings, Machine(num_gpus=num_gpus, is_real=False))


def _notes(settings: ParallelSettings, memory_bytes: int | None) -> Iterator[str]:
    if settings.devices is None and not _has_gpu(memory_bytes):
        yield "This machine has no GPU, so its CPU is meant; --device-memory GIB describes a GPU."
    if settings.engine == "dataparallel":
        yield (
            "parallel.engine=dataparallel is not predicted: each step copies the network to every "
            "GPU but the first, which gathers what they make. What is shown is the engine ddp."
        )


def _has_gpu(memory_bytes: int | None) -> bool:
    return torch.cuda.device_count() > 0 or memory_bytes is not None


def _options(asked: ParallelDims) -> list[ParallelDims]:
    """Return the options to compare: one device, what is asked for, and two stages."""
    first, *others = (devices[0] for devices in asked.replicas)
    second = others[0] if others else _next(first)
    one = ParallelDims(mode="none", replicas=((first,),), num_replicas=1)
    two = ParallelDims(mode="model", replicas=((first, second),), num_replicas=1)
    if asked.mode == "model":
        return [one, asked]
    return [one, two] if asked == one else [one, asked, two]


def _limits(replicas: Replicas, memory: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Return the limit of each device of the first replica, so that every replica fits."""
    limits: dict[torch.device, int] = {}
    for places in zip(*replicas, strict=True):
        least = min(memory[device] for device in places)
        if places[0] == CPU:  # they share the machine's memory
            least //= len(replicas)
        limits[places[0]] = min(least, limits.get(places[0], least))
    return limits


def _joined(several: Iterable[Replicas]) -> list[torch.device]:
    return [device for replicas in several for devices in replicas for device in devices]


def _is_balanced(config: Config) -> bool:
    """Return whether the cut in training depends on times or bytes."""
    return config.parallel.cuts is None and config.parallel.wanted_balance != "encoder-decoder"


def _cuts(
    config: Config, network: NetworkPlan, layout: Layout, precision: str, batch_size: int
) -> tuple[int, ...] | None:
    """Return where training would cut the network; None: at the default place.

    Raises:
        ConfigError: The cut depends on measurements on a device that is not here.
    """
    if not _is_balanced(config):
        return config.parallel.cuts
    balance = config.parallel.wanted_balance
    for device in layout.devices:
        if balance == "time" and not _is_here(device):
            raise ConfigError(
                f"parallel.balance is time, which is measured on the devices, but {device} is not "
                "on this machine; use --balance memory, which is counted"
            )
    model = UNet3d(network.topology)
    to_parameter_dtype(model, precision)
    return choose_cuts(
        model,
        layout=layout,
        balance=balance,
        size=network.size,
        batch_size=batch_size,
        num_states=num_states(config.training),
        folder=Cache(config.data.cache).folder / "timings",
    )


def _next(device: torch.device) -> torch.device:
    """Return a second device like a first one."""
    return device if device.type == "cpu" else torch.device("cuda", (device.index or 0) + 1)


def _device_bytes(
    device: torch.device, devices: tuple[torch.device, ...], memory_bytes: int | None
) -> int:
    is_meant = device.type == "cuda" or all(other == CPU for other in devices)
    if memory_bytes is not None and is_meant:
        return memory_bytes
    if _is_here(device):
        return device_bytes(device)
    if torch.cuda.device_count() > 0:  # another device like those that are here
        return device_bytes(torch.device("cuda", 0))
    raise ConfigError(
        f"{device} is not on this machine, so its memory is unknown; give it with --device-memory "
        "GIB, such as --device-memory 80"
    )


def _is_here(device: torch.device) -> bool:
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
