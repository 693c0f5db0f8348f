"""Which convolutions the hand-written ones do, with their gradients.

They need no zeros around a map: a normalisation pads neither its result for them nor its gradient
(:func:`wants_padding`). The moments of a result cost them nothing, and go on with it as a mark
(:mod:`unet3d.kernels.marks`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv.hopper import op
from unet3d.kernels.conv.hopper.driver import available
from unet3d.kernels.marks import mark_moments
from unet3d.kernels.padding import can_fold, has_room, laid_out
from unet3d.kernels.sharding import number_of_largest
from unet3d.kernels.triton_support import triton_available
from unet3d.memory.fake_devices import is_gpu

CHANNELS = (32, 64)
MIN_VOXELS = 32**3
"""Voxels of a batch; smaller ones are left to cuDNN."""

_NOT_NORMALIZED = (None, None, None, None)


def suits(x: Tensor, inputs: int, outputs: int) -> bool:
    """Return whether a 3x3x3 convolution with stride 1 of a map like this one is done here.

    For slabs without their halos the answers agree.
    """
    return (
        is_gpu(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and inputs in CHANNELS
        and outputs in CHANNELS
        and number_of_largest(x.numel() // x.shape[1]) >= MIN_VOXELS
        and (has_room(x) or x.is_contiguous(memory_format=torch.channels_last_3d))
        # Their moments are merged by Triton.
        and triton_available(x)
        and available(x.device)
    )


def wants_padding(x: Tensor) -> bool:
    """Return whether the convolutions that read a map would do so in pairs, with zeros around Z.

    For slabs, without their halos, the answers agree.
    """
    channels = x.shape[1]
    return can_fold(x, channels, number_of_largest(x.numel())) and not suits(x, channels, channels)


def convolve(x: Tensor, weight: Tensor, x_padding: tuple[int, int], moments: bool) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, 3, 3, 3), zeros around; may be differentiated.

    With ``moments`` the result is marked with its own.
    """
    y, parts = _Convolution.apply(x, weight, x_padding, moments)  # type: ignore[no-untyped-call]
    return mark_moments(y, parts) if moments else y


class _Convolution(torch.autograd.Function):
    """Keeps its arguments."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, x_padding: tuple[int, int], moments: bool
    ) -> tuple[Tensor, Tensor]:
        kernel, (before, after) = weight.to(x.dtype), x_padding
        options = {"slope": 1.0, "before": before, "after": after, "moments": moments}
        y, parts = op.convolve(x, kernel, *_NOT_NORMALIZED, **options)
        ctx.save_for_backward(x, kernel)
        ctx.x_padding, ctx.weight_dtype = x_padding, weight.dtype
        ctx.mark_non_differentiable(parts)
        ctx.set_materialize_grads(False)  # these have none, and zeros would be launches
        return y, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, kernel = ctx.saved_tensors
        dy, (before, after) = laid_out(dy), ctx.x_padding
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = op.weight_gradient(dy, x, *_NOT_NORMALIZED, slope=1.0, before=before)
            dweight = dweight.to(ctx.weight_dtype)
        del x  # it may have been recomputed, only for that
        if ctx.needs_input_grad[0]:
            options = {"slope": 1.0, "before": before, "after": after}
            dx, _ = op.input_gradient(dy, kernel, None, *_NOT_NORMALIZED, **options)
        return dx, dweight, None, None
