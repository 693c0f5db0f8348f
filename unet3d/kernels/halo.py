"""Maps with the planes of the slabs beside them (:mod:`unet3d.kernels.sharding`)."""

from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.padding import with_padding
from unet3d.kernels.sharding import Shard, current_shard


def with_halo(x: Tensor) -> Tensor:
    """Return a copy of a map with its halo where it is a slab, else the map; differentiable.

    Args:
        x: (N, C, X, Y, Z), the slab's own planes.

    Returns:
        (N, C, X + 2, Y, Z).
    """
    shard = current_shard()
    if shard is None:
        return x
    extended: Tensor = _WithHalo.apply(x, shard)  # type: ignore[no-untyped-call]
    return extended


def own_planes(x: Tensor) -> Tensor:
    """Return a view of a slab's own planes, or the map where it is whole.

    Args:
        x: (N, C, X + 2, Y, Z), with its halo.
    """
    return x if current_shard() is None else inner(x)


def inner(x: Tensor) -> Tensor:
    """Return a view of all planes but the first and the last."""
    return x.narrow(2, 1, x.shape[2] - 2)


def empty_with_halo(like: Tensor, pads: bool = False) -> Tensor:
    """Return channels-last memory for a map with its halo.

    Args:
        like: (N, C, X, Y, Z), the slab's own planes, of the same type and device.
        pads: Whether there is room for zeros around Z (:mod:`unet3d.kernels.padding`).

    Returns:
        (N, C, X + 2, Y, Z).
    """
    n, c, i, j, k = like.shape
    shape = (n, i + 2, j, k + 2 * pads, c)
    whole = torch.empty(shape, dtype=like.dtype, device=like.device)
    return (whole[:, :, :, 1:-1] if pads else whole).permute(0, 4, 1, 2, 3)


def put_halo(x: Tensor, planes: Tensor, pads: bool = False) -> None:
    """Write the halo of a map.

    Args:
        x: (N, C, X + 2, Y, Z), written.
        planes: (2, N, C, Y, Z), as :meth:`~unet3d.kernels.sharding.Shard.exchange` returns them.
        pads: Whether the map is stored with room for zeros around Z, which are written, too.
    """
    for plane, at in zip(planes, (0, x.shape[2] - 1), strict=True):
        if pads:
            with_padding(x)[:, :, at].zero_()
        x[:, :, at].copy_(plane)


def gradient_of_own(gradient: Tensor, shard: Shard) -> Tensor:
    """Return the gradient of a slab's own planes, with what the neighbours' results add to it.

    Args:
        gradient: (N, C, X + 2, Y, Z), of the map with its halo; overwritten.
        shard: The slab.

    Returns:
        (N, C, X, Y, Z), a view.
    """
    gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
    before, behind = shard.exchange(gradient[:, :, 0], gradient[:, :, -1])
    own = inner(gradient)
    own[:, :, 0].add_(before)
    own[:, :, -1].add_(behind)
    return own


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        extended = empty_with_halo(x)
        inner(extended).copy_(x)
        put_halo(extended, shard.exchange(x[:, :, 0], x[:, :, -1]))
        return extended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient_of_own(gradient, ctx.shard), None
