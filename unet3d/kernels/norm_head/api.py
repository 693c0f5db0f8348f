"""Instance normalisation with LeakyReLU and the head behind them, as one operation.

The last features of a network are large and have one reader, the head, which makes a few logits of
each voxel. Where Triton's version suits, they are never stored, nor is their gradient: normalised
values are multiplied by the head's matrix while they are in registers, and in backward the gradient
of the logits takes the place of the map's. At 256^3 with 32 channels that is a gigabyte less, and
seven passes over one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv.api import conv1x1x1
from unet3d.kernels.norm import op as norm
from unet3d.kernels.norm.api import (
    channels_last,
    instance_norm,
    laid_out,
    merged,
    num_voxels,
    stages_for,
)
from unet3d.kernels.norm.grid import MAX_BLOCK_CHANNELS
from unet3d.kernels.norm_head import op
from unet3d.kernels.padding import can_fold, mark_padded, was_folded
from unet3d.kernels.sharding import Shard, current_shard

MAX_CLASSES = 16
"""With more classes the sums leave a program too few registers."""


def instance_norm_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    *,
    added: Tensor | None = None,
    head_weight: Tensor,
    head_bias: Tensor,
) -> Tensor:
    """Normalise as :func:`unet3d.kernels.instance_norm` does, then mix the channels of each voxel.

    Args:
        x: (N, C, X, Y, Z) of any floating type.
        weight: (C,).
        bias: (C,).
        eps: Added to the variance.
        negative_slope: Negative slope of LeakyReLU; 1 leaves the activation out.
        added: A map of the same shape and type that is added to x first, or None. Where there is
            one, x must be a convolution's result that nobody else reads: it may be overwritten.
        head_weight: (K, C, 1, 1, 1); autocast may lower it.
        head_bias: (K,).

    Returns:
        Logits (N, K, X, Y, Z).
    """
    channels, classes = x.shape[1], len(head_weight)
    is_fast = stages_for(x) is norm and channels <= MAX_BLOCK_CHANNELS and classes <= MAX_CLASSES
    if not is_fast:
        y = instance_norm(x, weight, bias, eps, negative_slope, added=added)
        return conv1x1x1(y, head_weight, head_bias)
    pads_gradient = can_fold(x, channels) and was_folded(x)
    shard = current_shard()
    options = _Options(eps=eps, slope=negative_slope, pads_gradient=pads_gradient, shard=shard)
    x, added = laid_out(x), None if added is None else channels_last(added)
    given = (x, added, weight, bias, head_weight.flatten(1), head_bias, options)
    logits: Tensor = _InstanceNormHead.apply(*given)  # type: ignore[no-untyped-call]
    return logits


class _Options(NamedTuple):
    """How a map is normalised."""

    eps: float
    slope: float
    pads_gradient: bool
    shard: Shard | None


class _InstanceNormHead(torch.autograd.Function):
    """Keeps its input, or the sum of two, and nothing else of its size."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        head: Tensor,
        head_bias: Tensor,
        options: _Options,
    ) -> Tensor:
        parts = norm.moments(x) if added is None else norm.sum_moments(x, added)
        mean, rstd = merged(norm, parts, x, options.eps, options.shard)
        affine = (weight, bias, mean, rstd, head)
        y: Tensor = op.logits(x, *affine, head_bias, slope=options.slope)
        ctx.save_for_backward(x, *affine)
        ctx.options, ctx.adds, ctx.bias_dtype = options, added is not None, head_bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, head = ctx.saved_tensors
        options: _Options = ctx.options
        shard = options.shard
        affine = (weight, bias, mean, rstd, head)
        dy = channels_last(dy.to(x.dtype))
        sums, ends = op.sums(dy, x, *affine, slope=options.slope)
        total = norm.total(sums)
        dx = op.gradient(
            dy,
            x,
            *affine,
            total=total if shard is None else norm.total(shard.gather(total[:2])),
            voxels=num_voxels(x, shard),
            slope=options.slope,
            pads=options.pads_gradient,
        )
        dx = mark_padded(dx) if options.pads_gradient else dx
        dbias, dweight, *dhead = total.sum(1)
        return (
            dx,
            dx if ctx.adds else None,
            dweight.to(weight.dtype),
            dbias.to(bias.dtype),
            torch.stack(dhead).to(head.dtype),
            ends.double().sum((0, 1)).to(ctx.bias_dtype),
            None,
        )
