"""Planes along X that a convolution reads and makes, and the calls that convolve them.

Planes are counted from the volume's first; planes before it and behind the last are zeros. A
volume can be convolved in slabs: each reads its own planes and the neighbouring planes that the
kernel reaches.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Padding = tuple[int, int, int]
"""Planes of zeros on either side of X, Y, Z."""


class Axis(NamedTuple):
    """A convolution along one axis."""

    size: int
    """Planes of the input."""
    kernel: int
    """Planes of the kernel."""
    stride: int
    """Stride, in planes of the input."""
    padding: int
    """Planes of zeros before the first and behind the last."""

    @property
    def result(self) -> int:
        """Number of planes of the result."""
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def read_by(self, planes: range) -> range:
        """Return the input planes that planes of the result read, including zeros."""
        start = planes.start * self.stride - self.padding
        return range(start, (planes.stop - 1) * self.stride - self.padding + self.kernel)

    def readers_of(self, planes: range) -> range:
        """Return the planes of the result that read at least one of these planes of the input."""
        start = -((self.kernel - 1 - self.padding - planes.start) // self.stride)
        stop = (planes.stop - 1 + self.padding) // self.stride + 1
        return range(max(0, start), min(self.result, stop))

    def inside(self) -> range:
        """Return the planes of the result that read no zeros."""
        first = min(-(-self.padding // self.stride), self.result)
        last = (self.size + self.padding - self.kernel) // self.stride + 1
        return range(first, max(first, min(last, self.result)))


def axis_of(size: int, weight: Tensor, stride: Sequence[int], padding: Padding) -> Axis:
    """Return the convolution along X of an input of ``size`` planes."""
    return Axis(size, weight.shape[2], stride[0], padding[0])


def divide(planes: range, fits: Callable[[range], bool]) -> list[range]:
    """Divide planes into the fewest nearly equal runs that all fit, or else into single planes."""
    runs: list[range] = []
    for number in range(1, len(planes) + 1):
        bounds = [planes.start + i * len(planes) // number for i in range(number + 1)]
        runs = [range(start, stop) for start, stop in itertools.pairwise(bounds)]
        if all(map(fits, runs)):
            break
    return runs


def result_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
) -> tuple[int, ...]:
    """Return the shape (N, O, X', Y', Z') of a convolution's result."""
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    return x.shape[0], weight.shape[0], *(Axis(*axis).result for axis in axes)


def transposed_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Padding
) -> tuple[int, ...]:
    """Return the shape of a transposed convolution's result, with a kernel (I, O, kernel).

    The padding is cut off the result.
    """
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    sizes = [(size - 1) * step + kernel - 2 * pad for size, kernel, step, pad in axes]
    return x.shape[0], weight.shape[1], *sizes


def samples(x: Tensor) -> list[Tensor]:
    """Return views (1, C, X, Y, Z) of the samples."""
    return [x.narrow(0, index, 1) for index in range(x.shape[0])]


def some_planes(x: Tensor, planes: range) -> Tensor:
    """Return some planes of a map: a view, or a copy with zeros for the planes outside the map."""
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

    An unwanted gradient is None. The weights of a transposed convolution are (I, O, kernel).
    """
    how = (stride, padding, (1, 1, 1), transposed, (0, 0, 0), 1)  # no dilation, nothing added
    given = (dy, x, weight, None, *how, [*wanted, False])
    dx, dweight, _ = torch.ops.aten.convolution_backward(*given)
    return dx, dweight
