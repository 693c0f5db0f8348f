"""The possible placements of a training run on devices, and the choice of mode ``auto``.

The choice is the fastest that fits among one device, replicas, slabs of one volume, and replicas of
slabs. Times were measured by ``plan --measure``, or are predicted by
:mod:`unet3d.planning.step_time`.
"""

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from unet3d.config import Config, ParallelSettings, Shape
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError
from unet3d.memory.gpus import unknown_memory
from unet3d.memory.record import device_bytes
from unet3d.parallel import Machine, ParallelDims, resolve_precision
from unet3d.planning.link_speed import link_line, measure_link
from unet3d.planning.memory_estimate import GIB, MemoryEstimate, Step, predict_memory
from unet3d.planning.network_plan import NetworkPlan, check_shards, check_stages
from unet3d.planning.step_size import largest_size
from unet3d.planning.step_time import step_seconds
from unet3d.planning.tuning_cache import is_here, recall_tuned

logger = logging.getLogger(__name__)

Devices = tuple[torch.device, ...]


@dataclass(frozen=True, kw_only=True)
class PlacementOption:
    """One placement of a training run; its memory is predicted on first use."""

    dims: ParallelDims
    step: Step
    """The step of the replica with the largest share of the batch, on the first replica's devices;
    with shards, the step of the fullest shard."""
    limits: Mapping[torch.device, int]
    """Bytes that each device of the step may hold, so that every replica and shard fits."""
    link: float | None
    """The speed of the link between its GPUs, as :func:`measure_link` returns it."""
    seconds: float | None
    """Time of a step; None: unknown without measuring."""
    is_measured: bool = False
    """Whether the time was measured, not predicted."""

    @cached_property
    def prediction(self) -> MemoryEstimate:
        """The memory of the step, without memory that allocators reserve in addition."""
        return predict_memory(self.step)

    @property
    def load(self) -> float:
        """The share of its memory that the fullest device needs; up to 1 the placement fits."""
        return self.prediction.load(self.limits)

    def largest(self) -> Shape | None:
        """Search for the largest patch of the same aspect that fits, if any; it takes a while."""
        return largest_size(self.step, self.limits, self.prediction)

    def divided(
        self, num_micro_batches: int, cuts: tuple[int, ...] | None = None
    ) -> "PlacementOption":
        """Return the same placement with other micro-batches and cuts; its time is predicted."""
        layout = replace(self.step.layout, num_micro_batches=num_micro_batches, cuts=cuts)
        step = replace(self.step, layout=layout)
        return replace(self, step=step, seconds=step_seconds(step, self.link), is_measured=False)


def choose_mode(
    config: Config, network: NetworkPlan, ranks: Ranks | None = None
) -> tuple[ParallelSettings, str]:
    """Choose the placement of a training run if its settings leave it open; the line says why.

    Memory is predicted for the fastest placement first, until one fits, which takes about a second.
    The link between GPUs is measured. ``ranks`` are the processes that have been started, with
    a device each, if any.
    """
    config = network.settled(config)
    devices = ParallelDims.resolve(config.parallel, ranks=ranks).all_devices
    num_ranks = 1 if ranks is None else ranks.world_size
    link = measure_link(devices, are_here=num_ranks <= len(devices))
    if num_ranks > len(devices):  # of several machines, which are treated as one
        devices = tuple(numbered(devices[0], index) for index in range(num_ranks))
    found = possible_dims(config, network, devices)
    if num_ranks > 1:
        found = [dims for dims in found if dims.num_processes == num_ranks] or [
            placed(config.parallel, "data", devices)
        ]
    if not found:
        raise ConfigError(
            f"no mode of --parallel suits parallel.replicas {config.parallel.replicas} on "
            f"{','.join(map(str, devices))} with this patch and a batch of "
            f"{network.batch_size}; leave replicas out, or name a mode with --parallel"
        )
    if link is not None:
        logger.info("%s", link_line(link))
    options = timed_options(config, network, found, memory_of(devices, None), link)
    option = best_of(options)
    settings = settings_for(config.parallel, option.dims)
    if num_ranks > 1:  # which take the devices that the settings name on each machine
        settings = settings.model_copy(update={"devices": config.parallel.devices})
    return settings, choice_line(options, option)


def possible_dims(config: Config, network: NetworkPlan, devices: Devices) -> list[ParallelDims]:
    """Return the placements of a training run that suit its network, patch and batch.

    First comes one device, unless several replicas are requested. Then come, over all devices:
    replicas, slabs of one volume, and replicas of fewer slabs; stages only if none of these is
    possible.
    """
    wanted = config.parallel.replicas
    one = placed(config.parallel, "none", devices[:1])
    if len(devices) == 1:
        return [one]
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
    return [one, *spread] if wanted == 1 else spread


def if_possible(
    config: Config, network: NetworkPlan, mode: str, devices: Devices, num_replicas: int
) -> list[ParallelDims]:
    """Return a list with the mode on the devices; empty if devices or network do not suit it."""
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
    """Return a mode on devices, which need not exist, or raise DeviceError."""
    named = _settings_of(settings, mode, devices, num_replicas)
    return ParallelDims.resolve(named, Machine(num_gpus=0, is_real=False))


def settings_for(settings: ParallelSettings, dims: ParallelDims) -> ParallelSettings:
    """Return settings with the mode, devices and replicas of a placement."""
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
    """Return the devices that settings name or imply, whether or not they exist."""
    settings = settings.model_copy(update={"data_parallel": False})
    num_gpus = 2 * settings.replicas if has_gpu(memory_bytes) else 0
    return ParallelDims.resolve(settings, Machine(num_gpus=num_gpus, is_real=False))


def has_gpu(memory_bytes: int | None) -> bool:
    """Return whether this machine has a GPU, or one is described by its memory."""
    return torch.cuda.device_count() > 0 or memory_bytes is not None


def numbered(device: torch.device, index: int) -> torch.device:
    """Return a GPU with another index; a CPU is returned unchanged."""
    return torch.device("cuda", index) if device.type == "cuda" else device


def all_devices(ways: Iterable[ParallelDims]) -> Devices:
    """Return the devices of several placements, each once."""
    return tuple(dict.fromkeys(device for dims in ways for device in dims.all_devices))


def devices_of_ranks(dims: ParallelDims) -> list[Devices]:
    """Return the devices of each process."""
    size = len(dims.all_devices) // dims.num_processes
    return list(zip(*[iter(dims.all_devices)] * size, strict=True))


def memory_of(devices: Sequence[torch.device], memory_bytes: int | None) -> dict[torch.device, int]:
    """Return the bytes of memory of each device, which need not exist.

    ``memory_bytes`` is the memory of each GPU, or of the CPU if no device is a GPU; None: this
    machine's.
    """
    has_gpus = any(device.type == "cuda" for device in devices)

    def bytes_of(device: torch.device) -> int:
        if memory_bytes is not None and (device.type == "cuda") == has_gpus:
            return memory_bytes
        if is_here(device):
            return device_bytes(device)
        if torch.cuda.device_count() > 0:  # assume a GPU like those of this machine
            return device_bytes(torch.device("cuda", 0))
        raise unknown_memory(device)

    return {device: bytes_of(device) for device in devices}


def timed_options(
    config: Config,
    network: NetworkPlan,
    ways: Iterable[ParallelDims],
    memory: Mapping[torch.device, int],
    link: float | None = None,
) -> list[PlacementOption]:
    """Return options with default cuts and their times, before any memory is predicted.

    Measured times are preferred; if only some exist, the other predicted times are multiplied by
    the median ratio of measured to predicted times.
    """
    ways = list(ways)
    precision = resolve_precision(config.training.precision, all_devices(ways))

    def predicted(dims: ParallelDims) -> PlacementOption:
        step = network.step(config, dims, precision).fullest()
        step = replace(step, layout=replace(step.layout, cuts=None))
        limits, seconds = _limits_of(dims, memory), step_seconds(step, link)
        return PlacementOption(dims=dims, step=step, limits=limits, link=link, seconds=seconds)

    options = [predicted(dims) for dims in ways]
    found = [recall_tuned(config, option.step) for option in options]
    both = list(zip(options, found, strict=True))
    ratios = [known.step_seconds / one.seconds for one, known in both if known and one.seconds]
    factor = statistics.median(ratios) if ratios else 1.0
    return [
        replace(one, seconds=known.step_seconds, is_measured=True)
        if known
        else replace(one, seconds=one.seconds and factor * one.seconds)
        for one, known in both
    ]


def _limits_of(dims: ParallelDims, memory: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Return the limit of each device of the step, so that every replica and shard fits."""
    limits: dict[torch.device, int] = {}
    ranks = devices_of_ranks(dims)
    for places in zip(*ranks, strict=True):
        least = min(memory[device] for device in places)
        if places[0].type == "cpu":  # they share the machine's memory
            least //= len(ranks)
        limits[places[0]] = min(least, limits.get(places[0], least))
    return limits


def best_of(options: Sequence[PlacementOption]) -> PlacementOption:
    """Return the fastest option that fits, or the least loaded if none does.

    Stages are among the options only if no other mode can use all devices; then they are taken.
    """
    stages = [option for option in options if option.dims.mode == "model"]
    fitting = (option for option in sorted(options, key=_seconds) if option.load <= 1)
    return next(iter(stages), None) or next(fitting, None) or min(options, key=lambda one: one.load)


def choice_line(options: Sequence[PlacementOption], chosen: PlacementOption) -> str:
    """Say in one line what was chosen, and why."""
    name = f"parallel: {in_words(chosen.dims)}"
    if chosen.dims.mode == "model":
        return f"{name}, the only way to use these devices with this patch and batch"
    peak = max(memory.peak_bytes for memory in chosen.prediction.memory.values())
    amount = f"{peak / GIB:.1f} GiB" if peak > GIB / 10 else f"{peak / 2**20:.0f} MiB"
    amount += " each" if len(chosen.dims.all_devices) > 1 else ""
    others = sorted((option for option in options if option is not chosen), key=_seconds)
    rival = next((one for one in others if one.dims.mode == "none"), next(iter(others), None))
    against = ""
    if rival is not None:
        where = "on one device" if rival.dims.mode == "none" else f"with {in_words(rival.dims)}"
        against = f" against {_milliseconds(rival)} {where}"
    how = "measured" if chosen.is_measured else "predicted"
    line = f"{name}: {how} {_milliseconds(chosen)} ms a step{against}; {amount}"
    if chosen.load > 1:
        return f"{line}; no placement fits, this one comes closest"
    if others and _seconds(others[0]) < _seconds(chosen):
        return f"{line}; {in_words(others[0].dims)} would be faster but does not fit"
    return line


def in_words(dims: ParallelDims) -> str:
    """Describe a placement of a training run in a few words."""
    if dims.mode == "none":
        return f"none, on {dims.all_devices[0]}"
    if dims.mode == "model":
        return f"model over {','.join(map(str, dims.all_devices))}"
    kind = "GPUs" if dims.all_devices[0].type == "cuda" else "CPU processes"
    if dims.mode == "data" or dims.num_replicas == 1:
        return f"{dims.mode} over {len(dims.all_devices)} {kind}"
    return f"{dims.num_replicas} replicas of spatial over {dims.num_shards} {kind} each"


def _seconds(option: PlacementOption) -> float:
    return option.seconds or 0.0


def _milliseconds(option: PlacementOption) -> str:
    milliseconds = 1000 * _seconds(option)
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:.0f}"
