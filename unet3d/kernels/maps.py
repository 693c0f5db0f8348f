"""Feature maps in memory, and marks by which the operation that made a map informs its reader.

A mark belongs to one tensor: a tensor made from it, even by ``detach``, has none. Marks of moments
and sums become invalid if values change in place, as by hooks or when autograd adds up gradients.

Maps may be stored with one voxel of zeros at each end of Z.

Channels-last memory of such a map can be read as voxels of twice the channels, which begin one
voxel before the first. A 3x3x3 convolution of two neighbours along Z then reads two such voxels
instead of three with half of the weights zero (:mod:`unet3d.kernels.conv.folded`). Kernels that
write a map write the zeros, too. The tensor shows only its own voxels, so other code reads it like
any map. The result of a convolution of such pairs has room for the zeros, but other values there.

Maps are (N, C, X, Y, Z) throughout.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.memory.fake_devices import is_gpu
from unet3d.torch_private import version

MAX_CHANNELS = 32
"""Most channels of a map whose neighbours along Z are computed as one voxel, in pairs."""
MIN_ELEMENTS = 2**23
"""Smaller maps are not folded: launches that fold the weights would cost as much as folding
saves."""

_PADDED = "_has_zeros_around_z"
_FOLDED = "_was_folded"
_DEFERRED = "_deferred"
MOMENTS = "_moments"
"""Name of the mark that holds the moments of a map, for the normalisation that reads it."""
SUMS = "_sums"
"""Name of the mark on a normalised map's gradient that holds the sums for the normalisation's
backward."""


Halo = tuple[Tensor | None, Tensor | None]
"""The plane of the slab before and of the slab behind; None where the volume ends."""


class Deferred(NamedTuple):
    """A normalisation with LeakyReLU that is left to the reader of a map."""

    affine: tuple[Tensor, Tensor, Tensor, Tensor]
    """Weight, bias, mean and 1 / deviation, as the stages of a normalisation take them."""
    slope: float
    """Negative slope of LeakyReLU."""
    halo: Halo = (None, None)
    """Planes of other slabs beside the map, before normalisation, in the map's layout."""


def can_fold(x: Tensor, channels: int) -> bool:
    """Return whether two neighbours along Z should be computed as one voxel.

    ``channels`` is the smaller number of a convolution's inputs and outputs.
    """
    return (
        is_gpu(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() >= MIN_ELEMENTS
        and 8 <= channels <= MAX_CHANNELS
        and x.shape[-1] % 2 == 0
        and is_laid_out(x)
    )


def empty_map(like: Tensor, pads: bool = False, has_halo: bool = False) -> Tensor:
    """Return channels-last memory for a map like another.

    With ``pads`` there is room for zeros around Z, with a halo the map is (N, C, X + 2, Y, Z);
    neither is written yet.
    """
    if not (pads or has_halo):
        return torch.empty_like(like, memory_format=torch.channels_last_3d)
    n, c, i, j, k = like.shape
    shape = (n, i + 2 * has_halo, j, k + 2 * pads, c)
    whole = torch.empty(shape, dtype=like.dtype, device=like.device)
    return (whole[:, :, :, 1:-1] if pads else whole).permute(0, 4, 1, 2, 3)


def empty_channels_last(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return channels-last memory of a tensor's type and device."""
    layout = torch.channels_last_3d
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=layout)


def empty_result(x: Tensor, channels: int, planes: int) -> Tensor:
    """Return channels-last memory for a map like x with other numbers of channels and planes."""
    return empty_channels_last((len(x), channels, planes, *x.shape[3:]), x)


def mark_padded(x: Tensor) -> Tensor:
    """Mark a tensor from :func:`empty_map` after its zeros are written, and return it."""
    setattr(x, _PADDED, True)
    return x


def is_padded(x: Tensor) -> bool:
    """Return whether a map is stored with zeros around Z."""
    return getattr(x, _PADDED, False)


def has_room(x: Tensor) -> bool:
    """Return whether a map is stored with room, zeros or not, for a voxel at each end of Z."""
    n, c, i, j, k = x.shape
    line = c * (k + 2)
    return (
        k > 1
        and x.stride()[1:] == (1, j * line, line, c)
        and (n == 1 or x.stride(0) == i * j * line)
        and int(x.storage_offset()) % line == c
    )


def with_padding(x: Tensor) -> Tensor:
    """Return a view (N, C, X, Y, Z + 2) of a padded map with its zeros, channels-last."""
    n, c, i, j, k = x.shape
    return x.as_strided((n, c, i, j, k + 2), x.stride(), x.storage_offset() - c)


def detached(x: Tensor) -> Tensor:
    """Return a tensor of the same memory, without a graph but with the marks."""
    return with_marks(x.detach(), x)


def with_marks(x: Tensor, other: Tensor) -> Tensor:
    """Give a tensor the marks of another one with the same memory, and return it."""
    for mark in (_PADDED, _FOLDED):
        if hasattr(other, mark):
            setattr(x, mark, getattr(other, mark))
    return x


def mark_folded(x: Tensor) -> Tensor:
    """Mark a result of a folded convolution, so that its gradient is padded, and return it."""
    setattr(x, _FOLDED, True)
    return x


def was_folded(x: Tensor) -> bool:
    """Return whether a folded convolution made a map."""
    return getattr(x, _FOLDED, False)


def mark(x: Tensor, name: str, numbers: Tensor) -> Tensor:
    """Attach numbers that were computed from a tensor's values to the tensor, and return it."""
    setattr(x, name, (numbers, version(x)))
    return x


def take(x: Tensor, name: str) -> Tensor | None:
    """Return a tensor's mark, unless the tensor has changed since, and remove the mark."""
    numbers, marked_at = x.__dict__.pop(name, (None, None))
    return numbers if marked_at == version(x) else None


def mark_deferred(x: Tensor, deferred: Deferred) -> Tensor:
    """Mark a map whose only reader normalises what it loads, and return it.

    Autograd treats it as the normalised map: the reader returns the gradient of the normalised map.
    """
    setattr(x, _DEFERRED, deferred)
    return x


def deferred_of(x: Tensor) -> Deferred | None:
    """Return the normalisation that a map's reader has to do, if any."""
    return getattr(x, _DEFERRED, None)


def channels_last(x: Tensor) -> Tensor:
    """Return a map in channels-last memory: itself, or a copy."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def is_laid_out(x: Tensor) -> bool:
    """Return whether kernels take a map's layout: channels-last, with or without room around Z."""
    return has_room(x) or x.is_contiguous(memory_format=torch.channels_last_3d)


def laid_out(x: Tensor) -> Tensor:
    """Return a map in a layout that kernels take: itself, or a channels-last copy."""
    return x if is_laid_out(x) else channels_last(x)


def is_channels_last(x: Tensor) -> bool:
    """Return whether a map is in channels-last memory, and not also channels-first."""
    return x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()


def empty_with_planes(like: Tensor, before: int, after: int) -> Tensor:
    """Return channels-last memory (N, C, X, Y, before + Z + after) for a map like another."""
    return empty_channels_last((*like.shape[:-1], before + like.shape[-1] + after), like)
