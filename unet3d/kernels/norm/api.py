"""Instance normalisation with LeakyReLU behind it, as one operation.

PyTorch normalises each (sample, channel) in one thread block: a single sample of 32 channels keeps
32 of a GPU's processors busy. Here the voxels are divided over all of them.

The work is done in stages, which divide at the point where parts of a volume have something to
exchange (:mod:`unet3d.kernels.norm.stages`). :func:`stages_for` picks Triton's version for large
CUDA tensors of at most 32 bits, and the reference, PyTorch's own operations, for everything else.
Both give the same values and gradients. Where a volume that is whole takes the reference, several
stages are one operation (:mod:`unet3d.kernels.norm.rows`, :mod:`unet3d.kernels.norm.columns`).
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.norm import columns, op, reference, rows
from unet3d.kernels.norm.stages import Stages
from unet3d.kernels.padding import can_fold, has_room, is_channels_last, mark_padded, was_folded
from unet3d.kernels.recompute import offer
from unet3d.kernels.triton_support import triton_available
from unet3d.memory.fake_devices import is_gpu

MIN_ELEMENTS = 2**20
"""Smaller maps take the reference: launching Triton's kernels takes longer than PyTorch's two."""

_FAST_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def instance_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    *,
    added: Tensor | None = None,
    pads_output: bool = False,
) -> Tensor:
    """Normalise each channel of each sample over its voxels, then apply LeakyReLU.

    ``y = leaky_relu((x - mean) / sqrt(var + eps) * weight + bias)`` (Ulyanov et al., arXiv
    1607.08022), with the biased variance, and statistics in float32 at least.

    Args:
        x: (N, C, X, Y, Z) of any floating type.
        weight: (C,).
        bias: (C,).
        eps: Added to the variance.
        negative_slope: Negative slope of LeakyReLU; 1 leaves the activation out.
        added: A map of the same shape and type that is added to x first, or None. Where there is
            one, x must be a convolution's result that nobody else reads: it may be overwritten.
        pads_output: Store the result with zeros around Z, for a folded convolution that reads it.
            The gradient of x is stored so where a folded convolution made x.

    Returns:
        (N, C, X, Y, Z), of x's type.
    """
    stages = stages_for(x)
    if stages is reference and added is not None:
        x, added = sum_of(x, added), None
    folds = stages is not reference and can_fold(x, x.shape[1])
    options = _Options(
        stages=stages,
        whole=_whole_for(x) if stages is reference else None,
        eps=eps,
        slope=negative_slope,
        pads_output=pads_output and folds,
        pads_gradient=folds and was_folded(x),
    )
    if stages is not reference:
        x, added = laid_out(x), None if added is None else channels_last(added)
    y, mean, rstd = _InstanceNorm.apply(x, added, weight, bias, options)  # type: ignore[no-untyped-call]
    if options.pads_output:
        mark_padded(y)
    x, weight, bias = (value.detach() for value in (x, weight, bias))

    def recompute() -> Tensor:
        if options.whole is rows:  # the statistics are in the same operation
            return rows.forward(x, weight, bias, eps, negative_slope)[0]
        given = (x, weight, bias, mean, rstd)
        if options.whole is columns:
            return columns.normalize(*given, slope=negative_slope)
        return _normalized(*given, options=options, pads=False)

    offer(y, recompute, x)
    return y  # type: ignore[no-any-return]


def sum_of(x: Tensor, added: Tensor) -> Tensor:
    """Add a map to another, in its memory where autograd allows that.

    Args:
        x: A convolution's result, (N, C, X, Y, Z), that nobody else reads.
        added: Of the same shape.
    """
    # A view that an autograd function returned cannot become another tensor.
    return x + added if x._is_view() else x.add_(added)


def stages_for(x: Tensor, channels: int | None = None) -> Stages:
    """Return the version of the stages that suits a map.

    Args:
        x: (N, C, X, Y, Z); for Triton's version it must be channels-last where a stage takes it.
        channels: Of the map, where x is only of its size; None: those of x.
    """
    elements = x.numel() // x.shape[1] * (x.shape[1] if channels is None else channels)
    if elements >= MIN_ELEMENTS and x.dtype in _FAST_TYPES and triton_available(x):
        return op
    return reference


def _whole_for(x: Tensor) -> ModuleType:
    """Return the module that does several of the reference's stages at once."""
    return columns if not is_gpu(x.device) and is_channels_last(x) else rows


class _Options(NamedTuple):
    """How a map is normalised."""

    stages: Stages
    whole: ModuleType | None
    """Does several of the stages at once; None: each is done by itself."""
    eps: float
    slope: float
    pads_output: bool
    pads_gradient: bool


class _InstanceNorm(torch.autograd.Function):
    """Keeps its input and not its result, unlike PyTorch's LeakyReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if options.whole is not None:
            y, mean, rstd = options.whole.forward(x, weight, bias, options.eps, options.slope)
        else:
            stages = options.stages
            parts = stages.moments(x) if added is None else stages.sum_moments(x, added)
            mean, rstd, _ = stages.merge(parts, num_voxels(x), options.eps)
            y = _normalized(x, weight, bias, mean, rstd, options=options, pads=options.pads_output)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.options, ctx.adds = options, added is not None
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)  # mean and rstd have none, and zeros would be launches
        return y, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, *affine = ctx.saved_tensors
        options: _Options = ctx.options
        stages, slope = options.stages, options.slope
        if options.whole is not None:
            dx, *others = options.whole.backward(dy, x, *affine, slope=slope)
            return dx, None, *others, None
        dy = channels_last(dy)
        total = stages.total(stages.sums(dy, x, *affine, slope=slope))
        dx = stages.gradient(
            dy,
            x,
            *affine,
            total=total,
            voxels=num_voxels(x),
            slope=slope,
            pads=options.pads_gradient,
        )
        weight, bias = affine[:2]
        dweight, dbias = total[1].sum(0).to(weight.dtype), total[0].sum(0).to(bias.dtype)
        dx = mark_padded(dx) if options.pads_gradient else dx
        return dx, dx if ctx.adds else None, dweight, dbias, None


def _normalized(x: Tensor, *affine: Tensor, options: _Options, pads: bool) -> Tensor:
    return options.stages.normalize(x, *affine, slope=options.slope, pads=pads)


def laid_out(x: Tensor) -> Tensor:
    """Return a map as Triton's stages take it: channels-last, or with room around Z."""
    return x if has_room(x) else channels_last(x)


def channels_last(x: Tensor) -> Tensor:
    """Return a map in channels-last memory."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def num_voxels(x: Tensor) -> int:
    """Return the voxels of a sample of a map (N, C, X, Y, Z)."""
    return x.shape[2] * x.shape[3] * x.shape[4]
