"""Maps that are slabs of a volume along X, and what their operations tell the other slabs' holders.

Inside :func:`sharded` a map is this device's slab. Between the units of a network it has one plane
more on each side, its halo: the planes of the slabs beside it, or zeros where the volume ends. So a
convolution pads nothing along X and sends nothing; its gradient of the halo's planes belongs to the
neighbours, who add it to their own.

Gradients follow the convention of ``DistributedDataParallel``: what every device has in the end is
the derivative of the sum of all devices' losses, and the mean over the devices is the gradient.
Every device computes the loss of the whole volume, so that sum counts it once for each of them.

A message must never depend on the size of a device's own slab: another one would wait for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

Halo = tuple[Tensor | None, Tensor | None]
"""Planes from the slab before and from the one behind; None where the volume ends."""


class Shard(Protocol):
    """A device's slab of a volume, and its way to the others; all of them call each method."""

    index: int
    """Its number, from 0 along X."""
    count: int
    """Number of slabs."""

    def of_volume(self, number: int) -> int:
        """Return how many there are in the whole volume of what this slab has so many of.

        Args:
            number: Of planes or voxels, at any divided level.
        """
        ...

    def of_largest(self, number: int) -> int:
        """Return how many there are in the largest slab of what this one has so many of."""
        ...

    def exchange(self, first: Tensor, last: Tensor) -> Halo:
        """Give planes to the neighbours and return theirs.

        Args:
            first: (N, Y, Z, C), for the slab before this one.
            last: (N, Y, Z, C), for the one behind.

        Returns:
            (N, Y, Z, C) each.
        """
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all slabs, in their order.

        Args:
            values: A tensor of the same shape everywhere.

        Returns:
            (count, *shape).
        """
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all slabs.

        Args:
            values: A tensor of the same shape everywhere.
        """
        ...


_current: ContextVar[Shard | None] = ContextVar("shard", default=None)


def current_shard() -> Shard | None:
    """Return the slab that maps are, or None where they are whole."""
    return _current.get()


@contextmanager
def sharded(shard: Shard | None) -> Iterator[None]:
    """Take maps as slabs in the context.

    Args:
        shard: The slab; None: maps are whole.
    """
    token = _current.set(shard)
    try:
        yield
    finally:
        _current.reset(token)


def x_padding() -> tuple[int, int]:
    """Return the planes of zeros before and behind X that keep a convolution's own planes."""
    return (1, 1) if current_shard() is None else (0, 0)


def voxels_of_volume(number: int, shard: Shard | None) -> int:
    """Return the voxels of a volume.

    Args:
        number: Voxels of a map.
        shard: The slab that it is; None: it is whole.
    """
    return number if shard is None else shard.of_volume(number)


def number_of_largest(number: int, shard: Shard | None) -> int:
    """Return how many the largest slab has of what a map has so many of.

    Args:
        number: Of voxels or elements of a map.
        shard: The slab that it is; None: it is whole.
    """
    return number if shard is None else shard.of_largest(number)


def sum_of_losses(values: Tensor) -> Tensor:
    """Return sums over the volume from those over this slab; may be differentiated.

    Every device computes the same from them, so what comes back is the same everywhere, and the
    derivative of the sum of all losses is so many times it.

    Args:
        values: Sums over the slab, or over a map that is whole.
    """
    shard = current_shard()
    if shard is None:
        return values
    total: Tensor = _SumOfLosses.apply(values, shard)  # type: ignore[no-untyped-call]
    return total


def sum_over_shards(values: Tensor, shard: Shard) -> Tensor:
    """Return the sums over all slabs, of which each device makes its own; may be differentiated.

    Args:
        values: Sums over this slab.
        shard: The slab.
    """
    total: Tensor = _Sum.apply(values, shard)  # type: ignore[no-untyped-call]
    return total


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: Shard) -> Tensor:
        ctx.count = shard.count
        return shard.sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.count, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard.sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum(gradient), None
