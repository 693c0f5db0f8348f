"""Convolutions that are not given to PyTorch as a whole, but in slabs along X.

Beyond 2^31 - 1 elements of one tensor cuDNN has only slow algorithms, or none. A slab of a
channels-last volume along X is a view, so its input costs no copy; what is computed for it is
written, or copied, to its place (:mod:`unet3d.kernels.conv.into`). A slab also reads the planes
beside it that its kernel reaches, and computes a plane more where that lets it start like a whole
volume does; such planes are dropped. Slabs are as few and as equal as can be, so that cuDNN looks
for algorithms once or twice (:mod:`unet3d.kernels.conv.geometry`).

Padding that differs before and behind along X, which PyTorch does not have, is done so too. Small
float32 convolutions on a CPU go to :mod:`unet3d.kernels.conv.cpu`. Everything else takes PyTorch's
own operation, with its own gradient.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.conv import cpu
from unet3d.kernels.conv.geometry import Axis, Slab, divide
from unet3d.kernels.conv.into import put, put_convolved
from unet3d.kernels.conv.planes import (
    Padding,
    axis_of,
    empty,
    gradients,
    padding_in_plane,
    result_shape,
    samples,
    some_planes,
    transposed_shape,
)
from unet3d.kernels.padding import channels_last

MAX_ELEMENTS = 2**31 - 1
"""The most elements of a tensor that cuDNN is given."""

_NONE = (0, 0, 0)


def convolve(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, kernel), without a bias; may be differentiated.

    There are fewer planes of zeros on each side than the kernel has. Before and behind X they may
    differ, as where another device holds what goes on on one side.
    """
    whole = _padding_of_whole(x, weight, stride, padding)
    if whole is not None:
        return F.conv3d(x, weight, None, tuple(stride), whole)
    x = x.to(lowered(x))
    y: Tensor = _Convolution.apply(x, weight.to(x.dtype), stride, padding)  # type: ignore[no-untyped-call]
    return y


def upsample(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding = _NONE) -> Tensor:
    """Convolve transposed with (I, O, kernel), so that each voxel becomes a block.

    May be differentiated. The padding is what is left out of the result.
    """
    shape = transposed_shape(x, weight, stride, padding)
    along_x = padding[0] if isinstance(padding[0], int) else None
    is_small = max(x.numel(), math.prod(shape)) <= MAX_ELEMENTS
    if along_x is not None and is_small and not _is_slow(x, weight, stride):
        sides = (along_x, *padding_in_plane(padding))
        return F.conv_transpose3d(x, weight, stride=tuple(stride), padding=sides)
    if tuple(weight.shape[2:]) == (1, 1, 1) == tuple(stride):
        return convolve(x, weight.transpose(0, 1), stride, _NONE)
    x = x.to(lowered(x))
    y: Tensor = _Upsampling.apply(x, weight.to(x.dtype), stride, padding)  # type: ignore[no-untyped-call]
    return y


def transposed(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Padding,
    size: Sequence[int] | None = None,
) -> Tensor:
    """Return a transposed convolution with (I, O, kernel), without a gradient.

    It is the gradient of the input of :func:`convolve`, from that of its result. Of the sizes X',
    Y', Z' from which the stride leads to that of x, None is the smallest.
    """
    smallest = transposed_shape(x, weight, stride, padding)
    shape = (*smallest[:2], *(smallest[2:] if size is None else size))
    more = (shape[3] - smallest[3], shape[4] - smallest[4])
    axis, in_plane = axis_of(shape[2], weight, stride, padding), padding_in_plane(padding)

    def one_call(x: Tensor, planes: int, along_x: int) -> Tensor:
        fewest = (x.shape[2] - 1) * axis.stride + axis.kernel - 2 * along_x
        sides, further = (along_x, *in_plane), (planes - fewest, *more)
        return F.conv_transpose3d(x, weight, None, tuple(stride), sides, further)

    if axis.symmetric is not None and max(x.numel(), math.prod(shape)) <= MAX_ELEMENTS:
        return one_call(x, axis.size, axis.symmetric)
    y = empty(shape, x)
    slabs = _slabs(axis.for_gradient, range(axis.size), y, x)
    for x_one, y_one in zip(samples(x), samples(y), strict=True):
        for slab in slabs:
            made = one_call(_planes(x_one, slab.y), len(slab.x), slab.padding)
            put(made, slab.x, y_one, slab.wanted)
            del made  # before the next one
    return y


def weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
) -> Tensor:
    """Return the gradient of a convolution's weights, whose own values do not matter.

    Slabs are summed in float32 at least.
    """
    axis = axis_of(x.shape[2], weight, stride, padding)
    in_plane = padding_in_plane(padding)

    def one_call(dy: Tensor, x: Tensor, along_x: int) -> Tensor:
        given = (dy, x, weight, stride, (along_x, *in_plane))
        return gradients(*given, wanted=(False, True))[1]

    if axis.symmetric is not None and max(dy.numel(), x.numel()) <= MAX_ELEMENTS:
        return one_call(dy, x, axis.symmetric)
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    for dy_one, x_one in zip(samples(dy), samples(x), strict=True):
        if axis.symmetric is not None and max(dy_one.numel(), x_one.numel()) <= MAX_ELEMENTS:
            total += one_call(dy_one, x_one, axis.symmetric)
            continue
        for slab in _weight_slabs(axis, x_one, dy_one):
            total += one_call(_planes(dy_one, slab.y), _planes(x_one, slab.x), 0)
    return total.to(weight.dtype)


def is_one_call(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding) -> bool:
    """Return whether a convolution is given to PyTorch as a whole."""
    return _padding_of_whole(x, weight, stride, padding) is not None


def lowered(x: Tensor) -> torch.dtype:
    """Return the type in which autocast would convolve a tensor."""
    kind = x.device.type
    # Shapes are followed on the meta device, for which there is no autocast.
    is_lowered = (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and x.dtype != torch.float64
    )
    return torch.get_autocast_dtype(kind) if is_lowered else x.dtype


class _Convolution(torch.autograd.Function):
    """A convolution in slabs, which keeps nothing but its arguments."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        if cpu.is_slow(x, weight, stride):
            return cpu.convolve(x, weight, stride, padding)
        axis, in_plane = axis_of(x.shape[2], weight, stride, padding), padding_in_plane(padding)
        y = empty(result_shape(x, weight, stride, padding), x)
        slabs = _slabs(axis.for_result, range(axis.result), x, y)
        for x_one, y_one in zip(samples(x), samples(y), strict=True):
            for slab in slabs:
                planes = _planes(x_one, slab.x)
                sides = (slab.padding, *in_plane)
                put_convolved(y_one, slab, planes, weight, stride, sides)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        given = (dy, x, weight, ctx.stride, ctx.padding)
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        if cpu.is_slow(x, weight, ctx.stride):
            return *cpu.convolve_backward(*given, wanted=(needs_dx, needs_dweight)), None, None
        dweight = weight_gradient(*given) if needs_dweight else None
        dx = None
        if needs_dx:
            dx = transposed(dy, weight, ctx.stride, ctx.padding, x.shape[2:])
        return dx, dweight, None, None


class _Upsampling(torch.autograd.Function):
    """A transposed convolution in slabs; to a convolution, its result is x and its input is y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.steps = stride, padding
        if cpu.is_slow(x, weight, stride):
            return cpu.upsample(x, weight, stride)
        return transposed(x, weight, stride, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride = ctx.steps[0]
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        if cpu.is_slow(x, weight, stride):
            wanted = (needs_dx, needs_dweight)
            return *cpu.upsample_backward(dy, x, weight, stride, wanted=wanted), None, None
        dweight = weight_gradient(x, dy, weight, *ctx.steps) if needs_dweight else None
        dx = convolve(dy, weight, *ctx.steps) if needs_dx else None
        return dx, dweight, None, None


def _padding_of_whole(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
) -> tuple[int, int, int] | None:
    """Return the padding with which one call of PyTorch's does it all, or None."""
    along_x: int | None
    if isinstance(padding[0], int):
        along_x = padding[0]
    elif padding[0][0] == padding[0][1]:  # nearly every call: the general rule takes longer
        along_x = padding[0][0]
    else:
        along_x = axis_of(x.shape[2], weight, stride, padding).symmetric
    largest = max(x.numel(), math.prod(result_shape(x, weight, stride, padding)))
    if along_x is None or largest > MAX_ELEMENTS or _is_slow(x, weight, stride):
        return None
    return along_x, *padding_in_plane(padding)


def _is_slow(x: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    return cpu.is_slow(x, weight, stride) and lowered(x) == x.dtype


def _slabs(slab: Callable[[int, int], Slab], planes: range, x: Tensor, y: Tensor) -> list[Slab]:
    """Divide planes into slabs of a convolution's input and result that are small enough."""
    x_plane, y_plane = (value.shape[1] * math.prod(value.shape[3:]) for value in (x, y))

    def fits(one: Slab) -> bool:
        return max(len(one.x) * x_plane, len(one.y) * y_plane) <= MAX_ELEMENTS

    return divide(slab, planes, fits)


def _weight_slabs(axis: Axis, x: Tensor, dy: Tensor) -> list[Slab]:
    """Return slabs of one sample's result with exactly the planes that they read.

    The few planes of the result that read zeros are slabs by themselves: a padded copy of what
    they read is small, and the others need none.
    """
    inside = axis.inside()
    slabs = _slabs(axis.exact, inside, x, dy)
    ends = (range(inside.start), range(inside.stop, axis.result))
    return slabs + [axis.exact(end.start, end.stop) for end in ends if end]


def _planes(x: Tensor, planes: range) -> Tensor:
    """Return some planes of one sample; a view where it is channels-last and they are inside."""
    return channels_last(some_planes(x, planes))
