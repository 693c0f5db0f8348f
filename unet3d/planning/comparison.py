"""The options for placing one training: the memory each takes, and the largest patch that fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from unet3d.config import Config, ParallelSettings
from unet3d.errors import DeviceError
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import Machine, ParallelDims
from unet3d.planning.choice import best_of, choice_line, settings_for, timed_options
from unet3d.planning.cuts import choose_cuts
from unet3d.planning.network_plan import NetworkPlan, check_stages
from unet3d.planning.placements import (
    PlacementOption,
    divided,
    is_here,
    memory_of,
    placed,
    possible_dims,
)
from unet3d.planning.tuning_cache import resolve_auto


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several options, and the memory that the devices have."""

    ways: tuple[PlacementOption, ...]
    """At least one device and several, with and without micro-batches."""
    asked: PlacementOption | None
    """Which of them the settings name, or leave open and is chosen."""
    choice: str | None
    """What mode ``auto`` chooses and why, in one line; None: the settings name a mode."""
    device_bytes: Mapping[torch.device, int]
    """Memory of each device."""
    notes: tuple[str, ...]
    """What a reader must know, a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; slots as in a run's ``memory.json``.

        The largest patches, which take longer to find, are left out.
        """
        step = self.ways[0].step  # the option of one device, which has the whole batch
        return {
            "shape": list(step.size),
            "batch_size": step.batch_size,
            "precision": step.precision,
            "channels": list(step.topology.channels),
            "notes": list(self.notes),
            "choice": self.choice,
            "ways": [self._way(way) for way in self.ways],
        }

    def _way(self, way: PlacementOption) -> dict[str, Any]:
        step, dims = way.step, way.dims
        slots: list[dict[str, Any]] = []
        num_ranks = dims.num_processes
        for rank in range(num_ranks):
            prediction = way.shards[dims.shard_of(rank)]
            num_slots = len(prediction.slots)
            devices = dims.all_devices[rank * num_slots : (rank + 1) * num_slots]
            for slot, device in zip(prediction.slots, devices, strict=True):
                row = {
                    "slot": len(slots),
                    "device": str(device),
                    "blocks": list(slot.blocks),
                    "device_bytes": self.device_bytes[device],
                    "predicted": prediction.memory[slot.index].to_dict(),
                }
                slots.append({**row, "rank": rank} if num_ranks > 1 else row)
        return {
            "parallel": dims.mode,
            "replicas": dims.num_replicas,
            "shards": dims.num_shards,
            "num_micro_batches": step.layout.num_micro_batches,
            "balance": way.balance,
            "asked": way is self.asked,
            "fits": way.fits,
            "step_seconds": way.seconds,
            "step_is_measured": way.is_measured,
            "slots": slots,
        }


def compare(
    config: Config,
    network: NetworkPlan,
    memory_bytes: int | None,
    watch: Callable[[int, int], object] = lambda number, total: None,
) -> Comparison:
    """Predict one device and several, with one micro-batch and with the configured number.

    ``memory_bytes`` is that of each GPU, or of the CPU without GPUs; None: that of this machine.
    ``watch`` is told before each prediction how many there were and will be in all.
    """
    config = network.settled(config)
    asked = dims_of(config.parallel, memory_bytes)
    check_stages(config, network, asked.num_stages)
    refuse_beyond_memory(network.topology)  # predictions make the weights, and do not touch them
    candidates = _candidates(config, network, asked)
    every = _beside(candidates, config, network, asked)
    several = tuple(dict.fromkeys(device for dims in every for device in dims.all_devices))
    memory = memory_of(several, memory_bytes)
    timed = {option.dims: option for option in timed_options(config, network, every, memory)}
    notes = list(_notes(config.parallel, memory_bytes))
    chosen, choice = asked, None
    if candidates != (asked,):
        watch(0, len(every))
        options = [timed[dims] for dims in candidates]
        best = best_of(options)
        chosen = best.dims
        choice = choice_line(options, best)
    if memory_bytes is None and all(map(is_here, chosen.all_devices)):
        placement = settings_for(config.parallel, chosen)
        config = resolve_auto(config.model_copy(update={"parallel": placement}), timed[chosen].step)
    counts = sorted({1, config.training.num_micro_batches})
    ways: list[PlacementOption] = []
    asked_way: PlacementOption | None = None
    for dims in every:
        for count in counts:
            watch(len(ways), len(every) * len(counts))
            way = timed[dims]
            cuts = config.parallel.cuts if dims == chosen else None
            if way.step.layout.num_micro_batches != count or cuts is not None:
                way = divided(way, count, cuts)
            if dims == chosen and dims.mode == "model" and _is_balanced(config):
                balance = config.parallel.wanted_balance
                way = divided(replace(way, balance=balance), count, choose_cuts(way.step, balance))
            if dims == chosen and count == config.training.num_micro_batches:
                asked_way = way
            _ = way.shards  # predicted while it is being watched
            ways.append(way)
    return Comparison(
        ways=tuple(ways), asked=asked_way, choice=choice, device_bytes=memory, notes=tuple(notes)
    )


def dims_of(settings: ParallelSettings, memory_bytes: int | None) -> ParallelDims:
    """Return the devices that settings name or imply, whether or not they are here."""
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


def _candidates(
    config: Config, network: NetworkPlan, asked: ParallelDims
) -> tuple[ParallelDims, ...]:
    """Return what mode ``auto`` chooses from; another mode has one candidate."""
    if config.parallel.mode != "auto":
        return (asked,)
    return possible_dims(config, network, asked.all_devices) or (asked,)


def _beside(
    candidates: Sequence[ParallelDims], config: Config, network: NetworkPlan, asked: ParallelDims
) -> list[ParallelDims]:
    """Return candidates with what a reader compares them with, one device first.

    That is all that can be on the same devices, or where it is one, on two; and two stages.
    """
    devices = asked.all_devices
    if len(devices) == 1:
        devices = (devices[0], _next(devices[0]))
    alone = config.parallel.model_copy(update={"replicas": 1})
    free = config.model_copy(update={"parallel": alone})
    found = [*possible_dims(free, network, devices), *candidates]
    if all(dims.mode != "model" for dims in found):
        with suppress(DeviceError):
            stages = placed(alone, "model", devices[:2])
            check_stages(config, network, stages.num_stages)
            found.append(stages)
    return list(dict.fromkeys(found))


def _is_balanced(config: Config) -> bool:
    """Return whether the cut in training depends on times or bytes."""
    return config.parallel.cuts is None and config.parallel.wanted_balance != "encoder-decoder"


def _next(device: torch.device) -> torch.device:
    """Return a second device like a first one."""
    return device if device.type == "cpu" else torch.device("cuda", (device.index or 0) + 1)
