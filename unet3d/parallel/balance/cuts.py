"""Where to cut the block list so that all stages take equal time or equal memory.

What counts is the most expensive stage. For time, because the others wait for it once the pipeline
is full; for memory, because its device is the first that a larger volume no longer fits on.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from unet3d.config import Balance, Shape
from unet3d.model import UNet3d
from unet3d.parallel.balance.block_costs import BlockBytes, block_bytes, block_seconds
from unet3d.parallel.partition import StageCost, cheapest_cuts, check_num_stages, default_cuts
from unet3d.parallel.placement import Layout
from unet3d.parallel.schedule import SCHEDULES, most_alive

logger = logging.getLogger(__name__)


def choose_cuts(
    model: UNet3d,
    *,
    layout: Layout,
    balance: Balance,
    size: Shape,
    batch_size: int,
    num_states: int,
    folder: Path,
) -> tuple[int, ...]:
    """Return where to cut the block list for training.

    Args:
        model: The network; it is neither moved nor changed.
        layout: Devices, micro-batches, schedule and precision; its cuts are ignored.
        balance: What to balance over the stages. ``encoder-decoder`` considers neither time nor
            memory.
        size: Voxels of an image along X, Y, Z; multiples of the total stride.
        batch_size: Samples of a batch.
        num_states: How many numbers the optimizer keeps for each parameter.
        folder: Where measured times are remembered.

    Raises:
        DeviceError: There are more devices than blocks.
        CacheError: The folder cannot be written to.
    """
    num_stages, blocks = len(layout.devices), model.blocks()
    check_num_stages(model, num_stages)
    if balance == "encoder-decoder" or num_stages == 1:
        return default_cuts(model, num_stages)
    if balance == "time":
        cost = time_cost(model, layout, size, batch_size, folder)
    else:
        cost = memory_cost(model, layout, size, batch_size, num_states)
    cuts = cheapest_cuts(cost, len(blocks), num_stages)
    costs = [cost(i, *ends) for i, ends in enumerate(pairwise((0, *cuts, len(blocks))))]
    logger.info(
        "balanced by %s: cut before %s (parallel.cuts=%s); predicted for each stage %s",
        balance,
        " and ".join(blocks[cut].name for cut in cuts),
        ",".join(map(str, cuts)),
        ", ".join(f"{_amount(cost, balance)} ({cost / sum(costs):.0%})" for cost in costs),
    )
    return cuts


def time_cost(
    model: UNet3d, layout: Layout, size: Shape, batch_size: int, folder: Path
) -> StageCost:
    """Return the seconds that one micro-batch takes in each possible stage, on its own device.

    Args:
        model: The network.
        layout: Devices, micro-batches and precision.
        size: Voxels of an image along X, Y, Z.
        batch_size: Samples of a batch.
        folder: Where measured times are remembered.
    """
    num_samples = _samples_of_a_micro_batch(layout, batch_size)
    seconds = {
        device: block_seconds(model, device, size, num_samples, layout.autocast, folder)
        for device in dict.fromkeys(layout.devices)
    }
    num_blocks = len(model.blocks())

    def cost(stage: int, start: int, end: int) -> float:
        # The loss is taken where the last block is.
        last = end + 1 if end == num_blocks else end
        return sum(seconds[layout.devices[stage]][start:last])

    return cost


def memory_cost(
    model: UNet3d, layout: Layout, size: Shape, batch_size: int, num_states: int
) -> StageCost:
    """Return the bytes that each possible stage needs at its peak.

    Args:
        model: The network.
        layout: Devices, micro-batches, schedule and precision.
        size: Voxels of an image along X, Y, Z.
        batch_size: Samples of a batch.
        num_states: How many numbers the optimizer keeps for each parameter.
    """
    num_samples = _samples_of_a_micro_batch(layout, batch_size)
    entries = {
        device.type: block_bytes(
            model, size, num_samples, layout.autocast, device, layout.recompute
        )
        for device in layout.devices
    }
    num_stages, num_blocks = len(layout.devices), len(model.blocks())
    num_micro_batches = min(layout.num_micro_batches, batch_size)
    alive = most_alive(SCHEDULES[layout.schedule], num_micro_batches, num_stages)
    results = frozenset(model.outputs())
    dtype = next(model.parameters()).dtype
    voxels = batch_size * math.prod(size)

    def cost(stage: int, start: int, end: int) -> float:
        mine = entries[layout.devices[stage].type]
        run, loss = mine[start:end], mine[-1] if end == num_blocks else None
        later = {name for entry in mine[end:] for name in entry.inputs}
        # A copy exists as soon as its producer has run, which may be before its reader's turn.
        # With more than two stages, the producer is taken to be the previous stage.
        early = alive[stage - 1][stage] - alive[stage][stage] if stage else 0
        outputs = {entry.name: entry for entry in mine}
        moving = stage_bytes(
            run,
            loss=loss,
            read_elsewhere=later | results,
            outputs=outputs,
            num_alive=alive[stage][stage],
            num_early=early,
            by_level=layout.recompute == "level",
        )
        parameters = sum(entry.parameters_bytes for entry in run)
        image = voxels * model.topology.in_channels * dtype.itemsize if stage == 0 else 0
        target = voxels if loss is not None else 0  # class indices, one byte each
        always = (1 + 1 + num_states) * parameters + image + target
        return moving + always + max(entry.workspace_bytes for entry in run)

    return cost


def stage_bytes(
    run: Sequence[BlockBytes],
    *,
    loss: BlockBytes | None,
    read_elsewhere: Collection[str],
    outputs: Mapping[str, BlockBytes],
    num_alive: int,
    num_early: int,
    by_level: bool = False,
) -> int:
    """Return the most that a stage holds beside parameters, image and target.

    While one micro-batch goes backward, the others that are alive keep everything. What it keeps
    itself shrinks block by block; at each block there are the gradients that it works with, those
    that came from later stages, and those that wait to go to earlier ones. Where only what enters a
    level is kept, the level that backward is in is recomputed and counts as well.

    Args:
        run: The stage's blocks.
        loss: Costs of the loss, in the last stage.
        read_elsewhere: Names of tensors that later stages or the loss read.
        outputs: By name, the block that writes each tensor of the network.
        num_alive: Micro-batches whose activations the stage keeps at a time.
        num_early: Micro-batches beyond them whose inputs have already come.
        by_level: Whether what is within a level is recomputed in backward.
    """
    made = {entry.name for entry in run}
    received = {
        name: outputs[name].output_bytes
        for entry in run
        for name in entry.inputs
        if name not in made and name in outputs
    }
    sent = {entry.name: entry.output_bytes for entry in run if entry.name in read_elsewhere}
    read_here = {name for entry in run for name in entry.inputs}
    levels = [tuple(of) for _, of in groupby(run, lambda entry: entry.level if by_level else None)]
    entering = [_entering(level, outputs) for level in levels]
    whole = _sum(received | (_merged(entering) if by_level else _kept(run)))
    most = whole + (_sum(loss.kept) + loss.work_bytes if loss is not None else 0)
    leaves = 0
    for number, level in reversed(list(enumerate(levels))):
        before = received | _merged(entering[: number + 1])
        for index, entry in reversed(list(enumerate(level))):
            read = [outputs[name] for name in entry.inputs if name in outputs]
            if entry.name in read_here:
                # Gradients of readers in this stage; those that others sent are added to their sum.
                work_bytes = entry.passing_work_bytes
            else:
                work_bytes = entry.work_bytes - sent.get(entry.name, 0)
            now = _sum(before | _kept(level[: index + 1])) + _sum(sent) + leaves + work_bytes
            most = max(most, now)
            leaves += sum(maker.output_bytes for maker in read if maker.name not in made)
    if loss is not None:  # its gradients exist as soon as a micro-batch has reached the end
        whole += sum(sent.get(name, 0) for name in loss.inputs)
    return (num_alive - 1) * whole + num_early * _sum(received) + most


def _entering(level: Sequence[BlockBytes], outputs: Mapping[str, BlockBytes]) -> dict[str, int]:
    """Return what a level reads from others, without the image, which exists anyway."""
    made = {entry.name for entry in level}
    read = {name for entry in level for name in entry.inputs if name in outputs}
    return {name: outputs[name].output_bytes for name in read - made}


def _kept(run: Sequence[BlockBytes]) -> dict[str, int]:
    return _merged([entry.kept for entry in run])


def _merged(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: size for one in several for name, size in one.items()}


def _sum(memory: Mapping[str, int]) -> int:
    return sum(memory.values())


def _samples_of_a_micro_batch(layout: Layout, batch_size: int) -> int:
    """Return the largest size."""
    return -(-batch_size // min(layout.num_micro_batches, batch_size))


def _amount(cost: float, balance: Balance) -> str:
    return f"{1000 * cost:.1f} ms" if balance == "time" else f"{cost / 2**20:,.0f} MiB"
