"""A 3x3x3 convolution with the instance normalisation and LeakyReLU behind it.

For the first convolution of a network backward is one operation: the gradient between the two has
no reader but the gradient of the weights. Everything else is the two operations.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv import slabs
from unet3d.kernels.conv.api import conv3x3x3, is_stem
from unet3d.kernels.norm import op as norm
from unet3d.kernels.norm.api import channels_last, instance_norm, num_voxels, stages_for
from unet3d.kernels.padding import can_fold, mark_padded
from unet3d.kernels.recompute import offer
from unet3d.kernels.stem_norm import op

_BOTH_SIDES = (1, 1)


def conv3x3x3_instance_norm(
    x: Tensor,
    kernel: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    *,
    pads_output: bool = False,
) -> Tensor:
    """Convolve with stride 1 and zero padding, normalise each channel, and apply LeakyReLU.

    Args:
        x: (N, I, X, Y, Z).
        kernel: (O, I, 3, 3, 3); autocast may lower it.
        weight: (O,).
        bias: (O,).
        eps: Added to the variance.
        negative_slope: Negative slope of LeakyReLU; 1 leaves the activation out.
        pads_output: Store the result with zeros around Z, for a folded convolution that reads it.

    Returns:
        (N, O, X, Y, Z).
    """
    if not (is_stem(x, kernel) and stages_for(x, kernel.shape[0]) is norm):
        y = conv3x3x3(x, kernel)
        return instance_norm(y, weight, bias, eps, negative_slope, pads_output=pads_output)
    x = channels_last(x.to(slabs.lowered(x)))
    options = _Options(eps=eps, slope=negative_slope, pads=pads_output)
    given = (x, kernel.to(x.dtype), weight, bias, options)
    made, y, mean, rstd, padded = _StemNorm.apply(*given)  # type: ignore[no-untyped-call]
    if padded:
        mark_padded(made)
    affine = (weight.detach(), bias.detach(), mean, rstd)
    offer(made, lambda: norm.normalize(y, *affine, slope=negative_slope, pads=False), y)
    return made  # type: ignore[no-any-return]


class _Options(NamedTuple):
    """How a map is normalised."""

    eps: float
    slope: float
    pads: bool


class _StemNorm(torch.autograd.Function):
    """Keeps the image and the convolution's result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        y = torch.ops.unet3d.stem.default(x, kernel, *_BOTH_SIDES)
        mean, rstd, _ = norm.merge(norm.moments(y), num_voxels(y), options.eps)
        pads = options.pads and can_fold(y, y.shape[1])
        affine = (weight, bias, mean, rstd)
        made = norm.normalize(y, *affine, slope=options.slope, pads=pads)
        ctx.save_for_backward(x, kernel, y, *affine)
        ctx.slope = options.slope
        ctx.mark_non_differentiable(y, mean, rstd)
        ctx.set_materialize_grads(False)  # those have none, and zeros would be launches
        return made, y, mean, rstd, pads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, kernel, y, *affine = ctx.saved_tensors
        dy = channels_last(dy)
        total = norm.total(norm.sums(dy, y, *affine, slope=ctx.slope))
        dkernel = op.weight_gradient(
            dy,
            x,
            y,
            *affine,
            total=total,
            kernel=kernel,
            before=_BOTH_SIDES[0],
            slope=ctx.slope,
        )
        weight, bias = affine[:2]
        dbias, dweight = total.sum(1)
        return None, dkernel, dweight.to(weight.dtype), dbias.to(bias.dtype), None
