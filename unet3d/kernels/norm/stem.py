"""A 3x3x3 convolution followed by instance normalisation and LeakyReLU.

The kernel of a network's first convolution also computes the moments of its result. Backward is one
operation, because only the gradient of the kernel reads the gradient of the convolution's result.
For other convolutions this module calls convolution and normalisation separately.

Backward may recompute the convolution's result from the image, once: at 256^3 that takes 0.4 of a
training step's 50 ms on an H200, and saves one of the five maps of this size that are alive at the
memory peak.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv import slabs
from unet3d.kernels.conv.api import conv3x3x3, is_stem
from unet3d.kernels.conv.hopper.api import normalizes, wants_padding
from unet3d.kernels.conv.stem_op import stem, stem_with_moments, weight_gradient
from unet3d.kernels.maps import channels_last, mark_padded
from unet3d.kernels.norm import op
from unet3d.kernels.norm.api import instance_norm
from unet3d.kernels.norm.volume import VolumeNorm, stages_for
from unet3d.kernels.recompute import offer
from unet3d.kernels.sharding import current_shard, own_planes, x_padding


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
    outputs_of_reader: int | None = None,
) -> Tensor:
    """Convolve x (N, I, X, Y, Z) with stride 1 and zero padding, then normalise it.

    The kernel is (O, I, 3, 3, 3); autocast may lower its type. A slab must include its halo. Other
    arguments and the result are as in :func:`unet3d.kernels.instance_norm`.
    """
    # If halos counted, slabs might choose different stages, and deadlock.
    if not (is_stem(x, kernel) and stages_for(own_planes(x), kernel.shape[0]) is op):
        y = conv3x3x3(x, kernel, moments=True)
        return instance_norm(
            *(y, weight, bias, eps, negative_slope),
            pads_output=pads_output,
            has_halo=has_halo,
            outputs_of_reader=outputs_of_reader,
        )
    x = channels_last(x.to(slabs.lowered(x)))
    shard = current_shard()
    norm = VolumeNorm(
        stages=op,
        eps=eps,
        slope=negative_slope,
        shard=shard,
        halo_of=shard if has_halo else None,
        pads=pads_output,
    )
    given = (x, kernel.to(x.dtype), weight, bias, norm, outputs_of_reader, x_padding())
    made, norm, y, mean, rstd, *planes = _StemNorm.apply(*given)  # type: ignore[no-untyped-call]
    if norm.pads:
        mark_padded(made)
    made_of = (y, weight.detach(), bias.detach(), mean, rstd)
    passed: Tensor = norm.passed_on(made, *made_of, halo=(planes[0], planes[1]))
    return passed


class _StemNorm(torch.autograd.Function):
    """Keeps the image for backward, and the convolution's result unless that is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kernel: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: VolumeNorm,
        outputs_of_reader: int | None,
        padding: int,
    ) -> tuple[Tensor | VolumeNorm | None, ...]:
        y, moments = stem_with_moments(x, kernel, padding)
        affine = (weight, bias, *norm.statistics(y, moments=moments))
        norm = norm._replace(pads=norm.pads and wants_padding(y))
        if normalizes(y, outputs_of_reader):
            norm = norm._replace(is_deferred=True, halo_of=None)
        made, halo = norm.normalized(y, *affine)
        # If the reader normalises, made and y are one map, which the reader saves too.
        offer(made if norm.is_deferred else y, cache(lambda: stem(x, kernel, padding)), x)
        ctx.save_for_backward(x, kernel, y, *affine)
        ctx.norm, ctx.padding = norm, padding
        planes = (plane for plane in halo if plane is not None)
        ctx.mark_non_differentiable(y, *affine[2:], *planes)
        ctx.set_materialize_grads(False)  # no zeros for the statistics: they would cost launches
        return made, norm, y, *affine[2:], *halo

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 7
        x, kernel, y, *affine = ctx.saved_tensors
        norm: VolumeNorm = ctx.norm
        dy, own = norm.own_sums(dy, y, *affine)
        dkernel = weight_gradient(
            dy,
            x,
            y,
            *affine,
            total=norm.total(own),
            voxels=norm.voxels(y),
            kernel=kernel,
            padding=ctx.padding,
            slope=norm.slope,
        )
        dbias, dweight = own.sum(1)
        dweight, dbias = dweight.to(affine[0].dtype), dbias.to(affine[1].dtype)
        return None, dkernel, dweight, dbias, None, None, None
