"""Instance normalisation with LeakyReLU behind it, as one operation.

PyTorch normalises each (sample, channel) in one thread block: a single sample of 32 channels keeps
32 of a GPU's processors busy. Here the voxels are divided over all of them.

:func:`instance_norm` picks the Triton version for large CUDA tensors of at most 32 bits, and the
reference, PyTorch's own, for everything else. Both give the same values and gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.padding import can_fold, mark_padded
from unet3d.kernels.recompute import offer
from unet3d.kernels.triton_support import triton_available

MIN_ELEMENTS = 2**21
"""Below, launching Triton's kernels takes longer than PyTorch's two take to run."""

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
        negative_slope: Of LeakyReLU; 1 leaves the activation out.
        pads_output: Write the result with zeros around Z, where a folded convolution reads it.
        pads_gradient: Likewise the gradient of x, where a folded convolution made x.

    Returns:
        Of x's shape and type.
    """
    if x.numel() >= MIN_ELEMENTS and x.dtype in _FAST_TYPES and triton_available(x):
        folds = can_fold(x, x.shape[1])
        y, mean, rstd = torch.ops.unet3d.instance_norm(
            x, weight, bias, eps, negative_slope, pads_output and folds, pads_gradient and folds
        )
        if pads_output and folds:
            mark_padded(y)
        kept = [value.detach() for value in (x, weight, bias, mean, rstd)]
        offer(y, lambda: torch.ops.unet3d.normalize(*kept, negative_slope), kept[0])
        return y  # type: ignore[no-any-return]
    y = reference(x, weight, bias, eps, negative_slope)
    x, weight, bias = (value.detach() for value in (x, weight, bias))
    offer(y, lambda: _normalized(x, weight, bias, eps, negative_slope)[0], x)
    return y


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, negative_slope: float) -> Tensor:
    """Do as :func:`instance_norm` does, with PyTorch's own operations."""
    y: Tensor = _Reference.apply(x, weight, bias, eps, negative_slope)  # type: ignore[no-untyped-call]
    return y


class _Reference(torch.autograd.Function):
    """Keeps its input and not its result, unlike PyTorch's LeakyReLU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float
    ) -> Tensor:
        y, mean, rstd = _normalized(x, weight, bias, eps, slope)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.eps, ctx.slope = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        n, c, *space = x.shape
        rows = x.reshape(1, n * c, *space)
        scale = weight.repeat(n)
        g = dy.reshape(rows.shape)
        if ctx.slope != 1:
            shape = (1, -1, 1, 1, 1)
            before = (rows - mean.view(shape)) * (rstd * scale).view(shape)
            before += bias.repeat(n).view(shape)
            g = torch.where(before > 0, g, g * ctx.slope)
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            g, rows, scale, None, None, mean, rstd, True, ctx.eps, [True, True, True]
        )
        return dx.reshape(x.shape), dweight.view(n, c).sum(0), dbias.view(n, c).sum(0), None, None


def _normalized(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and 1 / deviation of each channel of each sample."""
    n, c, *space = x.shape
    rows = x.reshape(1, n * c, *space)
    y, mean, rstd = torch.native_batch_norm(
        rows, weight.repeat(n), bias.repeat(n), None, None, True, 0.0, eps
    )
    if slope != 1:
        F.leaky_relu_(y, slope)
    return y.reshape(x.shape), mean, rstd
