"""Where to cut the block list so that all stages take equal time or equal memory.

The most expensive stage counts. For time, because the others wait for it once the pipeline is full;
for memory, because its device is the first that a larger volume no longer fits on.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Literal

import torch

from unet3d.model import UNet3d
from unet3d.parallel.partition import (
    StageCost,
    cheapest_cuts,
    check_num_stages,
    default_cuts,
)
from unet3d.planning.block_work import count_work
from unet3d.planning.memory_estimate import Step, predict_memory
from unet3d.planning.step_time import element_bytes, rates_of

logger = logging.getLogger(__name__)

Cuts = tuple[int, ...]


def choose_cuts(step: Step, balance: Literal["encoder-decoder", "time", "memory"]) -> Cuts:
    """Return where to cut the network of a step; its layout's own cuts are ignored."""
    with torch.device("meta"):
        model = UNet3d(step.topology)
    num_stages, names = len(step.layout.devices), [block.name for block in model.blocks()]
    check_num_stages(model, num_stages)
    if balance == "encoder-decoder" or num_stages == 1:
        return default_cuts(model, step.layout)
    if balance == "time":
        cost = _time_cost(step)
        cuts = cheapest_cuts(cost, len(names), num_stages)
        ends = enumerate(pairwise((0, *cuts, len(names))))
        costs = [f"{1000 * cost(stage, *run):.3g} ms" for stage, run in ends]
    else:
        cuts, peaks = _memory_cuts(step, default_cuts(model, step.layout))
        costs = [f"{peak / 2**20:,.0f} MiB" for peak in peaks]
    logger.info(
        "balanced by %s: cut before %s (parallel.cuts=%s); predicted for each stage %s",
        balance,
        " and ".join(names[cut] for cut in cuts),
        ",".join(map(str, cuts)),
        ", ".join(costs),
    )
    return cuts


def _time_cost(step: Step) -> StageCost:
    """Return the seconds of one micro-batch in each possible stage, on the stage's own device."""
    devices = step.layout.devices
    num_samples = math.ceil(step.batch_size / min(step.layout.num_micro_batches, step.batch_size))
    work = count_work(step.topology, step.size, num_samples, element_bytes(step.precision))
    seconds = {
        device: [block.seconds(rates_of(device, step.precision)) for block in work]
        for device in devices
    }
    return lambda stage, start, end: sum(seconds[devices[stage]][start:end])


def _memory_cuts(step: Step, default: Cuts) -> tuple[Cuts, tuple[int, ...]]:
    """Return the cuts whose fullest stage needs least memory, and the predicted peak of each stage.

    It begins with the default, and where the maps that are kept are shared equally. From each
    stages hand blocks to their neighbours while that lowers the peaks, the highest first.
    """
    layout, topology = step.layout, step.topology

    @cache
    def peaks(cuts: Cuts) -> tuple[int, ...]:
        cut = replace(step, layout=replace(layout, cuts=cuts))
        memory = predict_memory(cut).memory
        return tuple(memory[index].peak_bytes for index in sorted(memory))

    num_stages = len(layout.devices)
    num_portions = min(layout.num_micro_batches, step.batch_size)
    work = count_work(topology, step.size, 1, element_bytes(step.precision))

    def kept(stage: int, start: int, end: int) -> float:
        # With 1F1B a stage keeps as many micro-batches as there are stages from it to the end.
        num_alive = min(num_portions, num_stages - stage)
        return num_alive * sum(block.moved_bytes for block in work[start:end])

    def highest(cuts: Cuts) -> list[int]:
        return sorted(peaks(cuts), reverse=True)

    def lowered(cuts: Cuts) -> Cuts:
        best = min([cuts, *_neighbours(cuts, len(work))], key=highest)
        return cuts if best == cuts else lowered(best)

    cuts = min(map(lowered, (default, cheapest_cuts(kept, len(work), num_stages))), key=highest)
    return cuts, peaks(cuts)


def _neighbours(cuts: Cuts, num_blocks: int) -> Iterator[Cuts]:
    """Yield the cuts of which one is a block earlier or later."""
    for index in range(len(cuts)):
        for move in (-1, 1):
            moved = (*cuts[:index], cuts[index] + move, *cuts[index + 1 :])
            if all(before < after for before, after in pairwise((0, *moved, num_blocks))):
                yield moved
