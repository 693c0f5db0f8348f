"""Units whose normalisation is left to the only block that reads them, so that none writes it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from unet3d.model.blocks import Block
from unet3d.model.layers import ConvUnit, HeadUnit, UpsampledUnit
from unet3d.torch_private import has_hooks


def deferring(blocks: Sequence[Block], outputs: Sequence[str]) -> tuple[Block, ...]:
    """Return blocks that run together, of which some tell their normalisation who reads it alone.

    That is a block that begins with a convolution which may normalise what it loads
    (:func:`unet3d.kernels.instance_norm`). What passes between such two is for no one else.

    Args:
        blocks: All that run in one place, in any order.
        outputs: Names of results that others read too.
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

    It has no parameters but the unit's, and is made anew where blocks are.
    """

    def __init__(self, unit: ConvUnit | UpsampledUnit, reader: ConvUnit) -> None:
        super().__init__()
        self.unit = unit
        self._reader = (reader,)  # in a tuple: what it has belongs to another block

    def forward(self, *inputs: Tensor) -> Tensor:
        (reader,) = self._reader
        # Hooks read what it reads.
        outputs = None if has_hooks(reader) else reader.conv.outputs_of_reader
        out: Tensor = self.unit(*inputs, outputs_of_reader=outputs)
        return out


def _told(block: Block, readers: Sequence[nn.Module | None]) -> Block:
    if isinstance(block.module, ConvUnit | UpsampledUnit) and len(readers) == 1:
        reader = readers[0].unit if isinstance(readers[0], HeadUnit) else readers[0]
        if isinstance(reader, ConvUnit) and reader.conv.is_plain:
            return replace(block, module=_Deferring(block.module, reader))
    return block
