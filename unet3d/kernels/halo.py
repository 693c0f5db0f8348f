"""Maps with the planes of the slabs beside them (:mod:`unet3d.kernels.sharding`)."""

from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.padding import empty_map, has_room, with_padding
from unet3d.kernels.sharding import Halo, Shard, current_shard
from unet3d.torch_private import is_held_elsewhere


def with_halo(x: Tensor) -> Tensor:
    """Return a copy of a slab (N, C, X, Y, Z) with its halo, (N, C, X + 2, Y, Z), or a whole map.

    It may be differentiated.
    """
    shard = current_shard()
    if shard is None:
        return x
    extended: Tensor = _WithHalo.apply(x, shard)  # type: ignore[no-untyped-call]
    return extended


def own_planes(x: Tensor) -> Tensor:
    """Return a view of the own planes of a slab with its halo, or the map where it is whole."""
    return x if current_shard() is None else inner(x)


def inner(x: Tensor) -> Tensor:
    """Return a view of all planes but the first and the last."""
    return x.narrow(2, 1, x.shape[2] - 2)


def fill_halo(x: Tensor, shard: Shard, pads: bool = False) -> Halo:
    """Write the halo of a map with room for it, channels-last, and return it.

    A map that is stored with zeros around Z gets those of its halo too. They are not exchanged:
    another slab, on another kind of GPU, may have none.
    """
    memory = _memory(x)
    halo = shard.exchange(memory[:, 1], memory[:, -2])
    put_halo(x, halo)
    if pads:
        around = with_padding(x).permute(0, 2, 3, 4, 1)
        around[:, :: around.shape[1] - 1, :, :: around.shape[3] - 1].zero_()
    return halo


def put_halo(x: Tensor, halo: Halo) -> None:
    """Write the halo that :func:`fill_halo` returned, but for zeros around Z."""
    memory = _memory(x)
    for at, plane in zip((0, -1), halo, strict=True):
        if plane is None:
            memory[:, at].zero_()
        else:
            memory[:, at].copy_(plane)


def planes_beside(x: Tensor, shard: Shard) -> Halo:
    """Return the planes of the slabs beside a map, (N, C, 1, Y, Z), stored as it is."""
    memory = _memory(x)
    return tuple(  # type: ignore[return-value]
        None if plane is None else _stored_like(x, plane.permute(0, 3, 1, 2).unsqueeze(2))
        for plane in shard.exchange(memory[:, 0], memory[:, -1])
    )


def _stored_like(x: Tensor, plane: Tensor) -> Tensor:
    return empty_map(plane, pads=True).copy_(plane) if has_room(x) else plane


def gradient_of_own(gradient: Tensor, shard: Shard) -> Tensor:
    """Return the gradient of a slab's own planes, with what the neighbours' results add to it.

    It is a view of the gradient of the map with its halo, (N, C, X + 2, Y, Z), which is overwritten
    where nobody else holds it: autograd may hand one tensor to several inputs of an operation.
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
        fill_halo(extended, shard)
        return extended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient_of_own(gradient, ctx.shard), None


def _memory(x: Tensor) -> Tensor:
    """View a channels-last map as (N, X, Y, Z, C)."""
    return x.permute(0, 2, 3, 4, 1)
