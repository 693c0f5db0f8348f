"""Skips whose convolution is added to that of the upsampled features while it is computed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from unet3d.model.blocks import Block
from unet3d.model.layers import Convolution, HeadUnit, SkippedUnit, UpsampledUnit


def adding_skips(blocks: Sequence[Block], outputs: Sequence[str]) -> tuple[Block, ...]:
    """Return blocks that run together, with the convolutions of skips in the blocks that add them.

    Apart, the two results are written, and read again to be added. Together, what is kept between
    encoder and decoder is the skip, of the same size, and not its convolution.

    Args:
        blocks: All that run in one place.
        outputs: Names of results that others read too.
    """
    num_readers = Counter(name for block in blocks for name in block.inputs)
    num_readers.update(outputs)
    skips = {
        block.name: block
        for block in blocks
        if _can_be_added(block.module) and num_readers[block.name] == 1
    }
    adding = {block.name: _with_skip(block, skips) for block in blocks}
    added = {block.inputs[1] for block in blocks if adding[block.name] is not block}
    return tuple(adding[block.name] for block in blocks if block.name not in added)


def _can_be_added(module: object) -> bool:
    return isinstance(module, Convolution) and module.adds_in_passing


def _with_skip(block: Block, skips: dict[str, Block]) -> Block:
    module = block.module
    unit = module.unit if isinstance(module, HeadUnit) else module
    if not isinstance(unit, UpsampledUnit) or block.inputs[1] not in skips:
        return block
    skip = skips[block.inputs[1]]
    joined = SkippedUnit(unit, skip.module)  # type: ignore[arg-type]
    return replace(
        block,
        module=HeadUnit(joined, module.head) if isinstance(module, HeadUnit) else joined,
        inputs=(block.inputs[0], *skip.inputs),
    )
