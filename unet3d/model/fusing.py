"""Fusion of blocks with the blocks that read their results.

In both functions ``blocks`` are all blocks of one device, in any order, and ``outputs`` names the
results that are also read elsewhere.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from unet3d.model.layers import Convolution, ConvUnit, HeadUnit, SkippedUnit, UpsampledUnit
from unet3d.model.network import Block
from unet3d.torch_private import has_hooks


def deferring(blocks: Sequence[Block], outputs: Sequence[str]) -> tuple[Block, ...]:
    """Return blocks that leave their normalisation to their only reader, where that is possible.

    The reader must begin with a convolution that can normalise its input while loading
    (:func:`unet3d.kernels.instance_norm`). Then the normalised map is never written to memory.
    """
    readers: dict[str, list[nn.Module | None]] = defaultdict(list)
    for block in blocks:
        for name in block.inputs:
            readers[name].append(None if block.enter else block.module)
    for name in outputs:
        readers[name].append(None)
    return tuple(_told(block, readers[block.name]) for block in blocks)


class _Deferring(nn.Module):
    """A unit that knows its only reader.

    It has only the unit's parameters, and is created with the blocks.
    """

    def __init__(self, unit: ConvUnit | UpsampledUnit, reader: ConvUnit) -> None:
        super().__init__()
        self.unit = unit
        self._reader = (reader,)  # in a tuple: the reader's parameters belong to another block

    def forward(self, *inputs: Tensor) -> Tensor:
        (reader,) = self._reader
        # Hooks of the reader would get a map that is not normalised.
        outputs = None if has_hooks(reader) else reader.conv.outputs_of_reader
        out: Tensor = self.unit(*inputs, outputs_of_reader=outputs)
        return out


def _told(block: Block, readers: Sequence[nn.Module | None]) -> Block:
    if isinstance(block.module, ConvUnit | UpsampledUnit) and len(readers) == 1:
        reader = readers[0].unit if isinstance(readers[0], HeadUnit) else readers[0]
        if isinstance(reader, ConvUnit) and reader.conv.is_plain:
            return replace(block, module=_Deferring(block.module, reader))
    return block


def adding_skips(blocks: Sequence[Block], outputs: Sequence[str]) -> tuple[Block, ...]:
    """Return blocks with the convolutions of skips fused into the blocks that add them.

    This saves writing and reading a map. Between encoder and decoder the skip is kept instead of
    its convolution, which has the same size.
    """
    num_readers = Counter(name for block in blocks for name in block.inputs)
    num_readers.update(outputs)
    skips = {
        block.name: block
        for block in blocks
        if isinstance(block.module, Convolution)
        and block.module.adds_in_passing
        and num_readers[block.name] == 1
    }
    adding = {block.name: _with_skip(block, skips) for block in blocks}
    added = {block.inputs[1] for block in blocks if adding[block.name] is not block}
    return tuple(adding[block.name] for block in blocks if block.name not in added)


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
