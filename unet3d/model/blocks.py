"""The list of blocks that a cut divides, and how they run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from unet3d.kernels.sharding import Shard, sharded


@dataclass(frozen=True, kw_only=True)
class Block:
    """One step of the network, and the unit that a cut can fall between.

    The blocks of a network are in an order in which they can run. Each reads tensors by name and
    writes one tensor under its own name; ``image`` is the network's input. So any run of blocks
    tells which tensors it needs from outside: at a cut, those are the ones that must travel.
    """

    name: str
    """Name, such as ``encoder.0.1`` (level, unit), ``decoder.2.up`` or ``head``."""
    module: nn.Module
    """The module that runs; it shares no parameters with others."""
    inputs: tuple[str, ...]
    """Names of the tensors that it reads, in the order of its arguments."""
    path: str = ""
    """Part of the network that it belongs to, such as ``encoder``, ``decoder`` or ``head``."""
    level: int = 0
    """Resolution at which it works; 0 is the full one."""
    shard: Shard | None = None
    """The slab that its maps are; None: they are whole."""
    enter: Callable[[Tensor], Tensor] | None = None
    """What makes its maps of those that it reads, if they are of other planes."""


AfterBlock = Callable[[Block, Tensor], None]
"""Is called with a block that has run, and its result."""

RunBlock = Callable[[Block, Mapping[str, Tensor]], Tensor]
"""Runs one block on its inputs, which it gets by name."""


def run_block(block: Block, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return what a block makes of its inputs, which it gets by name."""
    given = [inputs[name] for name in block.inputs]
    with sharded(block.shard):
        made: Tensor = block.module(*(given if block.enter is None else map(block.enter, given)))
    return made


def run_blocks(
    blocks: Sequence[Block],
    tensors: dict[str, Tensor],
    keep: Iterable[str],
    after: AfterBlock | None = None,
    run: RunBlock = run_block,
) -> dict[str, Tensor]:
    """Run blocks in order, and return the tensors that are to be kept, by name.

    ``tensors`` holds what they need from outside. It is emptied: each tensor goes after its last
    reader.
    """
    kept = set(keep)
    last_reader = {name: block.name for block in blocks for name in block.inputs}
    for block in blocks:
        tensors[block.name] = run(block, {name: tensors[name] for name in block.inputs})
        if after is not None:
            after(block, tensors[block.name])
        for name in set(block.inputs):
            if last_reader[name] == block.name and name not in kept:
                del tensors[name]
    return {name: tensors.pop(name) for name in kept}


def in_running_order(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return blocks in the order in which their backward passes need the least memory.

    The convolution of a skip can run long before the decoder needs its result. Then backward, which
    goes the other way, comes to it late, right before the encoder's level that computed the skip:
    so the skip is needed once in backward, not at two times far from each other. For that, a block
    that reads a single tensor follows the first reader of the tensor, if these blocks have both.
    """
    ordered: list[Block] = []
    for block in blocks:
        place = len(ordered)
        made = {other.name for other in ordered}
        if len(block.inputs) == 1 and block.inputs[0] in made:
            readers = (i for i, other in enumerate(ordered) if block.inputs[0] in other.inputs)
            place = next(readers, place - 1) + 1
        ordered.insert(place, block)
    return tuple(ordered)
