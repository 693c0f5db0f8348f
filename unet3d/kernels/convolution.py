"""Convolutions that are faster than cuDNN's own where channels are few.

At full resolution a network has few channels, and cuDNN's 3-D convolutions then leave most of a
GPU idle: with 32 channels they reach half the speed that they have with 64. In channels-last
memory two neighbours along Z with 32 channels each *are* one voxel with 64: a view, no copy. So

* forward, a kernel one voxel longer along Z that moves two voxels at a time computes both of them
  as 64 channels;
* the gradient of the input is the same with the flipped kernel;
* the gradient of the weights is that of a 3x3x3 kernel between such double voxels, of which the
  entries that belong to one weight are added up.

The results are the same but for rounding. Measured on an H100 at 256^3 from 32 to 32 channels:
forward 4.3 to 3.5 ms, gradient of the input 4.4 to 3.6, of the weights 6.9 to 4.1. With 64
channels cuDNN is faster as it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import unet3d.kernels.stem_op  # noqa: F401 - registers the operation
from unet3d.kernels.remake import offer, source
from unet3d.kernels.triton_here import has_triton
from unet3d.stand_ins import is_gpu

MAX_CHANNELS = 32
"""Up to here two voxels are computed as one."""
MIN_ELEMENTS = 2**23
"""Of the input; below, the launches that fold the weights cost as much as is gained."""
MAX_HEAD_COLUMNS = 128
"""Of eight voxels together; with more than sixteen classes too much of the matrix is zero."""

MAX_STEM_ROWS = 128
"""Neighbours of a voxel times channels of the image."""
MAX_STEM_CHANNELS = 64

_PLAIN = [1, 1, 1]
_NONE = [0, 0, 0]


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
        x = x.to(_lowered(x))
        y: Tensor = torch.ops.unet3d.stem(x, weight.to(x.dtype))
        return y
    if worth_folding(x, weight):
        y = FoldedConvolution.apply(x, weight.to(x.dtype), added)  # type: ignore[no-untyped-call]
        return y
    y = F.conv3d(x, weight, padding=1)
    return y if added is None else y.add_(added)  # nothing else reads y


def upsample(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Make each voxel a small block: a transposed convolution whose kernel is its stride.

    It is made again in backward where that is asked for (:mod:`unet3d.kernels.remake`): it takes a
    few percent of the time of the convolution that reads it, and half of its memory.

    Args:
        x: (N, I, X, Y, Z).
        weight: (I, O, *stride); autocast may lower it.
        stride: Voxels of a block along X, Y, Z.

    Returns:
        (N, O, X', Y', Z').
    """
    y = F.conv_transpose3d(x, weight, stride=tuple(stride))
    made_from, weight = source(x), weight.detach()

    def again() -> Tensor:
        x = made_from()
        return F.conv_transpose3d(x, weight.to(x.dtype), stride=tuple(stride))

    offer(y, again)
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
    is_worth_it = (
        _is_low_channels_last(x) and outputs * together <= MAX_HEAD_COLUMNS and k % together == 0
    )
    if not is_worth_it:
        return F.conv3d(x, weight, bias)
    one = torch.eye(together, dtype=weight.dtype, device=weight.device)
    matrix = torch.kron(one, weight.reshape(outputs, inputs))
    rows = x.permute(0, 2, 3, 4, 1).reshape(-1, together * inputs)
    y = F.linear(rows, matrix, bias.repeat(together))
    return y.reshape(n, i, j, k, outputs).permute(0, 4, 1, 2, 3)


def worth_folding(x: Tensor, weight: Tensor) -> bool:
    """Return whether two voxels should be computed as one.

    Args:
        x: (N, I, X, Y, Z).
        weight: (O, I, 3, 3, 3).
    """
    return (
        _is_low_channels_last(x)
        and 8 <= min(weight.shape[:2]) <= MAX_CHANNELS
        and x.shape[-1] % 2 == 0
    )


def _is_stem(x: Tensor, weight: Tensor) -> bool:
    """Return whether x is an image: of few channels, and without need of a gradient."""
    return (
        is_gpu(x.device)
        and 27 * x.shape[1] <= MAX_STEM_ROWS
        and weight.shape[0] <= MAX_STEM_CHANNELS
        and _lowered(x) in (torch.bfloat16, torch.float16)
        and not x.requires_grad
        and has_triton(x)
    )


def _lowered(x: Tensor) -> torch.dtype:
    """Return the type in which autocast would convolve x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _is_low_channels_last(x: Tensor) -> bool:
    return (
        is_gpu(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() >= MIN_ELEMENTS
        and x.is_contiguous(memory_format=torch.channels_last_3d)
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
        dy = dy.contiguous(memory_format=torch.channels_last_3d)
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(dy, x, weight)
        if ctx.needs_input_grad[0]:
            if weight.shape[1] <= MAX_CHANNELS:
                dx = _convolve(dy, weight.flip(2, 3, 4).transpose(0, 1))
            else:
                dx = _gradients(dy, x, weight, [True, False, False])[0]
        return dx, dweight, dy if ctx.needs_input_grad[2] else None


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    if weight.shape[0] > MAX_CHANNELS:
        return F.conv3d(x, weight, padding=1)
    # The first of two neighbours sees voxels 0 to 2 of the four along Z, the second 1 to 3.
    both = torch.cat([F.pad(weight, (0, 1)), F.pad(weight, (1, 0))])
    both = both.contiguous(memory_format=torch.channels_last_3d)
    return _unfold(F.conv3d(x, both, stride=(1, 1, 2), padding=1))


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape[:2]
    like = weight.new_empty((2 * outputs, 2 * inputs, 3, 3, 3))
    like = like.contiguous(memory_format=torch.channels_last_3d)
    folded = _gradients(_fold(dy), _fold(x), like, [False, True, False])[1]
    # Entry (p, q, t): from neighbour q of the double voxel t - 1 away to neighbour p, which is
    # 2 (t - 1) + q - p voxels away; where that is k - 1, it belongs to weight k.
    exact = torch.promote_types(folded.dtype, torch.float32)
    parts = folded.reshape(2, outputs, 2, inputs, 3, 3, 3).to(exact)
    along_z = [
        parts[0, :, 1, ..., 0] + parts[1, :, 0, ..., 1],
        parts[0, :, 0, ..., 1] + parts[1, :, 1, ..., 1],
        parts[0, :, 1, ..., 1] + parts[1, :, 0, ..., 2],
    ]
    return torch.stack(along_z, -1).to(weight.dtype)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, _PLAIN, _PLAIN, _PLAIN, False, _NONE, 1, wanted
    )
    return gradients


def _fold(x: Tensor) -> Tensor:
    """View (N, C, X, Y, Z) as (N, 2 C, X, Y, Z / 2)."""
    n, c, i, j, k = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(n, i, j, k // 2, 2 * c).permute(0, 4, 1, 2, 3)


def _unfold(x: Tensor) -> Tensor:
    """View (N, 2 C, X, Y, Z / 2) as (N, C, X, Y, Z)."""
    n, c, i, j, k = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(n, i, j, 2 * k, c // 2).permute(0, 4, 1, 2, 3)
