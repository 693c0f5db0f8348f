"""What a bias before a convolution adds to its result, but for a constant.

A convolution is linear, so that of a map with a bias b is that of the map, and that of the constant
b beside it::

    conv(up(x) + b) = conv(up(x)) + F        F = conv of a map that is b everywhere

F depends on the place only where the kernel reaches zeros around the volume. Along an axis on which
the kernel has three voxels, those are the first and the last voxel, and all between them have the
same sum of taps; along one on which it has one voxel, or the volume has, all voxels are alike. So F
has at most 3 x 3 x 3 values a channel, its classes: they are the convolution of a map of three
voxels an axis.

An instance normalisation removes the constant that F is inside. So F is not added to the volume,
but its difference to that constant to the border: two planes along each axis, of which the rows
that are shared belong to the first. Nothing else is read or written.

A slab of a volume (:mod:`unet3d.kernels.sharding`) has a face along X only where the volume ends.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.maps import with_marks
from unet3d.kernels.sharding import current_shard

_ALL = slice(None)
_NONE = slice(0, 0)
_Place = tuple[slice, ...]


def add_border(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Add what a bias (C,) before a convolution adds to its result, but for a constant.

    The stride is 1. The result y (N, O, X, Y, Z), of a slab its own planes, is overwritten: nobody
    else reads it. It may be differentiated.
    """
    axes = _axes(y, weight)
    classes = _classes(weight, bias, axes)
    places, values = list[_Place](), list[Tensor]()
    for number, axis in enumerate(axes):
        # What is at the end of an earlier axis too is left out.
        earlier, (voxels, kinds) = axes[:number], axis.ends
        face = classes[(*(one.middle for one in earlier), kinds)]
        for dim in range(number + 1, 3):
            face = axes[dim].spread(face, dim)
        places.append((*(one.inside for one in earlier), voxels))
        values.append(face)
    made: Tensor = _Border.apply(y, places, *values)  # type: ignore[no-untyped-call]
    return with_marks(made, y)


class _Axis(NamedTuple):
    """Which voxels of a map along one axis differ in what their kernel reaches."""

    size: int
    """Voxels of the map."""
    num_classes: int
    """3: the first, those inside and the last of the volume; 1: all are alike."""
    first: bool
    """Whether the map has the volume's first voxel, and that is a class of its own."""
    last: bool
    """The same of the last one."""

    @property
    def inside(self) -> slice:
        """The voxels of the map that are neither."""
        return slice(int(self.first), self.size - int(self.last))

    @property
    def middle(self) -> slice:
        """Their class."""
        return slice(self.num_classes // 2, self.num_classes // 2 + 1)

    @property
    def ends(self) -> tuple[slice, slice]:
        """The voxels that are the first or the last, and their classes; of neither none."""
        if self.first and self.last:
            return slice(0, self.size, self.size - 1), slice(0, 3, 2)
        if self.first:
            return slice(0, 1), slice(0, 1)
        return (slice(self.size - 1, self.size), slice(2, 3)) if self.last else (_NONE, _NONE)

    def spread(self, values: Tensor, dim: int) -> Tensor:
        """Return values of voxels from those of classes, or of one class for all."""
        if self.num_classes == 1:
            return values
        first, middle, last = (values.narrow(dim, number, 1) for number in range(3))
        shape = list(values.shape)
        shape[dim] = self.inside.stop - self.inside.start
        parts = [*[first] * self.first, middle.expand(shape), *[last] * self.last]
        return torch.cat(parts, dim)


def _axes(y: Tensor, weight: Tensor) -> tuple[_Axis, ...]:
    shard = current_shard()
    axes = []
    for number, (size, taps) in enumerate(zip(y.shape[2:], weight.shape[2:], strict=True)):
        begins = ends = True
        if number == 0 and shard is not None and shard.count > 1:  # then there are several planes
            begins, ends = shard.index == 0, shard.index == shard.count - 1
        elif size == 1:
            taps = 1
        differ = taps > 1
        axes.append(_Axis(size, 3 if differ else 1, differ and begins, differ and ends))
    return tuple(axes)


def _classes(weight: Tensor, bias: Tensor, axes: tuple[_Axis, ...]) -> Tensor:
    """Return the difference of each class to the inside, (X, Y, Z, O); may be differentiated."""
    constant = bias.view(1, -1, 1, 1, 1).expand(-1, -1, *(axis.num_classes for axis in axes))
    i, j, k = (taps // 2 for taps in weight.shape[2:])
    kind = weight.device.type
    # Shapes are followed on the meta device, for which there is no autocast.
    is_lowered = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if is_lowered else nullcontext():
        sums = F.conv3d(constant, weight, padding=(i, j, k)).squeeze(0).permute(1, 2, 3, 0)
    return sums - sums[tuple(axis.middle for axis in axes)]


class _Border(torch.autograd.Function):
    """Adds values to places of what it is given, which no backward reads, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, places: list[_Place], *values: Tensor) -> Tensor:
        ctx.places, ctx.like = places, [(face.shape, face.dtype) for face in values]
        voxels = y.permute(0, 2, 3, 4, 1)
        for place, face in zip(places, values, strict=True):
            voxels[(_ALL, *place)].add_(face)
        return y.detach()  # as itself it would be a view, whose strides may be others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if not any(ctx.needs_input_grad[2:]):
            return dy, None, *(None for _ in ctx.places)
        voxels = dy.permute(0, 2, 3, 4, 1)
        gradients = []
        for place, (shape, dtype) in zip(ctx.places, ctx.like, strict=True):
            exact = torch.promote_types(dtype, torch.float32)
            sums = voxels[(_ALL, *place)].sum(0, dtype=exact)
            gradients.append(sums.sum_to_size(shape).to(dtype))
        return dy, None, *gradients
