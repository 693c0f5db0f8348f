"""Convolutions of tensors that are too large for cuDNN, in slabs along X.

Beyond 2^31 - 1 elements of one tensor cuDNN has only slow algorithms, or none. A slab of a
channels-last volume along X is a view, so its input costs no copy; what is computed for it is
copied to its place. A slab also reads the planes beside it that its kernel reaches, and computes a
plane more where that lets it start like a whole volume does; such planes are dropped. Slabs are as
few and as equal as can be, so that cuDNN looks for algorithms once or twice.

Tensors below the limit take PyTorch's own operation, with its own gradient.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ELEMENTS = 2**31 - 1
"""Of one tensor that cuDNN is given."""

_PLAIN = (1, 1, 1)
_NONE = (0, 0, 0)


def convolve(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Convolve, without a bias; may be differentiated.

    Args:
        x: (N, I, X, Y, Z).
        weight: (O, I, kernel); autocast may lower it.
        stride: Along X, Y, Z.
        padding: Planes of zeros on either side of X, Y, Z; less than the kernel.

    Returns:
        (N, O, X', Y', Z').
    """
    if fits(x, weight, stride, padding):
        return F.conv3d(x, weight, None, tuple(stride), tuple(padding))
    x = x.to(lowered(x))
    y: Tensor = _Convolution.apply(x, weight.to(x.dtype), stride, padding)  # type: ignore[no-untyped-call]
    return y


def upsample(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Make each voxel a small block: a transposed convolution whose kernel is its stride.

    Args:
        x: (N, I, X, Y, Z).
        weight: (I, O, *stride); autocast may lower it.
        stride: Voxels of a block along X, Y, Z.

    Returns:
        (N, O, X', Y', Z').
    """
    if max(x.numel(), math.prod(_upsampled_shape(x, weight))) <= MAX_ELEMENTS:
        return F.conv_transpose3d(x, weight, stride=tuple(stride))
    x = x.to(lowered(x))
    y: Tensor = _Upsampling.apply(x, weight.to(x.dtype), stride)  # type: ignore[no-untyped-call]
    return y


def input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the gradient of a convolution's input.

    Args:
        dy: Gradient of the result (N, O, X', Y', Z').
        x: (N, I, X, Y, Z); its values do not matter.
        weight: (O, I, kernel).
        stride: Along X, Y, Z.
        padding: As in :func:`convolve`.
    """
    if max(dy.numel(), x.numel()) <= MAX_ELEMENTS:
        return _gradients(dy, x, weight, stride, padding, [True, False, False])[0]
    dx = _empty(x.shape, dy)
    _fill_input_gradient(dx, dy, weight, stride, padding)
    return dx


def weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the gradient of a convolution's weights; slabs are summed in float32 at least.

    Args:
        dy: Gradient of the result (N, O, X', Y', Z').
        x: (N, I, X, Y, Z).
        weight: (O, I, kernel); its values do not matter.
        stride: Along X, Y, Z.
        padding: As in :func:`convolve`.
    """
    given = (weight, stride, padding)
    if max(dy.numel(), x.numel()) <= MAX_ELEMENTS:
        return _gradients(dy, x, *given, [False, True, False])[1]
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    for dy_one, x_one in zip(_samples(dy), _samples(x), strict=True):
        if max(dy_one.numel(), x_one.numel()) <= MAX_ELEMENTS:
            total += _gradients(dy_one, x_one, *given, [False, True, False])[1]
        else:
            _add_weight_gradients(total, dy_one, x_one, *given)
    return total.to(weight.dtype)


def fits(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Return whether neither a convolution's input nor its result is too large.

    Args:
        x: (N, I, X, Y, Z).
        weight: (O, I, kernel).
        stride: Along X, Y, Z.
        padding: As in :func:`convolve`.
    """
    return max(x.numel(), math.prod(_shape(x, weight, stride, padding))) <= MAX_ELEMENTS


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
    """A convolution in slabs, of which nothing but its arguments is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        y = _empty(_shape(x, weight, stride, padding), x)
        geometry = _Geometry(x.shape[2], y.shape[2], weight.shape[2], stride[0], padding[0])
        slabs = _divided(geometry.of_result, 0, geometry.y, _plane(x), _plane(y))
        for x_one, y_one in zip(_samples(x), _samples(y), strict=True):
            for slab in slabs:
                planes = _planes(x_one, slab.x)
                made = F.conv3d(planes, weight, None, tuple(stride), tuple(padding))
                _put(made, y_one, slab.y, slab.wanted)
                del made  # before the next one
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        given = (dy, x, weight, ctx.stride, ctx.padding)
        dweight = weight_gradient(*given) if ctx.needs_input_grad[1] else None
        dx = input_gradient(*given) if ctx.needs_input_grad[0] else None
        return dx, dweight, None, None


class _Upsampling(torch.autograd.Function):
    """A transposed convolution in slabs; to a convolution, its result is x and its input is y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        y = _empty(_upsampled_shape(x, weight), x)
        geometry = _Geometry(y.shape[2], x.shape[2], weight.shape[2], stride[0], 0)
        slabs = _divided(geometry.of_both, 0, geometry.y, _plane(y), _plane(x))
        for x_one, y_one in zip(_samples(x), _samples(y), strict=True):
            for slab in slabs:
                planes = _planes(x_one, slab.y)
                made = F.conv_transpose3d(planes, weight, stride=tuple(stride))
                _put(made, y_one, slab.x, slab.x)
                del made  # before the next one
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = weight_gradient(x, dy, weight, ctx.stride, _NONE)
        if ctx.needs_input_grad[0]:
            dx = convolve(dy, weight, ctx.stride, _NONE)
        return dx, dweight, None


class _Slab(NamedTuple):
    """The planes that one call takes and makes."""

    x: range
    """Of the convolution's input; those outside the volume are zeros."""
    y: range
    """Of its result."""
    wanted: range
    """The planes for whose sake it is made."""


class _Geometry(NamedTuple):
    """A convolution along X: planes of its input and result, kernel, stride and padding."""

    x: int
    y: int
    kernel: int
    stride: int
    padding: int

    def of_result(self, first: int, stop: int) -> _Slab:
        """Return the slab that computes some planes of the result, padded as the volume is."""
        # At a slab's ends padding is wrong where the volume goes on: the slab starts so early
        # that what is wrong there is not wanted.
        start = max(0, first - -(-self.padding // self.stride))
        end = min(self.x, (stop - 1) * self.stride - self.padding + self.kernel)
        x = range(start * self.stride, end)
        made = (len(x) + 2 * self.padding - self.kernel) // self.stride + 1
        return _Slab(x, range(start, start + made), range(first, stop))

    def of_input(self, first: int, stop: int) -> _Slab:
        """Return the slab that computes the gradient of some planes of the input."""
        reach = self.kernel - 1 - self.padding
        start = min(-((reach - first) // self.stride), first // self.stride, self.y - 1)
        start = max(0, start)
        end = min(self.y, (stop - 1 + self.padding) // self.stride + 1)
        # The most planes of which a convolution makes as many as are given.
        most = (end - start) * self.stride + self.kernel - 2 * self.padding - 1
        x = range(start * self.stride, min(start * self.stride + most, self.x))
        return _Slab(x, range(start, end), range(first, stop))

    def of_both(self, first: int, stop: int) -> _Slab:
        """Return some planes of the result and exactly those that they are made of."""
        start = first * self.stride - self.padding
        end = (stop - 1) * self.stride - self.padding + self.kernel
        planes = range(first, stop)
        return _Slab(range(start, end), planes, planes)


def _fill_input_gradient(
    dx: Tensor, dy: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> None:
    geometry = _Geometry(dx.shape[2], dy.shape[2], weight.shape[2], stride[0], padding[0])
    slabs = _divided(geometry.of_input, 0, geometry.x, _plane(dx), _plane(dy))
    for dx_one, dy_one in zip(_samples(dx), _samples(dy), strict=True):
        for slab in slabs:
            like = _planes(dx_one, slab.x)  # only its shape matters
            given = (_planes(dy_one, slab.y), like, weight, stride, padding)
            _put(_gradients(*given, [True, False, False])[0], dx_one, slab.x, slab.wanted)


def _add_weight_gradients(
    total: Tensor,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
) -> None:
    """Add the gradients of one sample that is too large."""
    geometry = _Geometry(x.shape[2], dy.shape[2], weight.shape[2], stride[0], padding[0])
    # The few planes of the result that depend on padding are slabs by themselves: a padded copy
    # of what they are made of is small, and the others need none.
    first = min(-(-geometry.padding // geometry.stride), geometry.y)
    last = (geometry.x + geometry.padding - geometry.kernel) // geometry.stride + 1
    last = max(first, min(last, geometry.y))
    slabs = _divided(geometry.of_both, first, last, _plane(x), _plane(dy))
    ends = ((0, first), (last, geometry.y))
    slabs += [geometry.of_both(start, stop) for start, stop in ends if start < stop]
    for slab in slabs:
        planes = _planes(x, range(max(slab.x.start, 0), min(slab.x.stop, geometry.x)))
        missing = (max(-slab.x.start, 0), max(slab.x.stop - geometry.x, 0))
        if any(missing):
            planes = F.pad(planes, (0, 0, 0, 0, *missing))
        given = (_planes(dy, slab.y), planes, weight, stride, (0, *padding[1:]))
        total += _gradients(*given, [False, True, False])[1]


def _divided(
    slab: Callable[[int, int], _Slab], first: int, last: int, x_plane: int, y_plane: int
) -> list[_Slab]:
    """Return the fewest equal slabs that are small enough, or one for each plane.

    Args:
        slab: Makes one, for the planes from a first one to before a last one.
        first: The first plane.
        last: The one behind the last.
        x_plane: Elements of a plane of the convolution's input.
        y_plane: Elements of a plane of its result.
    """
    num_planes = last - first
    slabs: list[_Slab] = []
    for num_slabs in range(1, num_planes + 1):
        bounds = [first + index * num_planes // num_slabs for index in range(num_slabs + 1)]
        slabs = [slab(start, stop) for start, stop in itertools.pairwise(bounds)]
        if all(max(len(one.x) * x_plane, len(one.y) * y_plane) <= MAX_ELEMENTS for one in slabs):
            break
    return slabs


def _put(computed: Tensor, tensor: Tensor, planes: range, wanted: range) -> None:
    """Copy the wanted planes of the computed ones to their place."""
    offset = wanted.start - planes.start
    place = tensor.narrow(2, wanted.start, len(wanted))
    place.copy_(computed.narrow(2, offset, len(wanted)))


def _samples(x: Tensor) -> list[Tensor]:
    """Return views of the samples."""
    return [x.narrow(0, index, 1) for index in range(x.shape[0])]


def _planes(tensor: Tensor, planes: range) -> Tensor:
    """Return some planes of one sample; a view where it is channels-last."""
    some = tensor.narrow(2, planes.start, len(planes))
    return some.contiguous(memory_format=torch.channels_last_3d)


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, _PLAIN, False, _NONE, 1, wanted
    )
    return gradients


def _shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of a convolution's result."""
    along = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    space = [(size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in along]
    return x.shape[0], weight.shape[0], *space


def _upsampled_shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    along = zip(x.shape[2:], weight.shape[2:], strict=True)
    return x.shape[0], weight.shape[1], *(size * step for size, step in along)


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    layout = torch.channels_last_3d
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=layout)


def _plane(x: Tensor) -> int:
    """Return the elements of one plane of one sample."""
    return x.shape[1] * x.shape[3] * x.shape[4]
