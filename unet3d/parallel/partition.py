"""Cutting the block list into stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from unet3d.errors import DeviceError, counted
from unet3d.memory.fake_devices import is_gpu
from unet3d.model import Block, BlockNetwork, UNet3d
from unet3d.parallel.placement import Layout, Slot

StageCost = Callable[[int, int, int], float]
"""The cost of a stage, given its number, its first block and the block after its last."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The blocks that one slot runs."""

    slot: Slot
    """The slot it runs on."""
    blocks: tuple[Block, ...]
    """Consecutive blocks of the network's block list."""
    inputs: tuple[str, ...]
    """Tensors that come from earlier stages (or ``image``), by name."""
    outputs: tuple[str, ...]
    """Tensors that later stages read, and the logits."""


def make_stages(
    blocks: Sequence[Block],
    devices: Sequence[torch.device],
    cuts: Sequence[int],
    results: Sequence[str],
) -> tuple[Stage, ...]:
    """Divide a block list into one stage per device; the loss reads ``results``, by name."""
    check_cuts(cuts, len(blocks), len(devices))
    bounds = [0, *cuts, len(blocks)]
    runs = [tuple(blocks[a:b]) for a, b in pairwise(bounds)]
    stages = []
    for index, run in enumerate(runs):
        made = {block.name for block in run}
        read = dict.fromkeys(name for block in run for name in block.inputs)
        later = {name for after in runs[index + 1 :] for block in after for name in block.inputs}
        stages.append(
            Stage(
                slot=Slot(
                    index=index, device=devices[index], blocks=tuple(block.name for block in run)
                ),
                blocks=run,
                inputs=tuple(name for name in read if name not in made),
                outputs=tuple(b.name for b in run if b.name in later or b.name in results),
            )
        )
    return tuple(stages)


def check_cuts(cuts: Sequence[int], num_blocks: int, num_stages: int) -> None:
    """Refuse cuts that do not give one non-empty stage for each device."""
    bounds = [0, *cuts, num_blocks]
    if len(bounds) == num_stages + 1 and all(a < b for a, b in pairwise(bounds)):
        return
    advice = f"give {counted(num_stages - 1, 'rising number')} from 1 to {num_blocks - 1}"
    raise DeviceError(
        f"parallel.cuts {list(cuts)} do not divide {num_blocks} blocks over "
        f"{counted(num_stages, 'device')}; {advice if num_stages > 1 else 'leave them out'}"
    )


def check_num_stages(network: BlockNetwork, num_stages: int) -> None:
    """Refuse to divide a network into more stages than it has blocks."""
    num_blocks = len(network.blocks())
    if num_stages > num_blocks:
        raise DeviceError(
            f"{num_stages} devices are more than the {num_blocks} blocks of the network; "
            f"name at most {num_blocks} devices, or use a network with more levels"
        )


def default_cuts(network: BlockNetwork, layout: Layout) -> tuple[int, ...]:
    """Return the default cuts.

    The network may prefer cuts, such as encoder | decoder for two stages; otherwise all stages do
    about the same number of multiplications. More stages than blocks are a DeviceError.
    """
    num_stages = len(layout.devices)
    check_num_stages(network, num_stages)
    if num_stages == 1:
        return ()
    preferred = network.preferred_cuts(num_stages)
    if preferred is not None:
        return preferred
    # Only in a lower type does a GPU compose upsampling and convolution, which changes the count.
    # Other networks do the same operations in all types.
    lowers = isinstance(network, UNet3d) and is_gpu(layout.devices[-1])
    lowered = layout.autocast if lowers else None
    return balanced_cuts(block_flops(network, network.example_input(), lowered), num_stages)


def block_flops(
    network: BlockNetwork, image: Tensor, lowered: torch.dtype | None = None
) -> tuple[int, ...]:
    """Count the floating-point operations of each block's forward pass.

    The blocks run on meta tensors, so nothing is computed and the count cannot drift from the code.
    Only the shape (N, ...) of the image matters. ``lowered`` is the type that a GPU would compute
    in; None: the parameters' type.
    """
    dtype = lowered or next(network.parameters()).dtype
    tensors = {"image": torch.empty(image.shape, dtype=dtype, device="meta")}
    counts = []
    for block in network.blocks():
        parameters = {
            name: torch.empty_like(
                value,
                dtype=lowered if value.is_floating_point() else None,
                device="meta",
            )
            for name, value in (*block.module.named_parameters(), *block.module.named_buffers())
        }
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            tensors[block.name] = torch.func.functional_call(
                block.module, parameters, tuple(tensors[name] for name in block.inputs)
            )
        counts.append(counter.get_total_flops())
    return tuple(counts)


def balanced_cuts(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the cuts whose most expensive stage costs least; costs of blocks add up.

    Costs are in any unit; there are at most as many stages as blocks.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    return cheapest_cuts(lambda stage, start, end: sums[end] - sums[start], len(costs), num_stages)


def cheapest_cuts(cost: StageCost, num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return the cuts whose most expensive stage costs least.

    The classic linear-partition problem, solved by dynamic programming over (blocks, stages).
    """
    # best[end] = (cost of the worst stage, cuts) of the first `end` blocks, in the stages so far
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (cost(0, 0, end), ()) for end in range(1, num_blocks + 1)
    }
    for stage in range(1, num_stages):
        best = {
            end: min(
                (max(best[cut][0], cost(stage, cut, end)), (*best[cut][1], cut))
                for cut in range(stage, end)
            )
            for end in range(stage + 1, num_blocks + 1)
        }
    return best[num_blocks][1]
