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
from unet3d.kernels.halo import gradient_of_own, own_planes
from unet3d.kernels.norm import op as norm
from unet3d.kernels.norm.api import (
    channels_last,
    instance_norm,
    merged,
    normalized,
    normalized_again,
    num_voxels,
    stages_for,
)
from unet3d.kernels.padding import can_fold, mark_padded
from unet3d.kernels.recompute import offer
from unet3d.kernels.sharding import Shard, current_shard, number_of_largest, x_padding
from unet3d.kernels.stem_norm import op


def conv3x3x3_instance_norm(
    x: Tensor,
    kernel: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    *,
    pads_output: bool = False,
    has_halo: bool = False,
) -> Tensor:
    """Convolve with stride 1 and zero padding, normalise each channel, and apply LeakyReLU.

    Args:
        x: (N, I, X, Y, Z); a slab with its halo.
        kernel: (O, I, 3, 3, 3); autocast may lower it.
        weight: (O,).
        bias: (O,).
        eps: Added to the variance.
        negative_slope: Negative slope of LeakyReLU; 1 leaves the activation out.
        pads_output: Store the result with zeros around Z, for a folded convolution that reads it.
        has_halo: Return the halo too where x is a slab.

    Returns:
        (N, O, X, Y, Z), of a slab its own planes, or those with their halo.
    """
    # The halo would make other slabs choose other stages, which wait for one another for ever.
    if not (is_stem(x, kernel) and stages_for(own_planes(x), kernel.shape[0]) is norm):
        y = conv3x3x3(x, kernel)
        return instance_norm(
            *(y, weight, bias, eps, negative_slope), pads_output=pads_output, has_halo=has_halo
        )
    x = channels_last(x.to(slabs.lowered(x)))
    shard = current_shard()
    options = _Options(
        eps=eps,
        slope=negative_slope,
        pads=pads_output,
        x_padding=x_padding(),
        shard=shard,
        has_halo=has_halo and shard is not None,
    )
    given = (x, kernel.to(x.dtype), weight, bias, options)
    made, padded, y, mean, rstd, *planes = _StemNorm.apply(*given)  # type: ignore[no-untyped-call]
    if padded:
        mark_padded(made)
    again = (y, weight.detach(), bias.detach(), mean, rstd)
    halo = (planes[0], planes[1]) if options.has_halo else None
    offer(made, lambda: normalized_again(*again, stages=norm, slope=negative_slope, halo=halo), y)
    return made  # type: ignore[no-any-return]


class _Options(NamedTuple):
    """How a map is normalised."""

    eps: float
    slope: float
    pads: bool
    x_padding: tuple[int, int]
    shard: Shard | None
    has_halo: bool


class _StemNorm(torch.autograd.Function):
    """Keeps the image and the convolution's result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, options: _Options
    ) -> tuple[Tensor | bool | None, ...]:
        y = torch.ops.unet3d.stem.default(x, kernel, *options.x_padding)
        mean, rstd = merged(norm, norm.moments(y), y, options.eps, options.shard)
        largest = number_of_largest(y.numel(), options.shard)
        pads = options.pads and can_fold(y, y.shape[1], largest)
        affine = (weight, bias, mean, rstd)
        made, halo = normalized(
            *(y, *affine),
            stages=norm,
            slope=options.slope,
            pads=pads,
            shard=options.shard if options.has_halo else None,
        )
        ctx.save_for_backward(x, kernel, y, *affine)
        ctx.options = options
        planes = (plane for plane in halo if plane is not None)
        ctx.mark_non_differentiable(y, mean, rstd, *planes)
        ctx.set_materialize_grads(False)  # those have none, and zeros would be launches
        return made, pads, y, mean, rstd, *halo

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, kernel, y, *affine = ctx.saved_tensors
        options: _Options = ctx.options
        slope, shard = options.slope, options.shard
        if options.has_halo and shard is not None:
            dy = gradient_of_own(dy, shard)
        dy = channels_last(dy)
        own = norm.total(norm.sums(dy, y, *affine, slope=slope))
        dkernel = op.weight_gradient(
            dy,
            x,
            y,
            *affine,
            total=own if shard is None else norm.total(shard.gather(own)),
            voxels=num_voxels(y, shard),
            kernel=kernel,
            before=options.x_padding[0],
            slope=slope,
        )
        weight, bias = affine[:2]
        dbias, dweight = own.sum(1)
        return None, dkernel, dweight.to(weight.dtype), dbias.to(bias.dtype), None
