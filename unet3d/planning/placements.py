"""Which way to place a training is taken where the settings leave that open (``auto``).

It is the fastest that fits, of one device, a replica on each, shards of one volume and replicas of
shards. Its time is what ``plan --measure`` measured, else what :mod:`unet3d.planning.step_time`
predicts.
"""

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from unet3d.config import Config, ParallelSettings, Shape
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.parallel import ParallelDims, resolve_precision
from unet3d.planning.largest import largest_size
from unet3d.planning.link_speed import link_line, measure_link
from unet3d.planning.memory_estimate import MemoryEstimate, Step, predict_memory, predict_shards
from unet3d.planning.network_plan import NetworkPlan
from unet3d.planning.step_time import step_seconds
from unet3d.planning.tuning_cache import recall_tuned
from unet3d.planning.ways import (
    all_devices,
    in_words,
    is_here,
    limits_of,
    memory_of,
    numbered,
    placed,
    possible_dims,
    settings_for,
)

logger = logging.getLogger(__name__)

GIB = 1024**3
MIB = 1024**2


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
        devices = tuple(numbered(devices[0], index) for index in range(num_ranks))
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
    devices = all_devices(ways)
    precision = resolve_precision(config.training.precision, devices)

    def predicted(dims: ParallelDims) -> PlacementOption:
        step = network.step(config, dims, precision).fullest()
        step = replace(step, layout=replace(step.layout, cuts=None))
        limits, seconds = limits_of(dims, memory), step_seconds(step, link)
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


def _milliseconds(option: PlacementOption) -> str:
    milliseconds = 1000 * (option.seconds or 0.0)
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:.0f}"
