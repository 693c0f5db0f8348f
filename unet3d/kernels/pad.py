"""Copies of maps with planes of zeros along Z."""

import torch
from torch import Tensor

from unet3d.kernels.triton_support import triton_available

torch.library.define("unet3d::pad_z", "(Tensor x, int before, int after) -> Tensor")


def pad_z(x: Tensor, before: int, after: int) -> Tensor:
    """Return a copy of a map with planes of zeros before and behind Z.

    Args:
        x: (N, C, X, Y, Z).
        before: Planes before the first.
        after: Planes behind the last.

    Returns:
        (N, C, X, Y, before + Z + after), channels-last.
    """
    padded: Tensor = torch.ops.unet3d.pad_z.default(x, before, after)
    return padded


def padded_copy(x: Tensor) -> Tensor:
    """Return a copy of a map (N, C, X, Y, Z) that is stored with zeros around; it has no mark."""
    return pad_z(x, 1, 1)[..., 1:-1]


def _empty(x: Tensor, before: int, after: int) -> Tensor:
    shape = (*x.shape[:-1], before + x.shape[-1] + after)
    layout = torch.channels_last_3d
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


@torch.library.impl("unet3d::pad_z", ("cpu", "cuda"))
def _(x: Tensor, before: int, after: int) -> Tensor:
    y = _empty(x, before, after)
    if triton_available(x):
        from unet3d.kernels import pad_kernel

        pad_kernel.pad_z(x.contiguous(memory_format=torch.channels_last_3d), y, before)
        return y
    y.zero_()[..., before : before + x.shape[-1]].copy_(x)
    return y


@torch.library.register_fake("unet3d::pad_z")  # type: ignore[untyped-decorator]
def _(x: Tensor, before: int, after: int) -> Tensor:
    return _empty(x, before, after)
