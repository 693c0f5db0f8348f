"""Instance normalisation with LeakyReLU and the head behind them, as one operation.

The last features of a network are large and have one reader, the head, which makes a few logits per
voxel. If Triton's version suits, neither the features nor their gradient is stored: normalised
values are multiplied by the head's matrix in registers, and backward recomputes both from x and the
gradient of the logits. At 256^3 with 32 channels this saves a gigabyte, and seven passes over it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv.api import conv1x1x1
from unet3d.kernels.maps import (
    MOMENTS,
    can_fold,
    channels_last,
    empty_result,
    laid_out,
    mark_padded,
    take,
    was_folded,
)
from unet3d.kernels.norm import op as norm_op
from unet3d.kernels.norm.api import instance_norm
from unet3d.kernels.norm.volume import VolumeNorm, stages_for
from unet3d.kernels.operations import operation
from unet3d.kernels.sharding import current_shard

MAX_CLASSES = 16
"""With more classes, the sums take too many registers of a program."""


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

    The head's weight is (K, C, 1, 1, 1), and its bias (K,); autocast may lower the weight's type.
    Returns logits (N, K, X, Y, Z).
    """
    channels, classes = x.shape[1], len(head_weight)
    fits = channels <= norm_op.MAX_BLOCK_CHANNELS and classes <= MAX_CLASSES
    if not (fits and stages_for(x) is norm_op):
        y = instance_norm(x, weight, bias, eps, negative_slope, added=added)
        return conv1x1x1(y, head_weight, head_bias)
    pads_gradient = can_fold(x, channels) and was_folded(x)
    norm = VolumeNorm(stages=norm_op, eps=eps, slope=negative_slope, shard=current_shard())
    moments = take(x, MOMENTS)
    x, added = laid_out(x), None if added is None else channels_last(added)
    head = (head_weight.flatten(1), head_bias)
    given = (x, added, moments, weight, bias, *head, norm, pads_gradient)
    result: Tensor = _InstanceNormHead.apply(*given)  # type: ignore[no-untyped-call]
    return result


class _InstanceNormHead(torch.autograd.Function):
    """Keeps its input for backward, or the sum of two inputs, and nothing else of that size."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        moments: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        head: Tensor,
        head_bias: Tensor,
        norm: VolumeNorm,
        pads_gradient: bool,
    ) -> Tensor:
        affine = (weight, bias, *norm.statistics(x, added, moments), head)
        y: Tensor = logits(x, *affine, head_bias, slope=norm.slope)
        ctx.save_for_backward(x, *affine)
        ctx.norm, ctx.pads_gradient, ctx.adds = norm, pads_gradient, added is not None
        ctx.bias_dtype = head_bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *affine = ctx.saved_tensors
        weight, bias, _, _, head = affine
        norm: VolumeNorm = ctx.norm
        dy = channels_last(dy.to(x.dtype))
        parts, ends = sums(dy, x, *affine, slope=norm.slope)
        own = norm_op.total(parts)
        dx = norm_op.gradient(
            dy,
            x,
            *affine,
            total=norm.total(own[:2]),
            voxels=norm.voxels(x),
            slope=norm.slope,
            pads=ctx.pads_gradient,
        )
        dx = mark_padded(dx) if ctx.pads_gradient else dx
        dbias, dweight, *dhead = own.sum(1)
        return (
            dx,
            dx if ctx.adds else None,
            None,
            dweight.to(weight.dtype),
            dbias.to(bias.dtype),
            torch.stack(dhead).to(head.dtype),
            ends.double().sum((0, 1)).to(ctx.bias_dtype),
            None,
            None,
        )


def empty_sums(x: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the sums over the P runs of a map: (P, 2 + K, N, C) and (P, N, K)."""
    sums = norm_op.per_run(x, 2 + len(head))
    return sums, sums.new_empty((len(sums), len(x), len(head)))


_AFFINE = "Tensor weight, Tensor bias, Tensor mean, Tensor rstd, Tensor head"

# Like the stages of a normalisation (:mod:`unet3d.kernels.norm.op`), but including the head. The
# sums also have rows for the gradient of the head's weight; a second tensor is for its bias.
logits = operation(
    "norm_head_logits",
    f"(Tensor x, {_AFFINE}, Tensor head_bias, *, float slope) -> Tensor",
    "norm.head_kernel.write_logits",
    lambda x, *affine, slope: empty_result(x, len(affine[-1]), x.shape[2]),
)
sums = operation(
    "norm_head_sums",
    f"(Tensor dy, Tensor x, {_AFFINE}, *, float slope) -> (Tensor, Tensor)",
    "norm.head_kernel.write_sums",
    lambda dy, x, weight, bias, mean, rstd, head, slope: empty_sums(x, head),
)
