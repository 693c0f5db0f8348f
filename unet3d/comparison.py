"""Every way of placing one training side by side: what it takes, and how large it could be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from unet3d.choices import Circumstances, settle
from unet3d.config import Config, Shape
from unet3d.errors import ConfigError
from unet3d.experiment import NetworkPlan
from unet3d.memory import device_bytes
from unet3d.model import UNet3d
from unet3d.optimization import autocast_dtype, num_states
from unet3d.parallel import Layout, choose_cuts, default_precision, resolve_devices
from unet3d.planner import Prediction, Step, largest_size, predict_memory
from unet3d.volumes.cache import Cache

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """One way of placing a training.

    Attributes:
        parallel: The mode.
        prediction: What it takes.
        fits: Whether each device has that.
        largest: The largest patch of the same aspect that fits, in voxels; None: not even the
            smallest does.
        is_asked: Whether it is the one that the settings name.
        balance: What its cut makes level, where that is not the default.
    """

    parallel: str
    prediction: Prediction
    fits: bool
    largest: Shape | None
    is_asked: bool
    balance: str | None


@dataclass(frozen=True)
class Comparison:
    """Several ways, and the memory that they have.

    Attributes:
        ways: At least one device and several, with and without micro-batches.
        device_bytes: Memory of each device.
        notes: What a reader must know, a sentence each.
    """

    ways: tuple[Way, ...]
    device_bytes: Mapping[torch.device, int]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; slots as in a run's ``memory.json``."""
        step = self.ways[0].prediction.step
        return {
            "shape": list(step.size),
            "batch_size": step.batch_size,
            "precision": step.precision,
            "channels": list(step.topology.channels),
            "notes": list(self.notes),
            "ways": [self._way(way) for way in self.ways],
        }

    def _way(self, way: Way) -> dict[str, Any]:
        prediction = way.prediction
        return {
            "parallel": way.parallel,
            "num_micro_batches": prediction.step.layout.num_micro_batches,
            "balance": way.balance,
            "asked": way.is_asked,
            "fits": way.fits,
            "largest_shape": way.largest and list(way.largest),
            "slots": [
                {
                    "slot": slot.index,
                    "device": str(slot.device),
                    "blocks": list(slot.blocks),
                    "device_bytes": self.device_bytes[slot.device],
                    "predicted": prediction.memory[slot.index].to_dict(),
                }
                for slot in prediction.slots
            ],
        }


def compare(config: Config, network: NetworkPlan, memory_bytes: int | None) -> Comparison:
    """Predict one device and several, with one micro-batch and with the configured number.

    Args:
        config: The settings; devices that are not here are allowed.
        network: What is trained.
        memory_bytes: Of each GPU, or where none is meant, of the CPU; None: as it is here.

    Raises:
        DeviceError: A device's name is unknown, or the devices do not suit the mode.
        ConfigError: The memory of a device that is not here is not given.
    """
    asked, notes = _devices(config, memory_bytes)
    several = asked if len(asked) > 1 else (asked[0], _next(asked[0]))
    precision = _precision(config, several)
    memory = {device: _device_bytes(device, several, memory_bytes) for device in several}
    if memory_bytes is None and all(_is_here(device) for device in asked):
        config = settle(Circumstances(config, network.topology, network.size, asked, precision))
    counts = sorted({1, config.training.num_micro_batches})
    ways = []
    for mode, devices in (("none", asked[:1]), ("model", several)):
        for count in counts:
            layout = Layout(
                devices,
                None,
                count,
                autocast_dtype(precision),
                config.parallel.schedule,
                config.memory.recompute,
                config.memory.offload,
            )
            is_balanced = mode == config.parallel.mode and _is_balanced(config)
            if mode == config.parallel.mode:
                layout = replace(layout, cuts=_cuts(config, network, layout, precision))
            step = Step(
                network.topology,
                layout,
                network.size,
                config.training.batch_size,
                config.training,
                precision,
            )
            prediction = predict_memory(step)
            ways.append(
                Way(
                    parallel=mode,
                    prediction=prediction,
                    fits=prediction.load(memory) <= 1,
                    largest=largest_size(step, memory),
                    is_asked=mode == config.parallel.mode
                    and count == config.training.num_micro_batches,
                    balance=config.parallel.balance if is_balanced else None,
                )
            )
    return Comparison(tuple(ways), memory, tuple(notes))


def _devices(
    config: Config, memory_bytes: int | None
) -> tuple[tuple[torch.device, ...], list[str]]:
    """Return the devices that the settings name or mean, and what to say of them."""
    settings = config.parallel
    notes: list[str] = []
    if settings.devices is None:
        has_gpu = torch.cuda.device_count() > 0 or memory_bytes is not None
        if not has_gpu:
            notes.append(
                "This machine has no GPU, so its CPU is meant; --device-memory GIB describes a GPU."
            )
        names = ("0", "1") if has_gpu else ("cpu", "cpu")
        num_devices = 1 if settings.mode == "none" else 2
        settings = settings.model_copy(update={"devices": names[:num_devices]})
    return resolve_devices(settings, must_exist=False), notes


def _is_balanced(config: Config) -> bool:
    """Return whether the cut in training follows from times or bytes."""
    return config.parallel.cuts is None and config.parallel.wanted_balance != "encoder-decoder"


def _cuts(
    config: Config, network: NetworkPlan, layout: Layout, precision: str
) -> tuple[int, ...] | None:
    """Return where training would cut the network; None: at the default place.

    Raises:
        ConfigError: That depends on measurements on a device that is not here.
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
    if precision == "float64":
        model.double()
    return choose_cuts(
        model,
        layout,
        balance,
        network.size,
        config.training.batch_size,
        num_states(config.training),
        Cache(config.data.cache).folder / "timings",
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
    if torch.cuda.device_count() > 0:  # another one like those that are here
        return device_bytes(torch.device("cuda", 0))
    raise ConfigError(
        f"{device} is not on this machine, so its memory is unknown; give it with --device-memory "
        "GIB, such as --device-memory 80"
    )


def _precision(config: Config, devices: tuple[torch.device, ...]) -> str:
    wanted = config.training.precision
    if wanted != "auto":
        return wanted
    if all(_is_here(device) for device in devices):
        return default_precision(devices)
    return "bfloat16"


def _is_here(device: torch.device) -> bool:
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
