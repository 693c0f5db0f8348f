"""Small float32 convolutions on a CPU, without PyTorch's slow path.

PyTorch gives a float32 convolution to oneDNN only if N > 1, or N * C * X * Y > 20,480, or the
kernel is larger than 3 along Y and Z, a rule for 2-D images; 1x1x1 kernels also need several
threads. It unfolds all others in memory (``slow_conv3d``), forward and backward: from 4 to 4
channels at 60^3 that takes 39.9 ms instead of 2.4. But one sample can be cut into two slabs along
X, which are a batch of two with the same values and gradients. In channels-last memory both results
together are the result for the sample, so only the input, whose slabs overlap, is copied. A 1x1x1
convolution is done as a matrix product.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.conv.planes import (
    Axis,
    Padding,
    axis_of,
    gradients,
    samples,
    some_planes,
)
from unet3d.kernels.maps import empty_channels_last, is_channels_last

SLOW_ELEMENTS = 20480
"""Largest N * C * X * Y at which PyTorch is slow."""
SLOW_SAMPLES = 16
"""With one thread and fewer samples than this, a 1x1x1 convolution is slow at any size."""

_CPU = torch.device("cpu")
_POINT = (1, 1, 1)


def is_slow(x: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    """Return whether PyTorch would unfold the input, and this module can avoid it.

    The input already has the type of the convolution.
    """
    if x.dtype != torch.float32 or x.device != _CPU:
        return False
    if not (torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    n, c, i, j, _ = x.shape
    is_small = n == 1 and c * i * j <= SLOW_ELEMENTS and min(weight.shape[3:]) <= 3
    if _is_point(weight, stride):
        return is_small or (n < SLOW_SAMPLES and torch.get_num_threads() == 1)
    return is_small


def convolve(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding) -> Tensor:
    """Convolve (1, I, X, Y, Z) with (O, I, kernel); N may be larger if the kernel is 1x1x1."""
    if _is_point(weight, stride):
        return _product(weight.flatten(1), x)
    axis = axis_of(x.shape[2], weight, stride, padding)
    both = torch.cat([some_planes(x, planes) for planes in _read(axis)])
    y = F.conv3d(both, weight, None, tuple(stride), (0, *padding[1:]))
    return _joined(y, axis.result)


def convolve_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Padding,
    *,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weight, or None where one is not wanted."""
    dx = dweight = None
    if _is_point(weight, stride):
        if wanted[0]:
            dx = _product(weight.flatten(1).t(), dy)
        if wanted[1]:
            products = torch.bmm(dy.flatten(2), x.flatten(2).transpose(1, 2))
            # The gradient has the strides of the weight, like other gradients.
            dweight = torch.empty_like(weight).copy_(products.sum(0).view(weight.shape))
        return dx, dweight
    axis = axis_of(x.shape[2], weight, stride, padding)
    both = torch.cat([some_planes(x, planes) for planes in _read(axis)])
    given = (_halves(dy), both, weight, stride, (0, *padding[1:]))
    dboth, dweight = gradients(*given, wanted=wanted)
    if wanted[0]:
        dx = torch.zeros_like(x)
        for part, planes in zip(samples(dboth), _read(axis), strict=True):
            first, stop = max(planes.start, 0), min(planes.stop, axis.size)
            if first < stop:
                dx[:, :, first:stop] += part.narrow(2, first - planes.start, stop - first)
    return dx, dweight if wanted[1] else None


def upsample(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Convolve (1, I, X, Y, Z) transposed with (I, O, *stride)."""
    y = F.conv_transpose3d(_halves(x), weight, stride=tuple(stride))
    return _joined(y, x.shape[2] * stride[0])


def upsample_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], *, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weight, or None where one is not wanted."""
    given = (_halves(dy, stride[0]), _halves(x), weight, stride, (0, 0, 0))
    dboth, dweight = gradients(*given, wanted=wanted, transposed=True)
    dx = _joined(dboth, x.shape[2]) if wanted[0] else None
    return dx, dweight if wanted[1] else None


def _is_point(weight: Tensor, stride: Sequence[int]) -> bool:
    return tuple(weight.shape[2:]) == _POINT and tuple(stride) == _POINT


def _read(axis: Axis) -> tuple[range, range]:
    """Return the planes that each half of the result reads; an odd result gets one plane more."""
    half = (axis.result + 1) // 2
    return axis.read_by(range(half)), axis.read_by(range(half, 2 * half))


def _halves(x: Tensor, step: int = 1) -> Tensor:
    """Return (1, C, X, Y, Z) as a batch of two; zeros are appended if X / step is odd."""
    half = (x.shape[2] // step + 1) // 2 * step
    whole = some_planes(x, range(2 * half))
    return whole.view(whole.shape[1], 2, half, *whole.shape[3:]).transpose(0, 1)


def _joined(both: Tensor, planes: int) -> Tensor:
    """Return the first planes of one map from its halves; the inverse of :func:`_halves`."""
    whole = both.transpose(0, 1).flatten(1, 2).narrow(1, 0, planes)
    # PyTorch's memory formats expect the stride to a second sample, though there is only one.
    return whole.as_strided((1, *whole.shape), (both.numel(), *whole.stride()))


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """Multiply the channels of each voxel of (N, I, X, Y, Z) with (O, I), in x's memory layout."""
    n, _, *space = x.shape
    if is_channels_last(x):
        y = empty_channels_last((n, len(matrix), *space), x)
        voxels, made = (value.permute(0, 2, 3, 4, 1).flatten(0, 3) for value in (x, y))
        torch.mm(voxels, matrix.t(), out=made)
        return y
    y = x.new_empty((n, len(matrix), *space))
    torch.bmm(matrix.expand(n, -1, -1), x.flatten(2), out=y.flatten(2))
    return y
