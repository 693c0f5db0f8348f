"""Convolutions that compute two neighbours along Z as one voxel of twice the channels.

At full resolution a network has few channels, and cuDNN's 3-D convolutions then leave most of a GPU
idle: with 32 channels they reach half the speed that they have with 64. In channels-last memory two
neighbours along Z with 32 channels each *are* one voxel with 64: a view, no copy. So a 3x3x3
convolution can be done on half as many such double voxels. The pair (2a, 2a + 1) of the result
depends on the voxels 2a - 1 to 2a + 2. If a map has a voxel of zeros before each row
(:mod:`unet3d.kernels.maps`), these are two pairs in memory, so the kernel is 3x3x2; other maps are
copied to this layout::

    with zeros  0 | 0   1 | 2   3 | 4   5 | 0     (-1, 0) (1, 2) ...

The gradient of the input is the same convolution with the flipped kernel. For the gradient of a
weight, the gradients of its entries in the double voxels' kernel are added up. Measured on
an H100 at 256^3 from 32 to 32 channels, plain and folded: forward 4.3 and 2.6 ms, gradient of the
input 4.4 and 2.6 ms, of the weights 6.9 and 2.8 ms. Without zeros around, a result pair reads three
pairs with half of the weights zero: 3.5, 3.6 and 4.1 ms, about as long as with a copy. With 64
channels cuDNN is faster without folding.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv import slabs
from unet3d.kernels.maps import (
    MAX_CHANNELS,
    channels_last,
    empty_with_planes,
    is_padded,
    mark_padded,
    with_padding,
)
from unet3d.kernels.operations import operation
from unet3d.kernels.triton_support import triton_available

_PLAIN = (1, 1, 1)


class FoldedConvolution(torch.autograd.Function):
    """Stride-1 convolution of channels-last volumes with an even number of voxels along Z.

    Inputs and outputs have at most :data:`MAX_CHANNELS` channels.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, x_padding: int = 1) -> Tensor:
        """Map (N, I, X, Y, Z) to (N, O, X', Y, Z)."""
        ctx.save_for_backward(x, weight)
        ctx.x_padding = x_padding
        return _convolve(x, weight, x_padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight."""
        x, weight = ctx.saved_tensors
        dy = _padded(dy)  # once for both
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(dy, x, weight, ctx.x_padding)
        del x  # it may have been recomputed, only for that
        if ctx.needs_input_grad[0]:
            dx = _convolve(dy, weight.flip(2, 3, 4).transpose(0, 1), 2 - ctx.x_padding)
        return dx, dweight, None


class StridedConvolution(torch.autograd.Function):
    """3x3x3 convolution with strides; computes gradients on pairs where possible.

    A map with zeros around Z is not copied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, ...],
        x_padding: int = 1,
    ) -> Tensor:
        """Map (N, I, X, Y, Z) to (N, O, X', Y', Z')."""
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.x_padding = stride, x_padding
        if is_padded(x):  # along Z there are zeros already
            return slabs.convolve(with_padding(x), weight, stride, (x_padding, 1, 0))
        return slabs.convolve(x, weight, stride, (x_padding, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight."""
        x, weight = ctx.saved_tensors
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        stride, padding, size = ctx.stride, (ctx.x_padding, 1, 1), x.shape[2:]
        in_pairs = strides_in_pairs(x.shape, weight, stride)
        if in_pairs:
            outputs, inputs = weight.shape[:2]
            x, dy, weight = _fold(x), pad_z(dy, 0, 1), _strided_pairs(weight)
            stride, size = (*stride[:2], 1), (*size[:2], size[2] // 2)
        dx = dweight = None
        if needs_dweight:
            dweight = slabs.weight_gradient(dy, x, weight, stride, padding)
            if in_pairs:
                folded = dweight.reshape(outputs, 2, inputs, 3, 3, 2).permute(0, 2, 3, 4, 5, 1)
                dweight = folded.flatten(4)[..., 1:].contiguous()
        del x  # it may have been recomputed, only for that
        if needs_dx:
            dx = slabs.transposed(dy, weight, stride, padding, size)
            dx = _unfold(dx) if in_pairs else dx
        return dx, dweight, None, None


def strides_in_pairs(shape: Sequence[int], weight: Tensor, stride: Sequence[int]) -> bool:
    """Return whether the gradients of a convolution with strides are computed on pairs."""
    return stride[2] == 2 and weight.shape[1] <= MAX_CHANNELS and shape[4] % 2 == 0


class ComposedUpsampling(torch.autograd.Function):
    """Upsampling and the 3x3x3 convolution behind it as one transposed convolution.

    If an axis is upsampled s times, the composed kernel has s + 2 taps, and each voxel of the
    result reads two voxels of the input along the axis. With s = 2 it reads eight in all, where the
    convolution alone would read 27 voxels of the upsampled map, which is never made. Along Z, where
    s is 2, each voxel of a pair has two of the four taps, and pairs have stride 1::

        coarse voxel z reaches voxels 2 z - 1 | 2 z, 2 z + 1 | 2 z + 2
        pairs                      (2 z - 1, 2 z)  (2 z + 1, 2 z + 2)

    So the result is a map that is stored with room around Z (:mod:`unet3d.kernels.maps`), with
    other values than zeros there. Measured on an H200 from 64 to 32 channels, 128^3 to 256^3:
    forward 1.27 ms, gradient of x 1.04, of the weights 1.56; both convolutions separately 4.64,
    4.13 and 7.24. With more output channels only forward is faster without pairs. On a CPU pairs
    gain nothing, and their result would be copied, so the composed kernel is used without pairs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, ...], x_padding: int
    ) -> Tensor:
        """Map (N, I, X, Y, Z) to (N, O, X', Y', 2 Z) with a kernel (I, O, ..., 4)."""
        ctx.save_for_backward(x, weight)
        ctx.steps = (*stride[:2], 1), (x_padding, 1, 0)
        if weight.shape[1] > MAX_CHANNELS:
            return slabs.transposed(x, weight, stride, (x_padding, 1, 1))
        made = slabs.transposed(x, _transposed_pairs(weight), *ctx.steps)
        return _unfold(made)[..., 1:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the kernel."""
        x, weight = ctx.saved_tensors
        pairs = _fold(with_padding(dy) if is_padded(dy) else pad_z(dy, 1, 1))
        kernel = _transposed_pairs(weight)
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            folded = slabs.weight_gradient(x, pairs, kernel, *ctx.steps)
            inputs, outputs, i, j, _ = weight.shape
            folded = folded.reshape(inputs, 2, outputs, i, j, 2).permute(0, 2, 3, 4, 5, 1)
            dweight = folded.flatten(4)
        del x  # it may have been recomputed, only for that
        if ctx.needs_input_grad[0]:
            dx = slabs.convolve(pairs, kernel, *ctx.steps)
        return dx, dweight, None, None


def composed_kernel(up: Tensor, weight: Tensor) -> Tensor:
    """Compose the kernels of an upsampling, (I, C, *stride), and of the convolution after it.

    The result is one kernel (I, O, ...) with stride + 2 taps along each axis; differentiable.
    """
    # Tap t reads voxel s z + a of the upsampled map for voxel s z + a - t + 1 of the result, so the
    # composed tap is a - t + 2.
    # The meta device has no autocast.
    kind = "cpu" if up.is_meta else up.device.type
    with torch.autocast(kind, enabled=False):
        kernel: Tensor = F.conv3d(up, weight, padding=2)
    return kernel


def _transposed_pairs(weight: Tensor) -> Tensor:
    """Return the kernel of pairs (I, 2 O, X, Y, 2) from the kernel of voxels (I, O, X, Y, 4)."""
    inputs, outputs, i, j, _ = weight.shape
    pairs = weight.reshape(inputs, outputs, i, j, 2, 2).permute(0, 5, 1, 2, 3, 4).flatten(1, 2)
    return channels_last(pairs)


def _padded(x: Tensor) -> Tensor:
    """Return a map with zeros around Z: itself, or a copy."""
    return x if is_padded(x) else mark_padded(pad_z(x, 1, 1)[..., 1:-1])


# All (p, q, t, k): voxel p of a result pair reads voxel q of the pair at tap t with weight tap k.
_ENTRIES = [
    (p, q, t, 2 * t + q - p)
    for p, q, t in itertools.product(range(2), repeat=3)
    if 0 <= 2 * t + q - p <= 2
]


def _convolve(x: Tensor, weight: Tensor, x_padding: int) -> Tensor:
    outputs, inputs = weight.shape[:2]
    pairs = weight.new_zeros((2, outputs, 2, inputs, 3, 3, 2))
    for p, q, t, k in _ENTRIES:
        pairs[p, :, q, ..., t] = weight[..., k]
    pairs = channels_last(pairs.view(2 * outputs, 2 * inputs, 3, 3, 2))
    x = _fold(with_padding(_padded(x)))
    return _unfold(slabs.convolve(x, pairs, _PLAIN, (x_padding, 1, 0)))


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, x_padding: int) -> Tensor:
    """Return the gradient of a weight from the gradient of the double voxels' kernel.

    The gradient dy, which has zeros around Z, is used as the input and x as the gradient of the
    output: the products are the same, but the kernel is flipped.
    """
    outputs, inputs = weight.shape[:2]
    like = channels_last(weight.new_empty((2 * inputs, 2 * outputs, 3, 3, 2)))
    pairs, padding = _fold(with_padding(dy)), (2 - x_padding, 1, 0)
    folded = slabs.weight_gradient(_fold(x), pairs, like, _PLAIN, padding)
    exact = torch.promote_types(folded.dtype, torch.float32)
    parts = folded.reshape(2, inputs, 2, outputs, 3, 3, 2)
    total = parts.new_zeros((inputs, outputs, 3, 3, 3), dtype=exact)
    for p, q, t, k in _ENTRIES:
        total[..., k] += parts[p, :, q, ..., t]
    return total.to(weight.dtype).transpose(0, 1).flip(2, 3, 4)


def _strided_pairs(weight: Tensor) -> Tensor:
    """Return the kernel (O, 2 I, 3, 3, 2) of pairs for a convolution with stride 2 along Z.

    Voxel z of the result reads voxels 2 z - 1 to 2 z + 1: the second of pair z - 1, and pair z. So
    along Z the pairs have stride 1, with a pair of zeros before the first. PyTorch pads both ends,
    which adds a plane to the result, so the gradient gets a plane of zeros at its end. Measured on
    an H200 from 32 to 64 channels at 256^3: gradient of the input 0.95 instead of 1.53 ms, of the
    weights 0.77 instead of 1.37. Forward would be slower.
    """
    outputs, inputs = weight.shape[:2]
    kernel = F.pad(weight, (1, 0))  # tap 2 t + q reads voxel q of pair t
    pairs = kernel.reshape(outputs, inputs, 3, 3, 2, 2).permute(0, 5, 1, 2, 3, 4).flatten(1, 2)
    return channels_last(pairs)


def _fold(x: Tensor) -> Tensor:
    """View (N, C, X, Y, Z) as (N, 2 C, X, Y, Z / 2)."""
    x = channels_last(x)
    n, c, i, j, k = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(n, i, j, k // 2, 2 * c).permute(0, 4, 1, 2, 3)


def _unfold(x: Tensor) -> Tensor:
    """View (N, 2 C, X, Y, Z / 2) as (N, C, X, Y, Z)."""
    n, c, i, j, k = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(n, i, j, 2 * k, c // 2).permute(0, 4, 1, 2, 3)


def pad_z(x: Tensor, before: int, after: int) -> Tensor:
    """Return a copy of a map with planes of zeros before and behind Z, channels-last."""
    if triton_available(x):
        padded: Tensor = _pad_z(channels_last(x), before, after)
        return padded
    y = empty_with_planes(x, before, after)
    y.zero_()[..., before : before + x.shape[-1]].copy_(x)
    return y


_pad_z = operation(
    "pad_z",
    "(Tensor x, int before, int after) -> Tensor",
    "pad_kernel.pad_z",
    empty_with_planes,
)
