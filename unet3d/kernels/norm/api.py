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

from unet3d.kernels.norm import columns, op, reference, rows
from unet3d.kernels.norm.stages import Stages
from unet3d.kernels.padding import can_fold, is_channels_last, mark_padded
from unet3d.kernels.recompute import offer
from unet3d.kernels.triton_support import triton_available
from unet3d.memory.fake_devices import is_gpu

MIN_ELEMENTS = 2**21
"""Smaller maps take the reference: launching Triton's kernels takes longer than PyTorch's two."""

_FAST_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def instance_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    *,
    pads_output: bool = False,
    pads_gradient: bool = False,
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
        pads_output: Store the result with zeros around Z, for a folded convolution that reads it.
        pads_gradient: Store the gradient of x likewise, for a folded convolution that made x.

    Returns:
        (N, C, X, Y, Z), of x's type.
    """
    stages = stages_for(x)
    folds = stages is not reference and can_fold(x, x.shape[1])
    options = _Options(
        stages=stages,
        whole=_whole_for(x) if stages is reference else None,
        eps=eps,
        slope=negative_slope,
        pads_output=pads_output and folds,
        pads_gradient=pads_gradient and folds,
    )
    y, mean, rstd = _InstanceNorm.apply(x, weight, bias, options)  # type: ignore[no-untyped-call]
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


def stages_for(x: Tensor) -> Stages:
    """Return the version of the stages that suits a map.

    Args:
        x: (N, C, X, Y, Z); for Triton's version it must be channels-last where a stage takes it.
    """
    if x.numel() >= MIN_ELEMENTS and x.dtype in _FAST_TYPES and triton_available(x):
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
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        if options.whole is not None:
            y, mean, rstd = options.whole.forward(x, weight, bias, options.eps, options.slope)
        else:
            stages, laid_out = options.stages, _laid_out(x, options)
            parts = stages.moments(laid_out)
            mean, rstd, _ = stages.merge(parts, _num_voxels(x), options.eps)
            y = _normalized(
                laid_out, weight, bias, mean, rstd, options=options, pads=options.pads_output
            )
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.options = options
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)  # mean and rstd have none, and zeros would be launches
        return y, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, *affine = ctx.saved_tensors
        options: _Options = ctx.options
        stages, slope = options.stages, options.slope
        if options.whole is not None:
            return *options.whole.backward(dy, x, *affine, slope=slope), None
        x, dy = _laid_out(x, options), _laid_out(dy, options)
        total = stages.total(stages.sums(dy, x, *affine, slope=slope))
        dx = stages.gradient(
            dy,
            x,
            *affine,
            total=total,
            voxels=_num_voxels(x),
            slope=slope,
            pads=options.pads_gradient,
        )
        weight, bias = affine[:2]
        dweight, dbias = total[1].sum(0).to(weight.dtype), total[0].sum(0).to(bias.dtype)
        return mark_padded(dx) if options.pads_gradient else dx, dweight, dbias, None


def _normalized(x: Tensor, *affine: Tensor, options: _Options, pads: bool) -> Tensor:
    return options.stages.normalize(_laid_out(x, options), *affine, slope=options.slope, pads=pads)


def _laid_out(x: Tensor, options: _Options) -> Tensor:
    """Return a map as Triton's stages take it."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def _num_voxels(x: Tensor) -> int:
    return x.shape[2] * x.shape[3] * x.shape[4]
