"""A U-Net whose blocks work on slabs of a volume, or on whole maps if these are small.

The blocks have the names and the modules of the plain network. Each block runs inside
:func:`~unet3d.kernels.sharding.sharded`, which marks maps as slabs or as whole, also when backward
recomputes it. Maps pass between divided and whole levels in two places::

    level    0   slab ──────────────────────────────────── slab
             1      slab ─────────┬────────────────── slab
                              gather planes        upsample, take a slab
             2                  whole ─────────── whole

Every device computes the whole levels alike. In backward the whole levels receive the mean of the
slabs' gradients, so the gradients of their parameters are the gradients of one loss. The gathered
slabs receive their gradient once for the loss of each device (see the convention in
:mod:`unet3d.kernels.sharding`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.kernels import upsample, with_halo
from unet3d.kernels.conv.planes import some_planes
from unet3d.kernels.maps import channels_last, empty_map
from unet3d.kernels.sharding import inner
from unet3d.model import Block, BlockNetwork, UNet3d
from unet3d.model.layers import HeadUnit, UpsampledUnit
from unet3d.parallel.spatial.shard import VolumeShard


class SlabNetwork(BlockNetwork):
    """A network for one slab; it shares all modules with the plain one."""

    def __init__(self, network: UNet3d, shard: VolumeShard) -> None:
        """Wrap the blocks."""
        super().__init__()
        self.network = network
        self._shard = shard
        self._blocks = tuple(_on_slab(block, network, shard) for block in network.blocks())

    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks; ``image`` is the slab's own planes."""
        return self._blocks

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the blocks that write logits, full resolution first."""
        return self.network.outputs()

    def example_input(self) -> Tensor:
        """Return an image of the plain network."""
        return self.network.example_input()

    def check_shape(self, image: Tensor) -> None:
        """Refuse an image that is not a slab of a volume for this network."""
        division = self._shard.division
        wanted = len(division.slab(self._shard.index))
        n, c, planes, y, z = image.shape
        if planes != wanted:
            raise ValueError(
                f"a slab has {planes} planes, but shard {self._shard.index} of a volume of "
                f"{division.planes()} planes has {wanted}"
            )
        self.network.check_shape(torch.empty((n, c, division.planes(), y, z), device="meta"))

    def forward(self, image: Tensor) -> Any:
        """Run the plain network, on a whole image."""
        return self.network(image)


def _on_slab(block: Block, network: UNet3d, shard: VolumeShard) -> Block:
    """Return a block of the plain network for a slab."""
    low = shard.division.num_divided
    module, level = block.module, block.level
    if level >= low:
        # Only the first encoder block of the whole levels reads slabs.
        reads_slab = block.inputs == (network.encoder.outputs()[low - 1],)
        gather = partial(_gathered, shard=shard, level=low - 1)
        return replace(block, enter=gather if reads_slab else None)
    if level == low - 1 and low < network.topology.num_levels:
        module = _taking_slabs(module, shard, level)
    enter = with_halo if block.inputs == ("image",) else None
    return replace(block, module=module, shard=shard, enter=enter)


def _taking_slabs(module: nn.Module, shard: VolumeShard, level: int) -> nn.Module:
    """Replace a module that upsamples by one that upsamples a whole map to a slab; others stay."""
    if isinstance(module, HeadUnit) and isinstance(module.unit, UpsampledUnit):
        return HeadUnit(_SlabUpsampledUnit(module.unit, shard, level), module.head)
    if isinstance(module, UpsampledUnit):
        return _SlabUpsampledUnit(module, shard, level)
    return module


class _SlabUpsampledUnit(UpsampledUnit):
    """A unit of the lowest divided level, which reads features of a whole level."""

    def __init__(self, joined: UpsampledUnit, shard: VolumeShard, level: int) -> None:
        super().__init__(joined.up, joined.unit)
        self._shard = shard
        self._level = level

    def upsampled(self, x: Tensor) -> Tensor:
        """Return the convolution of the upsampled features of a whole map."""
        shard, step = self._shard, self.up.stride[0]
        own = shard.division.slab(shard.index, self._level)
        x = _MeanGradient.apply(x, shard)  # type: ignore[no-untyped-call]
        # The slab need not begin or end with a plane of the level below.
        first = max(own.start - 1, 0) // step
        coarse = _planes_of(x, range(first, min(-(-(own.stop + 1) // step), x.shape[2])))
        fine = upsample(coarse, self.up.weight, self.up.stride)
        start = first * step
        fine = _planes_of(fine, range(own.start - 1 - start, own.stop + 1 - start))
        return self.with_bias(self.unit.conv(fine))


def _planes_of(x: Tensor, planes: range) -> Tensor:
    """Return some planes of a map, zeros outside of it; differentiable."""
    chosen: Tensor = _Planes.apply(x, planes)  # type: ignore[no-untyped-call]
    return chosen


class _Planes(torch.autograd.Function):
    """Planes of a map; unlike a view's gradient, the gradient is channels-last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, planes: range) -> Tensor:
        ctx.size, ctx.planes = x.shape[2], planes
        return some_planes(x, planes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        start = ctx.planes.start
        return channels_last(some_planes(gradient, range(-start, ctx.size - start))), None


def _gathered(x: Tensor, shard: VolumeShard, level: int) -> Tensor:
    whole: Tensor = _Gathered.apply(x, shard, level)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    """The whole map, from slabs without their halos."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VolumeShard, level: int) -> Tensor:
        ctx.slab, ctx.count = shard.division.slab(shard.index, level), shard.count
        return shard.gather_map(inner(x), level)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = gradient.narrow(2, ctx.slab.start, len(ctx.slab))
        with_halo = empty_map(own, has_halo=True)
        for halo in (with_halo[:, :, 0], with_halo[:, :, -1]):
            halo.zero_()
        torch.mul(own, ctx.count, out=inner(with_halo))
        return with_halo, None, None


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VolumeShard) -> Tensor:
        ctx.shard = shard
        return x.detach()  # x itself would become a view, whose strides may mislead cuDNN

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # In the order of memory, since a message is contiguous.
        total = ctx.shard.sum(gradient.permute(0, 2, 3, 4, 1))
        return total.permute(0, 4, 1, 2, 3) / ctx.shard.count, None
