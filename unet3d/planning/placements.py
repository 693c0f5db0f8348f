"""How a training can be placed on its devices: what each way needs, and which one is taken.

Where the settings leave that open (``auto``), it is the fastest that fits, of one device, a replica
on each, shards of one volume and replicas of shards. Its time is what ``plan --measure`` measured,
else what :mod:`unet3d.planning.step_time` predicts. ``plan`` shows all ways side by side.
"""

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from unet3d.config import Config, ParallelSettings, Shape
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError
from unet3d.memory.record import device_bytes
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import Machine, ParallelDims, resolve_precision
from unet3d.planning.cuts import choose_cuts
from unet3d.planning.largest import largest_size
from unet3d.planning.link_speed import link_line, measure_link
from unet3d.planning.memory_estimate import MemoryEstimate, Step, predict_memory, predict_shards
from unet3d.planning.network_plan import NetworkPlan, check_shards, check_stages
from unet3d.planning.step_time import step_seconds
from unet3d.planning.tuning_cache import recall_tuned, resolve_auto

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
GIB = 1024**3
MIB = 1024**2

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
    link: float | None
    """The speed of the link between its GPUs, as :func:`measure_link` returns it."""
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

    def divided(
        self, num_micro_batches: int, cuts: tuple[int, ...] | None = None
    ) -> "PlacementOption":
        """Return the same placement with other micro-batches and cuts; its time is predicted."""
        layout = replace(self.step.layout, num_micro_batches=num_micro_batches, cuts=cuts)
        step = replace(self.step, layout=layout)
        seconds = step_seconds(step, self.link)
        return replace(self, step=step, seconds=seconds, is_measured=False)


def choose_mode(
    config: Config, network: NetworkPlan, ranks: Ranks | None = None
) -> tuple[ParallelSettings, str]:
    """Choose how to place a training whose settings leave that open; the line says why.

    Memory is predicted only until something fits, the fastest first, so it takes a second or so,
    and the link between GPUs is measured. ``ranks`` are the processes that have been started, with
    a device each, if any.
    """
    config = network.settled(config)
    devices = ParallelDims.resolve(config.parallel, ranks=ranks).all_devices
    num_ranks = 1 if ranks is None else ranks.world_size
    link = measure_link(devices, are_here=num_ranks <= len(devices))
    if num_ranks > len(devices):  # of several machines, taken for one
        devices = tuple(_numbered(devices[0], index) for index in range(num_ranks))
    found = possible_dims(config, network, devices)
    if num_ranks > 1:
        found = tuple(dims for dims in found if dims.num_processes == num_ranks) or (
            placed(config.parallel, "data", devices),
        )
    if not found:
        raise ConfigError(
            f"parallel.replicas is {config.parallel.replicas}, for which there is no mode on "
            f"{','.join(map(str, devices))} with this patch and a batch of "
            f"{network.batch_size}; leave replicas out, or name a mode with --parallel"
        )
    if link is not None:
        logger.info("%s", link_line(link))
    options = timed_options(config, network, found, memory_of(devices, None), link)
    option = best_of(options)
    settings = settings_for(config.parallel, option.dims)
    if num_ranks > 1:  # whose devices are those of each machine
        settings = settings.model_copy(update={"devices": config.parallel.devices})
    return settings, choice_line(options, option)


def compare(
    config: Config,
    network: NetworkPlan,
    memory_bytes: int | None,
    watch: Callable[[int, int], object] = lambda number, total: None,
) -> tuple[list[PlacementOption], dict[str, Any]]:
    """Predict one device and several, with one micro-batch and with the configured number.

    The record of these options has slots as in a run's ``memory.json``, and under ``choice`` what
    mode ``auto`` chooses; the largest patches, which take longer to find, are left out.
    ``memory_bytes`` is that of each GPU, or of the CPU without GPUs; None: that of this machine.
    ``watch`` is told before each prediction how many there were and will be in all.
    """
    config = network.settled(config)
    asked = dims_of(config.parallel, memory_bytes)
    check_stages(config, network, asked.num_stages)
    refuse_beyond_memory(network.topology)  # predictions make the weights, and do not touch them
    candidates: tuple[ParallelDims, ...] = (asked,)  # what auto chooses from; else one
    if config.parallel.mode == "auto":
        candidates = possible_dims(config, network, asked.all_devices) or candidates
    every = _beside(candidates, config, network, asked)
    several = _all_devices(every)
    link = measure_link(several, are_here=memory_bytes is None)
    memory = memory_of(several, memory_bytes)
    timed = {option.dims: option for option in timed_options(config, network, every, memory, link)}
    notes = list(_notes(config.parallel, memory_bytes))
    notes += [] if link is None else [f"{link_line(link)}."]
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
    # A cut that depends on times or bytes is the training's.
    balance = config.parallel.balance
    counts = sorted({1, config.training.num_micro_batches})
    ways: list[PlacementOption] = []
    rows: list[dict[str, Any]] = []
    for dims in every:
        for count in counts:
            watch(len(ways), len(every) * len(counts))
            way, is_chosen = timed[dims], dims == chosen
            cuts = config.parallel.cut_blocks if is_chosen else None
            if way.step.layout.num_micro_batches != count or cuts is not None:
                way = way.divided(count, cuts)
            if is_chosen and dims.mode == "model" and balance is not None:
                cuts = choose_cuts(way.step, balance)
                way = replace(way, balance=balance).divided(count, cuts)
            ways.append(way)
            is_asked = is_chosen and count == config.training.num_micro_batches
            rows.append({**_row(way, memory), "asked": is_asked})
    step = ways[0].step  # the option of one device, which has the whole batch
    return ways, {
        "shape": list(step.size),
        "batch_size": step.batch_size,
        "precision": step.precision,
        "channels": list(step.topology.channels),
        "notes": notes,
        "choice": choice,
        "ways": rows,
    }


def _row(way: PlacementOption, memory: Mapping[torch.device, int]) -> dict[str, Any]:
    dims = way.dims
    slots: list[dict[str, Any]] = []
    for rank, devices in enumerate(_devices_of_ranks(dims)):
        prediction = way.shards[dims.shard_of(rank)]
        for slot, device in zip(prediction.slots, devices, strict=True):
            row = {
                "slot": len(slots),
                "device": str(device),
                "blocks": list(slot.blocks),
                "device_bytes": memory[device],
                "predicted": prediction.memory[slot.index].to_dict(),
            }
            slots.append({**row, "rank": rank} if dims.num_processes > 1 else row)
    return {
        "parallel": dims.mode,
        "replicas": dims.num_replicas,
        "shards": dims.num_shards,
        "num_micro_batches": way.step.layout.num_micro_batches,
        "balance": way.balance,
        "fits": way.fits,
        "step_seconds": way.seconds,
        "step_is_measured": way.is_measured,
        "slots": slots,
    }


def timed_options(
    config: Config,
    network: NetworkPlan,
    ways: Sequence[ParallelDims],
    memory: Mapping[torch.device, int],
    link: float | None = None,
) -> tuple[PlacementOption, ...]:
    """Return options, cut at the default place, with the time of each, and no memory predicted yet.

    The time is measured if all are on this machine and it was; where only some were, the predicted
    times of the others change by the same factor.
    """
    devices = _all_devices(ways)
    precision = resolve_precision(config.training.precision, devices)

    def predicted(dims: ParallelDims) -> PlacementOption:
        step = network.step(config, dims, precision).fullest()
        step = replace(step, layout=replace(step.layout, cuts=None))
        limits, seconds = _limits(dims, memory), step_seconds(step, link)
        return PlacementOption(dims=dims, step=step, limits=limits, link=link, seconds=seconds)

    options = tuple(map(predicted, ways))
    if not all(map(is_here, devices)):
        return options
    found = {option.dims: recall_tuned(config, option.step) for option in options}
    ratios = [
        known.step_seconds / option.seconds
        for option in options
        if (known := found[option.dims]) is not None and option.seconds is not None
    ]
    factor = statistics.median(ratios) if ratios else 1.0

    def timed(option: PlacementOption) -> PlacementOption:
        known = found[option.dims]
        if known is not None:
            return replace(option, seconds=known.step_seconds, is_measured=True)
        return replace(option, seconds=option.seconds and factor * option.seconds)

    return tuple(map(timed, options))


def best_of(options: Sequence[PlacementOption]) -> PlacementOption:
    """Return the fastest option that fits, or the least loaded where none does.

    Stages are the last resort, so where they are among the options, they are taken.
    """
    stages = [option for option in options if option.dims.mode == "model"]
    if stages:
        return stages[0]
    for option in by_time(options):
        if option.fits:
            return option
    return min(options, key=lambda option: option.load)


def by_time(options: Sequence[PlacementOption]) -> list[PlacementOption]:
    """Return options, the fastest first."""
    return sorted(options, key=lambda option: option.seconds or 0.0)


def choice_line(options: Sequence[PlacementOption], chosen: PlacementOption) -> str:
    """Say in one line what was chosen, and why."""
    name = f"parallel: {in_words(chosen.dims)}"
    if chosen.dims.mode == "model":
        return f"{name}, the only way to use these devices with this patch and batch"
    others = [option for option in options if option is not chosen]
    peak = max(memory.peak_bytes for memory in chosen.prediction.memory.values())
    amount = f"{peak / GIB:.1f} GiB" if peak > GIB / 10 else f"{peak / MIB:.0f} MiB"
    amount += " each" if len(chosen.dims.all_devices) > 1 else ""
    one = next((option for option in others if option.dims.mode == "none"), None)
    against = ""
    if one is not None:
        against = f" against {_milliseconds(one)} on one"
    elif others:
        fastest = by_time(others)[0]
        against = f" against {_milliseconds(fastest)} with {in_words(fastest.dims)}"
    how = "measured" if chosen.is_measured else "predicted"
    line = f"{name}: {how} {_milliseconds(chosen)} ms a step{against}; {amount}"
    if not chosen.fits:
        return f"{line}, which is too much, but the least of all"
    fastest = by_time(options)[0]
    if (fastest.seconds or 0.0) < (chosen.seconds or 0.0):
        return f"{line}; {in_words(fastest.dims)} would be faster but does not fit"
    return line


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


def _milliseconds(option: PlacementOption) -> str:
    milliseconds = 1000 * (option.seconds or 0.0)
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:.0f}"


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
            spread += _if_possible(config, network, mode, devices, count)
    spread = spread or _if_possible(config, network, "model", devices, wanted)
    return (one, *spread) if wanted == 1 else tuple(spread)


def _if_possible(
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


def _beside(
    candidates: Sequence[ParallelDims], config: Config, network: NetworkPlan, asked: ParallelDims
) -> list[ParallelDims]:
    """Return candidates with what a reader compares them with, one device first.

    That is all that can be on the same devices, or where it is one, on two; and two stages.
    """
    devices = asked.all_devices
    if len(devices) == 1:
        devices = (devices[0], _numbered(devices[0], (devices[0].index or 0) + 1))
    alone = config.parallel.model_copy(update={"replicas": 1})
    free = config.model_copy(update={"parallel": alone})
    found = [*possible_dims(free, network, devices), *candidates]
    if all(dims.mode != "model" for dims in found):
        found += _if_possible(free, network, "model", devices[:2], 1)
    return list(dict.fromkeys(found))


def dims_of(settings: ParallelSettings, memory_bytes: int | None) -> ParallelDims:
    """Return the devices that settings name or imply, whether or not they are here."""
    settings = settings.model_copy(update={"data_parallel": False})
    num_gpus = 2 * settings.replicas if _has_gpu(memory_bytes) else 0
    return ParallelDims.resolve(settings, Machine(num_gpus=num_gpus, is_real=False))


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


def _notes(settings: ParallelSettings, memory_bytes: int | None) -> Iterator[str]:
    if settings.devices is None and not _has_gpu(memory_bytes):
        yield "This machine has no GPU, so its CPU is meant; --device-memory GIB describes a GPU."
    if settings.data_parallel is not False:
        yield (
            "parallel.data_parallel=true is not predicted: each step copies the network to every "
            "GPU but the first, which gathers what they make. What is shown is a process for each."
        )


def _has_gpu(memory_bytes: int | None) -> bool:
    return torch.cuda.device_count() > 0 or memory_bytes is not None


def _all_devices(ways: Iterable[ParallelDims]) -> Devices:
    return tuple(dict.fromkeys(device for dims in ways for device in dims.all_devices))


def _numbered(device: torch.device, index: int) -> torch.device:
    """Return another device like one, which for a CPU is itself."""
    return torch.device("cuda", index) if device.type == "cuda" else device


def memory_of(devices: Iterable[torch.device], memory_bytes: int | None) -> dict[torch.device, int]:
    """Return the bytes that each device has, which need not be here.

    ``memory_bytes`` is that of each GPU, or of the CPU without GPUs; None: that of this machine.
    """
    several = tuple(dict.fromkeys(devices))
    return {device: _device_bytes(device, several, memory_bytes) for device in several}


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


def is_here(device: torch.device) -> bool:
    """Return whether this machine has a device."""
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()


def _devices_of_ranks(dims: ParallelDims) -> list[Devices]:
    """Return the devices of each process."""
    size = len(dims.all_devices) // dims.num_processes
    return list(zip(*[iter(dims.all_devices)] * size, strict=True))


def _limits(dims: ParallelDims, memory: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Return the limit of each device of the step, so that every replica and shard fits."""
    limits: dict[torch.device, int] = {}
    ranks = _devices_of_ranks(dims)
    for places in zip(*ranks, strict=True):
        least = min(memory[device] for device in places)
        if places[0] == CPU:  # they share the machine's memory
            least //= len(ranks)
        limits[places[0]] = min(least, limits.get(places[0], least))
    return limits
