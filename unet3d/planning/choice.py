"""How a training is placed on several devices where its settings leave that open: ``auto``.

Of one device, a replica on each, shards of one volume and replicas of shards, the fastest is taken
that fits. Its time is what ``plan --measure`` measured, else what
:mod:`unet3d.planning.step_time` predicts.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from unet3d.config import Config, ParallelSettings
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.parallel import Machine, ParallelDims, resolve_precision
from unet3d.planning.network_plan import NetworkPlan
from unet3d.planning.placements import (
    PlacementOption,
    is_here,
    make_option,
    memory_of,
    placed,
    possible_dims,
    settings_of,
)
from unet3d.planning.tuning_cache import recall_tuned

GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way of placing a training, and why."""

    settings: ParallelSettings
    """With a mode, devices and replicas that leave nothing open."""
    line: str
    """What was chosen and why, in one line."""


def choose_mode(
    config: Config,
    network: NetworkPlan,
    machine: Machine | None = None,
    ranks: Ranks | None = None,
) -> Choice:
    """Choose how to place a training whose settings leave that open.

    Memory is predicted only until something fits, the fastest first, so it takes a second or so.
    Nothing is random: the same settings on the same machine give the same. ``machine`` is this one
    by default; ``ranks`` are the processes that have been started, with a device each, if any.
    """
    config = network.settled(config)
    devices = ParallelDims.resolve(config.parallel, machine, ranks).all_devices
    num_ranks = 1 if ranks is None else ranks.world_size
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
    options = timed_options(config, network, found, memory_of(devices, None))
    option = best_of(options)
    settings = settings_for(config.parallel, option.dims)
    if num_ranks > 1:  # whose devices are those of each machine
        settings = settings.model_copy(update={"devices": config.parallel.devices})
    return Choice(settings=settings, line=choice_line(options, option))


def _numbered(device: torch.device, index: int) -> torch.device:
    return torch.device("cuda", index) if device.type == "cuda" else device


def settings_for(settings: ParallelSettings, dims: ParallelDims) -> ParallelSettings:
    """Return settings that name a mode, devices and replicas."""
    return settings_of(settings, dims.mode, dims.all_devices, dims.num_replicas)


def timed_options(
    config: Config,
    network: NetworkPlan,
    ways: Sequence[ParallelDims],
    memory: Mapping[torch.device, int],
) -> tuple[PlacementOption, ...]:
    """Return options with the time of each, measured if all are on this machine and it was."""
    devices = tuple(dict.fromkeys(device for dims in ways for device in dims.all_devices))
    precision = resolve_precision(config.training.precision, devices)
    knows = all(map(is_here, devices))
    options = tuple(
        make_option(
            config,
            network,
            dims,
            precision=precision,
            num_micro_batches=config.training.num_micro_batches,
            memory=memory,
        )
        for dims in ways
    )
    return _as_measured(config, options) if knows else options


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
    too_large = [
        option for option in by_time(options) if (option.seconds or 0.0) < (chosen.seconds or 0.0)
    ]
    if too_large:
        return f"{line}; {in_words(too_large[0].dims)} would be faster but does not fit"
    return line


def in_words(dims: ParallelDims) -> str:
    """Return a way of placing a training in a few words."""
    kind = "GPU" if dims.all_devices[0].type == "cuda" else "CPU process"
    if dims.mode == "none":
        return f"none, on {dims.all_devices[0]}"
    if dims.mode == "model":
        return f"model over {','.join(map(str, dims.all_devices))}"
    if dims.mode == "data" or dims.num_replicas == 1:
        return f"{dims.mode} over {_count(len(dims.all_devices), kind)}"
    return f"{dims.num_replicas} replicas of spatial over {_count(dims.num_shards, kind)} each"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'es' if what.endswith('s') else 's'}"


def _milliseconds(option: PlacementOption) -> str:
    milliseconds = 1000 * (option.seconds or 0.0)
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:.0f}"


def _as_measured(
    config: Config, options: tuple[PlacementOption, ...]
) -> tuple[PlacementOption, ...]:
    """Return the options with the times that were measured; other times by the same factor."""
    found = {
        index: known.step_seconds
        for index, option in enumerate(options)
        if (known := recall_tuned(config, option.step)) is not None
    }
    ratios = [
        seconds / predicted
        for index, seconds in found.items()
        if (predicted := options[index].seconds) is not None
    ]
    factor = statistics.median(ratios) if ratios else 1.0
    return tuple(
        replace(
            option,
            seconds=found.get(index, option.seconds and factor * option.seconds),
            is_measured=index in found,
        )
        for index, option in enumerate(options)
    )
