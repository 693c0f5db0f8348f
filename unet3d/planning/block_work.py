"""What each block of a network does in a training step: operations, and bytes that it moves.

Operations are counted on meta tensors, the traffic follows from the shapes of the maps.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from unet3d.config import Shape
from unet3d.kernels import CHANNELS_BY_HAND
from unet3d.kernels.conv.hopper.api import min_voxels
from unet3d.model import Topology, UNet3d, deferring
from unet3d.model.layers import Convolution, ResidualUnit, UpsampledUnit
from unet3d.model.norms import InstanceNorm, OtherNorm
from unet3d.parallel.partition import block_flops

NORM_PASSES = 8
"""How often a normalisation with its activation goes through its map: three times forward, five
times backward."""
MOMENT_PASSES = 1
"""Of these, what a hand-written convolution spares that makes the map."""
DEFERRED_PASSES = 4
"""What one spares that alone reads the map, which is then not written, forward, nor read for its
sums, backward."""
LARGE_ELEMENTS = 2**31 - 1
"""Elements above which a convolution runs in slabs (:mod:`unet3d.kernels.conv.slabs`)."""
LARGE_FACTOR = 1.10
"""What a block with such a map takes longer on an H200, but for hand-written convolutions: without
them the step at 512^3, where level 0 has such maps, took 557 ms, where smaller volumes promise
532."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in the steps of a network."""

    operations_per_second: float
    """Multiplications and additions of convolutions."""
    operations_by_hand: float | None
    """The same a second of hand-written ones, with all that they read and write; None: there are
    none."""
    bytes_per_second: float
    """Of maps that are read and written."""
    step_seconds: float
    """What a step of any size takes besides."""


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """What hand-written convolutions change of a block's work."""

    num_operations: float
    """Those that they do."""
    spared_bytes: float
    """What is not moved beside them: their own maps, which are in their time, and those that were
    read for moments."""
    deferred_bytes: float
    """What is not moved, besides, where a convolution normalises a map that it alone reads."""


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """The work of a block in one step, on one device."""

    name: str
    """Name of the block."""
    level: int
    """Resolution at which it works."""
    in_encoder: bool
    """Whether it is one of the encoder's."""
    num_norms: int
    """Its normalisations."""
    num_parameters: int
    """Its weights."""
    num_operations: float
    """Forward and backward; a multiplication and an addition are two."""
    moved_bytes: float
    """What it reads and writes."""
    num_elements: float
    """Of its largest map."""
    by_hand: ByHand
    """What changes where the device has hand-written convolutions."""

    def seconds(self, rates: Rates, share: float = 1.0, *, defers: bool = True) -> float:
        """Return what a slab with this share of the volume's planes takes at these rates.

        ``defers``: where a convolution alone reads a map, it may normalise what it loads.
        """
        operations, moved, by_hand = self.num_operations, self.moved_bytes, 0.0
        if rates.operations_by_hand is not None:
            by_hand = self.by_hand.num_operations / rates.operations_by_hand
            operations -= self.by_hand.num_operations
            moved -= self.by_hand.spared_bytes + defers * self.by_hand.deferred_bytes
        others = operations / rates.operations_per_second + moved / rates.bytes_per_second
        is_large = share * self.num_elements > LARGE_ELEMENTS
        return share * (by_hand + others * (LARGE_FACTOR if is_large else 1.0))


@lru_cache(maxsize=64)
def count_work(
    topology: Topology, size: Shape, batch_size: int, element_bytes: int
) -> tuple[BlockWork, ...]:
    """Count what each block of a network does in a step with a whole volume.

    Forward and for the gradients of input and weights, a convolution does the same operations, and
    reads or writes its input and its result once.
    """
    with torch.device("meta"):
        model = UNet3d(topology)
    image = torch.empty((batch_size, topology.in_channels, *size), device="meta")
    num_elements = {"image": image.numel()}
    work = []
    blocks = model.blocks()
    told = deferring(blocks, model.outputs())
    for block, given, operations in zip(blocks, told, block_flops(model, image), strict=True):
        read = sum(num_elements[name] for name in block.inputs)
        voxels = batch_size * map_voxels(topology, size, block.level)
        made = num_elements[block.name] = topology.channels[block.level] * voxels
        num_norms = sum(isinstance(m, InstanceNorm | OtherNorm) for m in block.module.modules())
        num_passes = 2 if block.inputs == ("image",) else 3  # nobody asks for the image's gradient
        convolved = element_bytes * num_passes * (read + made)
        work.append(
            BlockWork(
                name=block.name,
                level=block.level,
                in_encoder=block.path == "encoder",
                num_norms=num_norms,
                num_parameters=sum(one.numel() for one in block.module.parameters()),
                num_operations=num_passes * operations,
                moved_bytes=convolved + element_bytes * NORM_PASSES * num_norms * made,
                num_elements=made,
                by_hand=_by_hand(
                    block.module, given is not block, voxels, num_passes, convolved, element_bytes
                ),
            )
        )
    return tuple(work)


def _by_hand(
    module: nn.Module,
    may_defer: bool,
    voxels: int,
    num_passes: int,
    convolved_bytes: float,
    element_bytes: int,
) -> ByHand:
    """Count what hand-written convolutions do in a block with maps of so many ``voxels``.

    ``may_defer``: nothing but a convolution of this level reads its result. ``convolved_bytes``
    were counted for the maps of its convolutions, which do ``num_passes`` forward and backward.
    """
    every = [part for part in module.modules() if isinstance(part, Convolution)]
    norms = [part for part in module.modules() if isinstance(part, InstanceNorm)]
    outputs = every[-1].out_channels if every else 0
    if outputs not in CHANNELS_BY_HAND or voxels < min_voxels(outputs, outputs):
        return ByHand(num_operations=0, spared_bytes=0, deferred_bytes=0)
    pass_bytes = element_bytes * outputs * voxels
    suited = [conv for conv in every if conv.is_plain and conv.in_channels in CHANNELS_BY_HAND]
    # Upsampling and the convolution behind it are one; that of the skip adds it, and has moments.
    upsampled = [part.unit.conv for part in module.modules() if isinstance(part, UpsampledUnit)]
    ours = [conv for conv in suited if conv not in upsampled]
    operations = sum(2 * 27 * conv.in_channels * conv.out_channels * voxels for conv in ours)
    spared: float = MOMENT_PASSES * pass_bytes * min(len(suited), len(norms))
    if len(ours) == len(every) == 1:
        spared += convolved_bytes  # of a residual unit they stand for its sum
    is_residual = isinstance(module, ResidualUnit) and module.conv in ours
    num_deferred = (may_defer or is_residual) and len(norms) > 0
    return ByHand(
        num_operations=num_passes * operations,
        spared_bytes=spared,
        deferred_bytes=DEFERRED_PASSES * pass_bytes * num_deferred,
    )


def map_voxels(topology: Topology, size: Shape, level: int) -> int:
    """Return the voxels of a map of a whole volume."""
    strides = topology.strides[: level + 1]
    return math.prod(
        voxels // math.prod(stride[axis] for stride in strides) for axis, voxels in enumerate(size)
    )
