"""Convolutions that are faster than cuDNN's own where channels are few.

At full resolution a network has few channels, and cuDNN's 3-D convolutions then leave most of a
GPU idle: with 32 channels they reach half the speed that they have with 64. In channels-last
memory two neighbours along Z with 32 channels each *are* one voxel with 64: a view, no copy. So a
3x3x3 convolution can be done on such double voxels, of which there are half as many. To find both
voxels of the pair (2a, 2a + 1) it needs the voxels 2a - 1 to 2a + 2. Where a map has a voxel of
zeros before each row (:mod:`unet3d.kernels.padding`), those are two whole pairs of its memory, a
3x3x2 kernel; elsewhere they are half of three::

    map             z   0   1 | 2   3 | 4   5
    with zeros  0 | 0   1 | 2   3 | 4   5 | 0     (-1, 0) (1, 2) ...

The gradient of the input is the same convolution with the flipped kernel, and the gradient of the
weights is that of the double voxels' kernel, of which the entries that belong to one weight are
added up. The results are the same but for rounding. Measured on an H100 at 256^3 from 32 to 32
channels, plain, folded and folded with zeros around: forward 4.3, 3.5 and 2.6 ms, gradient of the
input 4.4, 3.6 and 2.6 ms, of the weights 6.9, 4.1 and 2.8 ms. With 64 channels cuDNN is faster as
it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import unet3d.kernels.conv.stem_op  # noqa: F401 - registers the operation
from unet3d.kernels.conv import slabs
from unet3d.kernels.padding import MAX_CHANNELS, can_fold, is_padded, mark_folded, with_padding
from unet3d.kernels.recompute import kept_for, offer, recomputing
from unet3d.kernels.triton_support import triton_available
from unet3d.memory.fake_devices import is_gpu

MAX_HEAD_COLUMNS = 128
"""Of eight voxels together; with more than sixteen classes too much of the matrix is zero."""

MAX_STEM_ROWS = 128
"""Neighbours of a voxel times channels of the image."""
MAX_STEM_CHANNELS = 64

_PLAIN = (1, 1, 1)
_NONE = (0, 0, 0)
_PADDED = (1, 1, 0)
"""Where a map has its zeros along Z already."""


def conv3x3x3(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """Convolve with stride 1 and zero padding, so that the size stays.

    Args:
        x: (N, I, X, Y, Z).
        weight: (O, I, 3, 3, 3); autocast may lower it.
        added: (N, O, X, Y, Z), to be added to the result, or None.

    Returns:
        (N, O, X, Y, Z).
    """
    if _is_stem(x, weight) and added is None:
        x = x.to(slabs.lowered(x))
        y: Tensor = torch.ops.unet3d.stem(x, weight.to(x.dtype))
        return y
    if can_fold(x, min(weight.shape[:2])):
        y = FoldedConvolution.apply(x, weight.to(x.dtype), added)  # type: ignore[no-untyped-call]
        return mark_folded(y)
    y = slabs.convolve(x, weight, _PLAIN, _PLAIN)
    return y if added is None else y.add_(added)  # nothing else reads y


def strided_conv3x3x3(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Convolve with strides and zero padding.

    Args:
        x: (N, I, X, Y, Z).
        weight: (O, I, 3, 3, 3); autocast may lower it.
        stride: Along X, Y, Z.

    Returns:
        (N, O, X', Y', Z').
    """
    if is_padded(x):
        y: Tensor = PaddedStridedConvolution.apply(x, weight.to(x.dtype), tuple(stride))  # type: ignore[no-untyped-call]
        return y
    return slabs.convolve(x, weight, stride, _PLAIN)


def upsample(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Make each voxel a small block: a transposed convolution whose kernel is its stride.

    It is made again in backward where that is asked for (:mod:`unet3d.kernels.recompute`): it takes
    a few percent of the time of the convolution that reads it, and half of its memory.

    Args:
        x: (N, I, X, Y, Z).
        weight: (I, O, *stride); autocast may lower it.
        stride: Voxels of a block along X, Y, Z.

    Returns:
        (N, O, X', Y', Z').
    """
    y = slabs.upsample(x, weight, stride)
    made_from, weight, dtype = recomputing(x), weight.detach(), y.dtype

    def again() -> Tensor:
        # In backward there is no autocast, which has lowered them.
        return slabs.upsample(made_from().to(dtype), weight.to(dtype), stride)

    offer(y, again, kept_for(x))
    return y


def conv1x1x1(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Mix the channels of each voxel, for few outputs.

    cuDNN pads the outputs to a multiple of eight; here eight voxels along Z are multiplied as one
    with a block-diagonal matrix. Measured on an H100 at 256^3 from 32 to 3 channels, forward and
    backward: 6.6 to 1.4 ms.

    Args:
        x: (N, I, X, Y, Z).
        weight: (O, I, 1, 1, 1).
        bias: (O,).

    Returns:
        (N, O, X, Y, Z).
    """
    together = 8
    outputs, inputs = weight.shape[:2]
    n, _, i, j, k = x.shape
    is_worth_it = outputs * together <= MAX_HEAD_COLUMNS and k % together == 0
    if not (is_worth_it and can_fold(x, inputs)):
        if slabs.is_one_call(x, weight, _PLAIN, _NONE):
            return F.conv3d(x, weight, bias)
        return slabs.convolve(x, weight, _PLAIN, _NONE).add_(bias.view(1, -1, 1, 1, 1))
    one = torch.eye(together, dtype=weight.dtype, device=weight.device)
    matrix = torch.kron(one, weight.reshape(outputs, inputs))
    folded = x.permute(0, 2, 3, 4, 1).reshape(n, i, j, k // together, together * inputs)
    if slabs.is_one_call(x, weight, _PLAIN, _NONE):
        y = F.linear(folded.flatten(0, 3), matrix, bias.repeat(together))
    else:
        kernel = matrix.view(*matrix.shape, 1, 1, 1)
        y = slabs.convolve(folded.permute(0, 4, 1, 2, 3), kernel, _PLAIN, _NONE)
        y = y.permute(0, 2, 3, 4, 1).add_(bias.repeat(together))
    return y.reshape(n, i, j, k, outputs).permute(0, 4, 1, 2, 3)


def _is_stem(x: Tensor, weight: Tensor) -> bool:
    """Return whether x is an image: of few channels, and without need of a gradient."""
    return (
        is_gpu(x.device)
        and 27 * x.shape[1] <= MAX_STEM_ROWS
        and weight.shape[0] <= MAX_STEM_CHANNELS
        and slabs.lowered(x) in (torch.bfloat16, torch.float16)
        and not x.requires_grad
        and triton_available(x)
    )


class FoldedConvolution(torch.autograd.Function):
    """Stride-1 convolution of channels-last volumes with an even number of voxels along Z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None) -> Tensor:
        """Map (N, I, X, Y, Z) to (N, O, X, Y, Z)."""
        ctx.save_for_backward(x, weight)
        y = _convolve(x, weight)
        return y if added is None else y.add_(added)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and what was added."""
        x, weight = ctx.saved_tensors
        if not is_padded(dy):
            dy = dy.contiguous(memory_format=torch.channels_last_3d)
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(dy, x, weight)
        del x  # it may have been made again, only for that
        if ctx.needs_input_grad[0]:
            dx = _convolve(dy, weight.flip(2, 3, 4).transpose(0, 1))
        return dx, dweight, dy if ctx.needs_input_grad[2] else None


class PaddedStridedConvolution(torch.autograd.Function):
    """3x3x3 convolution with strides of a map with zeros around Z, without a copy of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> Tensor:
        """Map (N, I, X, Y, Z) to (N, O, X', Y', Z')."""
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return slabs.convolve(with_padding(x), weight, stride, _PADDED)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight."""
        x, weight = ctx.saved_tensors
        given = (dy, x, weight, ctx.stride, _PLAIN)
        dweight = slabs.weight_gradient(*given) if ctx.needs_input_grad[1] else None
        dx = slabs.input_gradient(*given) if ctx.needs_input_grad[0] else None
        return dx, dweight, None


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    if weight.shape[0] > MAX_CHANNELS:
        return slabs.convolve(x, weight, _PLAIN, _PLAIN)
    if is_padded(x) and weight.shape[1] <= MAX_CHANNELS:
        # From neighbour q of pair t, counted from the pair (-1, 0), to neighbour p of (0, 1) it is
        # 2 t + q - 1 - p voxels; where that is k - 1, the weight is k.
        outputs, inputs = weight.shape[:2]
        pairs = weight.new_zeros((2, outputs, 2, inputs, 3, 3, 2))
        for p, q, t, k in _PADDED_ENTRIES:
            pairs[p, :, q, ..., t] = weight[..., k]
        pairs = pairs.view(2 * outputs, 2 * inputs, 3, 3, 2)
        pairs = pairs.contiguous(memory_format=torch.channels_last_3d)
        return _unfold(slabs.convolve(_fold(with_padding(x)), pairs, _PLAIN, _PADDED))
    # The first of two neighbours sees voxels 0 to 2 of the four along Z, the second 1 to 3.
    both = torch.cat([F.pad(weight, (0, 1)), F.pad(weight, (1, 0))])
    both = both.contiguous(memory_format=torch.channels_last_3d)
    return _unfold(slabs.convolve(x, both, (1, 1, 2), _PLAIN))


_PADDED_ENTRIES = [
    (p, q, t, 2 * t + q - p)
    for p in range(2)
    for q in range(2)
    for t in range(2)
    if 0 <= 2 * t + q - p <= 2
]
_PLAIN_ENTRIES = [
    (p, q, t, 2 * t + q - p - 1)
    for p in range(2)
    for q in range(2)
    for t in range(3)
    if 0 <= 2 * t + q - p - 1 <= 2
]


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if is_padded(dy):
        # The gradient, which has zeros around, takes the part of the input, and x that of the
        # output: the same products, but seen from the other side, so the kernel comes out flipped.
        turned = _pairs_gradient(x, dy, weight.transpose(0, 1))
        return turned.transpose(0, 1).flip(2, 3, 4)
    return _pairs_gradient(dy, x, weight)


def _pairs_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight of this shape from that of the double voxels' kernel."""
    outputs, inputs = weight.shape[:2]
    padded = is_padded(x)
    taps, entries = (2, _PADDED_ENTRIES) if padded else (3, _PLAIN_ENTRIES)
    like = weight.new_empty((2 * outputs, 2 * inputs, 3, 3, taps))
    like = like.contiguous(memory_format=torch.channels_last_3d)
    padding = _PADDED if padded else _PLAIN
    pairs = _fold(with_padding(x) if padded else x)
    folded = slabs.weight_gradient(_fold(dy), pairs, like, _PLAIN, padding)
    exact = torch.promote_types(folded.dtype, torch.float32)
    parts = folded.reshape(2, outputs, 2, inputs, 3, 3, taps)
    total = parts.new_zeros((outputs, inputs, 3, 3, 3), dtype=exact)
    for p, q, t, k in entries:
        total[..., k] += parts[p, :, q, ..., t]
    return total.to(weight.dtype)


def _fold(x: Tensor) -> Tensor:
    """View (N, C, X, Y, Z) as (N, 2 C, X, Y, Z / 2)."""
    x = x.contiguous(memory_format=torch.channels_last_3d)
    n, c, i, j, k = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(n, i, j, k // 2, 2 * c).permute(0, 4, 1, 2, 3)


def _unfold(x: Tensor) -> Tensor:
    """View (N, 2 C, X, Y, Z / 2) as (N, C, X, Y, Z)."""
    n, c, i, j, k = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(n, i, j, 2 * k, c // 2).permute(0, 4, 1, 2, 3)
