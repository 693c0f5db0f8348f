"""Where to cut the block list so that all stages take equal time or equal memory.

What counts is the most expensive stage. For time, because the others wait for it once the pipeline
is full; for memory, because its device is the first that a larger volume no longer fits on.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from unet3d.config import Balance, Shape
from unet3d.model import UNet3d, in_running_order
from unet3d.model.parts import recomputed_parts
from unet3d.parallel.balance.block_costs import BlockBytes, block_bytes, block_seconds
from unet3d.parallel.partition import StageCost, cheapest_cuts, check_num_stages, default_cuts
from unet3d.parallel.placement import Layout
from unet3d.parallel.schedule import most_alive

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
        layout: Devices, micro-batches and precision; its cuts are ignored.
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
        layout: Devices, micro-batches and precision.
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
    blocks, recomputes_parts = model.blocks(), layout.recompute == "level"
    place = {block.name: index for index, block in enumerate(blocks)}
    num_stages, num_blocks = len(layout.devices), len(blocks)
    num_micro_batches = min(layout.num_micro_batches, batch_size)
    alive = most_alive(num_micro_batches, num_stages)
    results = frozenset(model.outputs())
    dtype = next(model.parameters()).dtype
    voxels = batch_size * math.prod(size)

    def cost(stage: int, start: int, end: int) -> float:
        mine = entries[layout.devices[stage].type]
        ordered = in_running_order(blocks[start:end])
        parts = recomputed_parts(ordered, alive[stage][stage]) if recomputes_parts else ()
        run = [mine[place[block.name]] for block in ordered]
        loss = mine[-1] if end == num_blocks else None
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
            parts=[[block.name for block in part] for part in parts],
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
    parts: Sequence[Sequence[str]] = (),
) -> int:
    """Return the most that a stage holds beside parameters, image and target.

    While one micro-batch goes backward, the others that are alive keep everything. What it keeps
    itself grows block by block in forward, and shrinks in backward; at each block there are also
    the tensors that wait for a later one, or gradients that wait for an earlier one, those that
    came from later stages, and those that wait to go to earlier stages. Of a part that runs again
    in backward only what enters it is kept, until backward comes to its last block.

    Args:
        run: The stage's blocks, in the order in which they run.
        loss: Costs of the loss, in the last stage.
        read_elsewhere: Names of tensors that later stages or the loss read.
        outputs: By name, the block that writes each tensor of the network.
        num_alive: Micro-batches whose activations the stage keeps at a time.
        num_early: Micro-batches beyond them whose inputs have already come.
        parts: Names of the blocks of each part (:func:`~unet3d.model.parts.recomputed_parts`).
    """
    names = {entry.name for entry in run}
    read = [[outputs[name] for name in entry.inputs if name in outputs] for entry in run]
    received = {m.name: m.output_bytes for makers in read for m in makers if m.name not in names}
    sent = {entry.name: entry.output_bytes for entry in run if entry.name in read_elsewhere}
    last_reader = {maker.name: i for i, makers in enumerate(read) for maker in makers}
    part_of = {name: part for part in parts for name in part}
    quick = {entry.name for entry in run if entry.inputs == ("image",) and entry.name in part_of}

    def kept(end: int, filled: Collection[str] = ()) -> dict[str, int]:
        """Return what is kept of the blocks before one of them; one part has run again."""
        found = dict(received)
        for entry, makers in zip(run[:end], read, strict=False):
            part = part_of.get(entry.name)
            if part is None or entry.name in filled:
                found |= entry.kept
            else:
                entering = (maker for maker in makers if maker.name not in {*part, *quick})
                found |= {maker.name: maker.output_bytes for maker in entering}
        return found

    def waiting(index: int) -> dict[str, int]:
        """Return the results, or their gradients, that exist while a block runs."""
        earlier = (entry for entry in run[:index] if last_reader.get(entry.name, -1) >= index)
        return {entry.name: entry.output_bytes for entry in earlier}

    def running_again(index: int, part: Collection[str]) -> int:
        """Return the most that is there while a part runs again for its last block."""
        most = 0
        for number, entry in enumerate(run):
            if entry.name in part:
                now = waiting(number).items()
                inside = {name: size for name, size in now if name in {*part, *quick}}
                held = kept(index + 1) | kept(number, part) | inside
                most = max(most, _sum(held) + entry.forward_bytes)
        return most

    whole = _sum(kept(len(run)))
    most = whole + (_sum(loss.kept) + loss.work_bytes if loss is not None else 0)
    leaves = 0
    for index, entry in reversed(list(enumerate(run))):
        most = max(most, _sum(kept(index) | waiting(index)) + entry.forward_bytes)
        if entry.name in last_reader:
            # Gradients of readers in this stage; those that others sent are added to their sum.
            work_bytes = entry.passing_work_bytes
        else:
            work_bytes = entry.work_bytes - sent.get(entry.name, 0)
        gradients = {name: n for name, n in waiting(index).items() if last_reader[name] > index}
        beside = _sum(sent) + leaves + _sum(gradients)
        part = part_of.get(entry.name, ())
        # What a block reads of a quick part makes that run again.
        now = _sum(kept(index + 1, {*part, *quick.intersection(entry.inputs)})) + work_bytes
        if part and entry.name == part[-1]:
            own_gradient = 0 if entry.name in sent else entry.output_bytes
            now = max(now, running_again(index, part) + own_gradient)
        most = max(most, beside + now)
        leaves += sum(maker.output_bytes for maker in read[index] if maker.name not in names)
    if loss is not None:  # its gradients exist as soon as a micro-batch has reached the end
        whole += sum(sent.get(name, 0) for name in loss.inputs)
    return (num_alive - 1) * whole + num_early * _sum(received) + most


def _sum(memory: Mapping[str, int]) -> int:
    return sum(memory.values())


def _samples_of_a_micro_batch(layout: Layout, batch_size: int) -> int:
    """Return the largest size."""
    return -(-batch_size // min(layout.num_micro_batches, batch_size))


def _amount(cost: float, balance: Balance) -> str:
    return f"{1000 * cost:.1f} ms" if balance == "time" else f"{cost / 2**20:,.0f} MiB"
