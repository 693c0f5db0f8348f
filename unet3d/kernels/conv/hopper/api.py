"""Which convolutions the hand-written ones do, with their gradients.

They need no zeros around a map: a normalisation pads neither its result for them nor its gradient
(:func:`wants_padding`). The moments of a result cost them nothing, and go on with it as a mark
(:mod:`unet3d.kernels.marks`). Where a normalised map has no other reader it is never written: the
convolution gets what was to be normalised, does it while it loads, and in backward returns the sums
that the normalisation needs with the gradient::

    convolve ─ y, moments ─ merge ─ y, affine ─ convolve             forward
    ... ─ gradient of y ─ total ─ dx, sums ─ input_gradient ─ ...    backward
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv.hopper import op
from unet3d.kernels.conv.hopper.driver import available
from unet3d.kernels.marks import Deferred, deferred_of, mark_moments, mark_sums
from unet3d.kernels.padding import can_fold, has_room, laid_out
from unet3d.kernels.sharding import current_shard
from unet3d.kernels.triton_support import triton_available
from unet3d.memory.fake_devices import is_gpu

CHANNELS = (32, 64)
MIN_VOXELS = 32**3
"""Voxels of a batch; smaller ones are left to cuDNN."""

_NO_AFFINE = (None, None, None, None)


def suits(x: Tensor, inputs: int, outputs: int) -> bool:
    """Return whether a 3x3x3 convolution with stride 1 of a map like this one is done here."""
    return (
        is_gpu(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and inputs in CHANNELS
        and outputs in CHANNELS
        and x.numel() // x.shape[1] >= MIN_VOXELS
        and (has_room(x) or x.is_contiguous(memory_format=torch.channels_last_3d))
        # Their moments are merged by Triton.
        and triton_available(x)
        and available(x.device)
    )


def wants_padding(x: Tensor) -> bool:
    """Return whether the convolutions that read a map would do so in pairs, with zeros around Z."""
    channels = x.shape[1]
    return can_fold(x, channels) and not suits(x, channels, channels)


def normalizes(x: Tensor, channels: int, outputs: int | None) -> bool:
    """Return whether the reader of a normalised map will normalise it itself.

    Args:
        x: What is normalised, or a map of its size.
        channels: Of what is normalised.
        outputs: Channels that the only reader makes, a 3x3x3 convolution with stride 1; None: the
            map has other readers.
    """
    # A slab would exchange halos of the normalised map.
    return outputs is not None and current_shard() is None and suits(x, channels, outputs)


def convolve(x: Tensor, weight: Tensor, x_padding: tuple[int, int], moments: bool) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, 3, 3, 3), zeros around; may be differentiated.

    With ``moments`` the result is marked with its own. What is left to do with x is done.
    """
    given = (x, weight, deferred_of(x), x_padding, moments)
    y, parts = _Convolution.apply(*given)  # type: ignore[no-untyped-call]
    return mark_moments(y, parts) if moments else y


class _Convolution(torch.autograd.Function):
    """Keeps its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        deferred: Deferred | None,
        x_padding: tuple[int, int],
        moments: bool,
    ) -> tuple[Tensor, Tensor]:
        kernel, (before, after) = weight.to(x.dtype), x_padding
        affine, slope = (_NO_AFFINE, 1.0) if deferred is None else deferred
        options = {"slope": slope, "before": before, "after": after}
        y, parts = op.convolve(x, kernel, *affine, **options, moments=moments)
        ctx.save_for_backward(x, kernel, *affine)
        ctx.options, ctx.weight_dtype = options, weight.dtype
        ctx.mark_non_differentiable(parts)
        ctx.set_materialize_grads(False)  # these have none, and zeros would be launches
        return y, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, kernel, *affine = ctx.saved_tensors
        dy, is_deferred = laid_out(dy), affine[0] is not None
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            options = {name: ctx.options[name] for name in ("slope", "before")}
            dweight = op.weight_gradient(dy, x, *affine, **options).to(ctx.weight_dtype)
        if not is_deferred:
            x = None  # it may have been recomputed, only for that
        if ctx.needs_input_grad[0]:
            dx, sums = op.input_gradient(dy, kernel, x, *affine, **ctx.options)
            dx = mark_sums(dx, sums) if is_deferred else dx
        return dx, dweight, None, None, None
