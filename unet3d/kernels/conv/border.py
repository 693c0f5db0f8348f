"""The effect of a bias before a convolution on its result, up to a constant.

A convolution is linear, so the bias b of a map adds the convolution of a constant map::

    conv(up(x) + b) = conv(up(x)) + F        F = conv of a map that is b everywhere

F depends on the place only where the kernel reaches zeros around the volume. Along an axis with
three taps, the kernel does so at the first and the last voxel; all voxels between have the same sum
of taps. If the kernel or the volume has one voxel along an axis, all voxels are alike. So F has at
most 3 x 3 x 3 values per channel, its classes: the convolution of a constant map of three voxels
per axis.

Inside the volume F is constant, and an instance normalisation removes constants. So only the
difference of F from that constant is added, at the border: two planes along each axis. A voxel in
planes of several axes is changed once, with the first axis. No other voxels are read or written.

A slab of a volume (:mod:`unet3d.kernels.sharding`) has a border along X only where the volume ends.
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
    """Add to a convolution's result the effect of a bias (C,) of its input, up to a constant.

    The stride is 1. The result y (N, O, X, Y, Z), a slab's own planes, is overwritten and must have
    no other reader. Differentiable.
    """
    axes = _axes(y, weight)
    classes = _classes(weight, bias, axes)
    places, values = list[_Place](), list[Tensor]()
    for number, axis in enumerate(axes):
        # Voxels that are also at an end of an earlier axis are left out.
        earlier, (voxels, kinds) = axes[:number], axis.ends
        face = classes[(*(one.middle for one in earlier), kinds)]
        for dim in range(number + 1, 3):
            face = axes[dim].spread(face, dim)
        places.append((*(one.inside for one in earlier), voxels))
        values.append(face)
    made: Tensor = _Border.apply(y, places, *values)  # type: ignore[no-untyped-call]
    return with_marks(made, y)


class _Axis(NamedTuple):
    """Classes of a map's voxels along one axis: in a class, the same taps reach into the volume."""

    size: int
    """Voxels of the map along the axis."""
    num_classes: int
    """3: the volume's first voxel, the voxels inside, and its last voxel; 1: all voxels are
    alike."""
    first: bool
    """Whether the map has the volume's first voxel, and there are 3 classes."""
    last: bool
    """Whether the map has the volume's last voxel, and there are 3 classes."""

    @property
    def inside(self) -> slice:
        """The voxels of the map that are neither first nor last."""
        return slice(int(self.first), self.size - int(self.last))

    @property
    def middle(self) -> slice:
        """The class of the voxels inside."""
        return slice(self.num_classes // 2, self.num_classes // 2 + 1)

    @property
    def ends(self) -> tuple[slice, slice]:
        """The volume's first and last voxel, as far as the map has them, and their classes."""
        if self.first and self.last:
            return slice(0, self.size, self.size - 1), slice(0, 3, 2)
        if self.first:
            return slice(0, 1), slice(0, 1)
        return (slice(self.size - 1, self.size), slice(2, 3)) if self.last else (_NONE, _NONE)

    def spread(self, values: Tensor, dim: int) -> Tensor:
        """Return values per voxel along the axis from values per class of voxels."""
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
    """Return each class's difference from the inside, (X, Y, Z, O); differentiable."""
    constant = bias.view(1, -1, 1, 1, 1).expand(-1, -1, *(axis.num_classes for axis in axes))
    i, j, k = (taps // 2 for taps in weight.shape[2:])
    kind = weight.device.type
    # The meta device, which only computes shapes, has no autocast.
    is_lowered = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if is_lowered else nullcontext():
        sums = F.conv3d(constant, weight, padding=(i, j, k)).squeeze(0).permute(1, 2, 3, 0)
    return sums - sums[tuple(axis.middle for axis in axes)]


class _Border(torch.autograd.Function):
    """Adds values at places of its input, which no backward may read; keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, places: list[_Place], *values: Tensor) -> Tensor:
        ctx.places, ctx.like = places, [(face.shape, face.dtype) for face in values]
        voxels = y.permute(0, 2, 3, 4, 1)
        for place, face in zip(places, values, strict=True):
            voxels[(_ALL, *place)].add_(face)
        return y.detach()  # y itself would become a view, whose strides may differ

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
