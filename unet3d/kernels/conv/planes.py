"""Planes of tensors along X, and the calls that convolve them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.conv.geometry import Axis

Padding = tuple[int | tuple[int, int], int, int]
"""Planes of zeros on either side of X, Y, Z; that of X may be a pair, before and behind."""


def axis_of(size: int, weight: Tensor, stride: Sequence[int], padding: Padding) -> Axis:
    """Return the convolution along X of an input of so many planes."""
    along_x = padding[0]
    before, after = (along_x, along_x) if isinstance(along_x, int) else along_x
    return Axis(size, weight.shape[2], stride[0], before, after)


def padding_in_plane(padding: Padding) -> tuple[int, int]:
    """Return the padding along Y and Z."""
    return padding[1], padding[2]


def result_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
) -> tuple[int, ...]:
    """Return the shape (N, O, X', Y', Z') of a convolution's result."""
    sizes = [
        (size + (2 * pad if isinstance(pad, int) else sum(pad)) - kernel) // step + 1
        for size, kernel, step, pad in zip(
            x.shape[2:], weight.shape[2:], stride, padding, strict=True
        )
    ]
    return x.shape[0], weight.shape[0], *sizes


def transposed_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
) -> tuple[int, ...]:
    """Return that of a transposed convolution with (I, O, kernel).

    The padding is what is left out of the result.
    """
    sizes = [
        (size - 1) * step + kernel - (2 * pad if isinstance(pad, int) else sum(pad))
        for size, kernel, step, pad in zip(
            x.shape[2:], weight.shape[2:], stride, padding, strict=True
        )
    ]
    return x.shape[0], weight.shape[1], *sizes


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return channels-last memory of a tensor's type and device."""
    layout = torch.channels_last_3d
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=layout)


def samples(x: Tensor) -> list[Tensor]:
    """Return views (1, C, X, Y, Z) of the samples."""
    return [x.narrow(0, index, 1) for index in range(x.shape[0])]


def some_planes(x: Tensor, planes: range) -> Tensor:
    """Return some planes of a map: a view, or a copy where some are outside and so are zeros."""
    first, stop = (min(max(end, 0), x.shape[2]) for end in (planes.start, planes.stop))
    inside, before = x.narrow(2, first, stop - first), max(0, -planes.start)
    missing = (before, len(planes) - before - len(range(first, stop)))
    return F.pad(inside, (0, 0, 0, 0, *missing)) if any(missing) else inside


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    wanted: tuple[bool, bool],
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution's input and weights, from one call.

    In place of one that is not wanted there is no tensor. The weights of a transposed convolution
    are (I, O, kernel).
    """
    how = (stride, padding, (1, 1, 1), transposed, (0, 0, 0), 1)  # no dilation, nothing added
    given = (dy, x, weight, None, *how, [*wanted, False])
    dx, dweight, _ = torch.ops.aten.convolution_backward(*given)
    return dx, dweight
