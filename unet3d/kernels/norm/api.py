"""Instance normalisation with LeakyReLU behind it, as one operation.

PyTorch normalises each (sample, channel) in one thread block: a single sample of 32 channels keeps
32 of a GPU's multiprocessors busy. Here the voxels are divided over all multiprocessors.

The work is done in stages, so that the parts of a volume can exchange results after a stage
(:mod:`unet3d.kernels.norm.op`). Large CUDA tensors of 16- or 32-bit numbers use Triton; all others
use the reference, PyTorch's own operations. Both give the same values and gradients, up to
rounding. For a whole volume, the reference does several stages in one operation
(:mod:`unet3d.kernels.norm.reference`, :mod:`unet3d.kernels.norm.columns`). If a map is a slab of a
volume (:mod:`unet3d.kernels.sharding`), the slabs exchange moments and sums, so that the whole
volume is normalised (:mod:`unet3d.kernels.norm.volume`).
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv.hopper.api import normalizes, wants_padding
from unet3d.kernels.maps import (
    MOMENTS,
    can_fold,
    channels_last,
    is_channels_last,
    laid_out,
    mark_padded,
    take,
    was_folded,
)
from unet3d.kernels.norm import columns, reference
from unet3d.kernels.norm.volume import VolumeNorm, stages_for
from unet3d.kernels.recompute import offer
from unet3d.kernels.sharding import current_shard
from unet3d.memory.fake_devices import is_gpu
from unet3d.torch_private import is_view


def instance_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    *,
    added: Tensor | None = None,
    pads_output: bool = False,
    has_halo: bool = False,
    outputs_of_reader: int | None = None,
) -> Tensor:
    """Normalise each channel (N, C, X, Y, Z) over its voxels, then apply LeakyReLU.

    ``y = leaky_relu((x - mean) / sqrt(var + eps) * weight + bias)`` (Ulyanov et al., arXiv
    1607.08022), with the biased variance, and statistics in float32 at least. A slope of 1 leaves
    the activation out.

    If there is a map ``added``, it is added to x first; x must then be a convolution's result
    without other readers, and may be overwritten. With ``pads_output`` the result is stored with
    zeros around Z, if a folded convolution will read it; so is the gradient of x, if a folded
    convolution made x. With ``has_halo`` the result of a slab includes its halo, (N, C, X + 2, Y,
    Z).
    ``outputs_of_reader`` are the output channels of a :func:`conv3x3x3` that is the only reader of
    the result; None: there are others. If this reader can normalise while it loads, the result is
    x, marked with the deferred normalisation.
    """
    shard, stages = current_shard(), stages_for(x)
    moments = take(x, MOMENTS)
    if stages is reference and added is not None:
        x, added, moments = sum_of(x, added), None, None
    is_deferred = normalizes(x, outputs_of_reader)
    if stages is reference and shard is None and moments is None and not is_deferred:
        return _of_whole(x, weight, bias, eps, negative_slope)
    norm = VolumeNorm(
        stages=stages,
        eps=eps,
        slope=negative_slope,
        shard=shard,
        halo_of=shard if has_halo and not is_deferred else None,
        pads=pads_output and stages is not reference and wants_padding(x),
        is_deferred=is_deferred,
    )
    if stages is not reference:
        x, added = laid_out(x), None if added is None else channels_last(added)
    pads_gradient = stages is not reference and was_folded(x) and can_fold(x, x.shape[1])
    given = (x, added, moments, weight, bias, norm, pads_gradient)
    y, mean, rstd, *planes = _InstanceNorm.apply(*given)  # type: ignore[no-untyped-call]
    if norm.pads:
        mark_padded(y)
    made_of = (x.detach(), weight.detach(), bias.detach(), mean, rstd)
    return norm.passed_on(y, *made_of, halo=(planes[0], planes[1]))


def sum_of(x: Tensor, added: Tensor) -> Tensor:
    """Add a map to a convolution's result without other readers, in place if possible."""
    # A view that an autograd function returned cannot be changed in place.
    return x + added if is_view(x) else x.add_(added)


class _InstanceNorm(torch.autograd.Function):
    """Keeps its input for backward and not its result, unlike PyTorch's LeakyReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        moments: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        norm: VolumeNorm,
        pads_gradient: bool,
    ) -> tuple[Tensor | None, ...]:
        affine = (weight, bias, *norm.statistics(x, added, moments))
        y, halo = norm.normalized(x, *affine)
        ctx.save_for_backward(x, *affine)
        ctx.norm, ctx.pads_gradient, ctx.adds = norm, pads_gradient, added is not None
        numbers = (*affine[2:], *(plane for plane in halo if plane is not None))
        ctx.mark_non_differentiable(*numbers)
        ctx.set_materialize_grads(False)  # no zeros for the statistics: they would cost launches
        return y, *affine[2:], *halo

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None, None, None
        x, *affine = ctx.saved_tensors
        norm: VolumeNorm = ctx.norm
        dy, own = norm.own_sums(dy, x, *affine)
        dx = norm.stages.gradient(
            dy,
            x,
            *affine,
            total=norm.total(own),
            voxels=norm.voxels(x),
            slope=norm.slope,
            pads=ctx.pads_gradient,
        )
        dx = mark_padded(dx) if ctx.pads_gradient else dx
        dweight, dbias = own[1].sum(0).to(affine[0].dtype), own[0].sum(0).to(affine[1].dtype)
        return dx, dx if ctx.adds else None, None, dweight, dbias, None, None


def _of_whole(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """Normalise a whole volume in PyTorch's own operations."""
    way = columns if not is_gpu(x.device) and is_channels_last(x) else reference
    given = (x, weight, bias, eps, slope, way)
    y, mean, rstd = _OfWhole.apply(*given)  # type: ignore[no-untyped-call]
    x, weight, bias = (value.detach() for value in (x, weight, bias))

    def again() -> Tensor:
        if way is reference:  # the operation includes the statistics
            return reference.forward(x, weight, bias, eps, slope)[0]
        return columns.normalize(x, weight, bias, mean, rstd, slope=slope)

    offer(y, again, x)
    return y  # type: ignore[no-any-return]


class _OfWhole(torch.autograd.Function):
    """Keeps its input for backward and not its result."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        slope: float,
        way: ModuleType,
    ) -> tuple[Tensor, ...]:
        y, mean, rstd = way.forward(x, weight, bias, eps, slope)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.slope, ctx.way = slope, way
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return y, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None, None
        gradients = ctx.way.backward(dy, *ctx.saved_tensors, slope=ctx.slope)
        return *gradients, None, None, None
