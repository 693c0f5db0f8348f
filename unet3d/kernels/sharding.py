"""Feature maps that are slabs of a volume along X, and the messages between slabs.

Inside :func:`sharded` a map is this device's slab. Between the units of a network it has one plane
more on each side, its halo: the planes of the slabs beside it, or zeros where the volume ends. So a
convolution pads nothing along X and sends nothing. In backward the gradient of a halo is sent to
the neighbours, which add it to the gradient of their own planes.

Gradients follow the convention of ``DistributedDataParallel``: the mean over the devices is the
gradient. So each device computes its slab's contribution to the derivative of the sum of all
devices' losses. Every device computes the loss of the whole volume, so the sum counts it once per
device.

A message must never depend on the size of a device's own slab: another device would wait forever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from unet3d.kernels.maps import Halo, empty_map, has_room
from unet3d.torch_private import is_held_elsewhere


class Shard(Protocol):
    """A device's slab of a volume, with messages to the other slabs.

    Every method that sends is called by all devices.
    """

    index: int
    """This slab's number, from 0 along X."""
    count: int
    """Number of slabs."""

    def of_volume(self, number: int) -> int:
        """Scale this slab's number of planes or voxels to the whole volume."""
        ...

    def of_largest(self, number: int) -> int:
        """Scale this slab's number of planes or voxels to the largest slab."""
        ...

    def exchange(self, first: Tensor, last: Tensor) -> Halo:
        """Give planes (N, Y, Z, C) to the neighbours before and behind, and return theirs."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all slabs in order, (count, *shape); all give the same shape."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all slabs; all give the same shape."""
        ...


_current: ContextVar[Shard | None] = ContextVar("shard", default=None)


def current_shard() -> Shard | None:
    """Return the current slab, or None if maps are whole."""
    return _current.get()


@contextmanager
def sharded(shard: Shard | None) -> Iterator[None]:
    """Treat maps in the context as this slab, or with None as whole volumes."""
    token = _current.set(shard)
    try:
        yield
    finally:
        _current.reset(token)


def x_padding() -> int:
    """Return how many planes of zeros a 3x3x3 convolution pads at each end of X.

    It pads 1 for a whole volume, and 0 for a slab, which includes its halo.
    """
    return int(current_shard() is None)


def number_of_largest(number: int) -> int:
    """Scale a slab's number of voxels or elements to the largest slab; unchanged without slabs."""
    shard = current_shard()
    return number if shard is None else shard.of_largest(number)


def sum_of_losses(values: Tensor) -> Tensor:
    """Return sums over the volume from a slab's sums, or a whole map's; differentiable.

    Every device computes the same loss from the sums, and gets the same gradient of them. The
    gradient of the sum of all devices' losses is this gradient, times the number of devices.
    """
    shard = current_shard()
    if shard is None:
        return values
    total: Tensor = _Sum.apply(values, shard, True)  # type: ignore[no-untyped-call]
    return total


def sum_over_shards(values: Tensor, shard: Shard) -> Tensor:
    """Return the sums over all slabs of values that each device computes; differentiable."""
    total: Tensor = _Sum.apply(values, shard, False)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """A sum over slabs; each device gets the sum's whole gradient, or only a part of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: Shard, all_have_gradient: bool) -> Tensor:
        ctx.shard, ctx.all_have_gradient = shard, all_have_gradient
        return shard.sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shard: Shard = ctx.shard
        total = gradient * shard.count if ctx.all_have_gradient else shard.sum(gradient)
        return total, None, None


def with_halo(x: Tensor) -> Tensor:
    """Return a copy of a slab (N, C, X, Y, Z) with its halo, (N, C, X + 2, Y, Z).

    A map that is not divided is returned unchanged. Differentiable.
    """
    shard = current_shard()
    if shard is None:
        return x
    extended: Tensor = _WithHalo.apply(x, shard)  # type: ignore[no-untyped-call]
    return extended


def own_planes(x: Tensor) -> Tensor:
    """Return a view of a slab's own planes, without its halo, or a whole map."""
    return x if current_shard() is None else inner(x)


def inner(x: Tensor) -> Tensor:
    """Return a view of all planes but the first and the last."""
    return x.narrow(2, 1, x.shape[2] - 2)


def end_plane(x: Tensor, end: int) -> Tensor:
    """Return the first plane (0) or the last one (-1) of a map, (N, C, 1, Y, Z)."""
    return x.narrow(2, 0 if end == 0 else x.shape[2] - 1, 1)


def planes_beside(x: Tensor, shard: Shard) -> Halo:
    """Return the neighbours' planes beside a slab, (N, C, 1, Y, Z), in the slab's layout."""
    memory = _memory(x)
    return tuple(  # type: ignore[return-value]
        None if plane is None else _stored_like(x, plane.permute(0, 3, 1, 2).unsqueeze(2))
        for plane in shard.exchange(memory[:, 0], memory[:, -1])
    )


def _stored_like(x: Tensor, plane: Tensor) -> Tensor:
    return empty_map(plane, pads=True).copy_(plane) if has_room(x) else plane


def gradient_of_own(gradient: Tensor, shard: Shard) -> Tensor:
    """Return the gradient of a slab's own planes, including the neighbours' contributions.

    It is a view of the given gradient of the map with its halo, (N, C, X + 2, Y, Z). The given
    tensor is overwritten unless it is shared: autograd may pass one tensor to several inputs.
    """
    is_shared = is_held_elsewhere(gradient)
    gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
    if is_shared:
        gradient = gradient.clone()
    memory = _memory(gradient)
    before, behind = shard.exchange(memory[:, 0], memory[:, -1])
    if before is not None:
        memory[:, 1].add_(before)
    if behind is not None:
        memory[:, -2].add_(behind)
    return inner(gradient)


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        extended = empty_map(x, has_halo=True)
        inner(extended).copy_(x)
        for end, plane in zip((0, -1), planes_beside(x, shard), strict=True):
            place = end_plane(extended, end)
            place.zero_() if plane is None else place.copy_(plane)
        return extended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient_of_own(gradient, ctx.shard), None


def _memory(x: Tensor) -> Tensor:
    """View a channels-last map as (N, X, Y, Z, C)."""
    return x.permute(0, 2, 3, 4, 1)
