"""Convolutions in slabs along X, for inputs that PyTorch should not convolve as a whole.

Beyond 2^31 - 1 elements of one tensor cuDNN has only slow algorithms, or none. A slab of a
channels-last volume along X is a view, so its input is not copied; its result is written, or
copied, to its place. The few planes at either end that read zeros are separate slabs, whose input
is copied with the zeros. The others are divided into the fewest, nearly equal slabs, so that cuDNN
searches for algorithms once or twice.

Small float32 convolutions on a CPU go to :mod:`unet3d.kernels.conv.cpu`. Everything else takes
PyTorch's own operation, with its own gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.conv import cpu
from unet3d.kernels.conv.planes import (
    Axis,
    Padding,
    axis_of,
    divide,
    gradients,
    result_shape,
    samples,
    some_planes,
    transposed_shape,
)
from unet3d.kernels.maps import channels_last, empty_channels_last
from unet3d.kernels.operations import operation
from unet3d.memory.fake_devices import is_gpu

MAX_ELEMENTS = 2**31 - 1
"""Most elements of a tensor in one call of cuDNN."""

_LOW_TYPES = (torch.bfloat16, torch.float16)
"""Types in which cuDNN has no choice of precision and makes no copies."""
_NONE = (0, 0, 0)
_NO_DILATION = (1, 1, 1)


def convolve(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, kernel), without a bias; differentiable.

    The padding must be smaller than the kernel.
    """
    if is_one_call(x, weight, stride, padding):
        return F.conv3d(x, weight, None, tuple(stride), padding)
    x = x.to(lowered(x))
    y: Tensor = _Convolution.apply(x, weight.to(x.dtype), stride, padding)  # type: ignore[no-untyped-call]
    return y


def is_one_call(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding) -> bool:
    """Return whether a convolution is given to PyTorch as a whole."""
    largest = max(x.numel(), math.prod(result_shape(x, weight, stride, padding)))
    return largest <= MAX_ELEMENTS and not _is_slow(x, weight, stride)


def upsample(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding = _NONE) -> Tensor:
    """Convolve transposed with (I, O, kernel), so that each voxel becomes a block.

    Differentiable. The padding is cut off the result.
    """
    largest = max(x.numel(), math.prod(transposed_shape(x, weight, stride, padding)))
    if largest <= MAX_ELEMENTS and not _is_slow(x, weight, stride):
        return F.conv_transpose3d(x, weight, stride=tuple(stride), padding=padding)
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

    It is the gradient of the input of :func:`convolve`, where x is the gradient of the result. With
    strides, inputs of several sizes X', Y', Z' have a result of x's size; None takes the smallest.
    """
    smallest = transposed_shape(x, weight, stride, padding)
    shape = (*smallest[:2], *(smallest[2:] if size is None else size))
    more = tuple(a - b for a, b in zip(shape[2:], smallest[2:], strict=True))
    if max(x.numel(), math.prod(shape)) <= MAX_ELEMENTS:
        return F.conv_transpose3d(x, weight, None, tuple(stride), padding, more)
    axis = axis_of(shape[2], weight, stride, padding)
    y = empty_channels_last(shape, x)
    # No result reads the planes between strides, and those at the end.
    num_read = 0 if axis.stride > axis.kernel else axis.read_by(range(axis.result)).stop
    if num_read < axis.size:
        y.narrow(2, num_read, axis.size - num_read).zero_()
    x_plane, y_plane = _elements_of_plane(x), _elements_of_plane(y)

    def fits(made: range) -> bool:
        read = axis.readers_of(made)
        return max(len(read) * x_plane, len(axis.read_by(read)) * y_plane) <= MAX_ELEMENTS

    every = range(axis.size)
    is_whole = max(axis.result * x_plane, axis.size * y_plane) <= MAX_ELEMENTS  # of one sample
    for wanted in [every] if is_whole else divide(every, fits):
        read = axis.readers_of(wanted)
        if not read:
            continue
        made, sides, further = axis.read_by(read), (0, *padding[1:]), (0, *more[1:])
        if is_whole:
            read, made, sides, further = range(axis.result), every, padding, more
        for x_one, y_one in zip(samples(x), samples(y), strict=True):
            given = (_planes(x_one, read), weight, None, tuple(stride))
            computed = F.conv_transpose3d(*given, sides, further)
            _put(computed, made, y_one, wanted)
            del computed  # before the next one
    return y


def weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
) -> Tensor:
    """Return the gradient of a convolution's weights.

    Only shape and type of ``weight`` are used. Slabs are summed in float32 at least.
    """
    if max(dy.numel(), x.numel()) <= MAX_ELEMENTS:
        return gradients(dy, x, weight, stride, padding, wanted=(False, True))[1]
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    slabs = _slabs(axis_of(x.shape[2], weight, stride, padding), x, dy)
    for dy_one, x_one in zip(samples(dy), samples(x), strict=True):
        for slab in slabs:
            given = (_planes(dy_one, slab.y), _planes(x_one, slab.x), weight, stride)
            total += gradients(*given, (slab.padding, *padding[1:]), wanted=(False, True))[1]
    return total.to(weight.dtype)


def lowered(x: Tensor) -> torch.dtype:
    """Return the type in which autocast would convolve a tensor."""
    kind = x.device.type
    # The meta device, which only computes shapes, has no autocast.
    is_lowered = (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and x.dtype != torch.float64
    )
    return torch.get_autocast_dtype(kind) if is_lowered else x.dtype


class _Convolution(torch.autograd.Function):
    """A convolution in slabs; for backward it keeps only its arguments."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.steps = stride, padding
        if cpu.is_slow(x, weight, stride):
            return cpu.convolve(x, weight, stride, padding)
        y = empty_channels_last(result_shape(x, weight, stride, padding), x)
        slabs = _slabs(axis_of(x.shape[2], weight, stride, padding), x, y)
        for x_one, y_one in zip(samples(x), samples(y), strict=True):
            for slab in slabs:
                place = y_one.narrow(2, slab.y.start, len(slab.y))
                sides = (slab.padding, *padding[1:])
                _convolve_to(place, _planes(x_one, slab.x), weight, stride, sides)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding = ctx.steps
        given = (dy, x, weight, stride, padding)
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        if cpu.is_slow(x, weight, stride):
            return *cpu.convolve_backward(*given, wanted=(needs_dx, needs_dweight)), None, None
        dweight = weight_gradient(*given) if needs_dweight else None
        dx = transposed(dy, weight, stride, padding, x.shape[2:]) if needs_dx else None
        return dx, dweight, None, None


class _Upsampling(torch.autograd.Function):
    """A transposed convolution in slabs.

    As the gradient of a convolution, it maps the gradient of the result to the input's gradient.
    """

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


def _is_slow(x: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    return cpu.is_slow(x, weight, stride) and lowered(x) == x.dtype


class _Slab(NamedTuple):
    """The planes that one call reads and makes."""

    x: range
    """Planes of the convolution's input; planes outside the volume are zeros."""
    y: range
    """Planes of the convolution's result."""
    padding: int
    """Planes of zeros that the call pads before and behind the input."""


def _slabs(axis: Axis, x: Tensor, y: Tensor) -> list[_Slab]:
    """Divide a convolution's input and result into slabs that are small enough for one call."""
    x_plane, y_plane = _elements_of_plane(x), _elements_of_plane(y)
    if max(axis.size * x_plane, axis.result * y_plane) <= MAX_ELEMENTS:  # one sample
        return [_Slab(range(axis.size), range(axis.result), axis.padding)]
    inside = axis.inside()
    runs = divide(
        inside,
        lambda y: max(len(axis.read_by(y)) * x_plane, len(y) * y_plane) <= MAX_ELEMENTS,
    )
    runs += [end for end in (range(inside.start), range(inside.stop, axis.result)) if end]
    return [_Slab(axis.read_by(run), run, 0) for run in runs]


def _elements_of_plane(x: Tensor) -> int:
    return x.shape[1] * math.prod(x.shape[3:])


def _planes(x: Tensor, planes: range) -> Tensor:
    """Return planes of one sample, channels-last; a view if x is channels-last and has them all."""
    return channels_last(some_planes(x, planes))


def _convolve_to(
    place: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> None:
    """Write a convolution to existing channels-last memory.

    On a GPU cuDNN writes to it directly; PyTorch's own call would make a copy. For one channel,
    strides do not determine the layout that cuDNN uses.
    """
    if is_gpu(x.device) and x.dtype in _LOW_TYPES and x.shape[1] > 1:
        _into(place, x, weight, stride, padding)
    else:
        planes = range(place.shape[2])
        _put(F.conv3d(x, weight, None, tuple(stride), tuple(padding)), planes, place, planes)


def _put(computed: Tensor, planes: range, x: Tensor, wanted: range) -> None:
    """Copy the wanted planes into x, from a result (N, C, planes, Y, Z) that includes them."""
    wanted = range(max(wanted.start, planes.start), min(wanted.stop, planes.stop))
    place = x.narrow(2, wanted.start, len(wanted))
    made = computed.narrow(2, wanted.start - planes.start, len(wanted))
    if is_gpu(x.device):
        # This runs a kernel. On an H200 ``copy_`` of dense memory reaches a quarter of a kernel's
        # bandwidth in a CUDA graph, and half of it when launched.
        torch.mul(made, 1, out=place)
    else:
        place.copy_(made)


def _convolve_into(
    y: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> None:
    cudnn = torch.backends.cudnn
    if not x.is_cuda or torch.version.cuda is None or not cudnn.enabled:
        y.copy_(F.conv3d(x, weight, None, tuple(stride), tuple(padding)))
        return
    is_repeatable = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    given = (x, weight, padding, stride, _NO_DILATION, 1, cudnn.benchmark, is_repeatable, False)
    torch.ops.aten.cudnn_convolution.out(*given, out=y)


# PyTorch's own operation that writes to given memory has no fake version.
_into = operation(
    "convolve_into",
    "(Tensor(a!) y, Tensor x, Tensor weight, int[] stride, int[] padding) -> ()",
    _convolve_into,
    lambda *_: None,
    ("cpu", "cuda"),
)
