"""Triton's stages of the normalisation as PyTorch operations with fake versions.

This module needs no Triton, so the memory of a network can be predicted where there is none. The
operations are defined one by one because ``torch.library.custom_op`` adds checks to every call that
take longer than a small kernel. They have no gradients of their own: backward is made of the last
three. All maps are channels-last, and x may have room around Z (:mod:`unet3d.kernels.padding`);
:mod:`unet3d.kernels.norm.stages` documents what they do.
"""

from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.norm.grid import grid_of
from unet3d.kernels.padding import empty_map

_MAPS = "Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd"

for _name, _signature in {
    "norm_moments": "(Tensor x) -> Tensor",
    "norm_sum_moments": "(Tensor(a!) x, Tensor added) -> Tensor",
    "norm_merge": "(Tensor moments, int voxels, float eps) -> (Tensor, Tensor, Tensor)",
    "norm_normalize": f"({_MAPS}, *, float slope, bool pads) -> Tensor",
    "norm_normalize_into": f"(Tensor(a!) y, {_MAPS}, *, float slope, bool pads) -> ()",
    "norm_sums": f"(Tensor dy, {_MAPS}, *, float slope) -> Tensor",
    "norm_total": "(Tensor sums) -> Tensor",
    "norm_gradient": f"(Tensor dy, {_MAPS}, *, Tensor total, int voxels, float slope, bool pads)"
    " -> Tensor",
}.items():
    torch.library.define(f"unet3d::{_name}", _signature)

moments = torch.ops.unet3d.norm_moments.default
sum_moments = torch.ops.unet3d.norm_sum_moments.default
merge = torch.ops.unet3d.norm_merge.default
normalize = torch.ops.unet3d.norm_normalize.default
normalize_into = torch.ops.unet3d.norm_normalize_into.default
sums = torch.ops.unet3d.norm_sums.default
total = torch.ops.unet3d.norm_total.default
gradient = torch.ops.unet3d.norm_gradient.default


@torch.library.impl("unet3d::norm_moments", "cuda")
def _(x: Tensor) -> Tensor:
    from unet3d.kernels.norm import launch

    return launch.moments(x)


@torch.library.register_fake("unet3d::norm_moments")  # type: ignore[untyped-decorator]
def _(x: Tensor) -> Tensor:
    return per_run(x, 4)


@torch.library.impl("unet3d::norm_sum_moments", "cuda")
def _(x: Tensor, added: Tensor) -> Tensor:
    from unet3d.kernels.norm import launch

    return launch.sum_moments(x, added)


@torch.library.register_fake("unet3d::norm_sum_moments")  # type: ignore[untyped-decorator]
def _(x: Tensor, added: Tensor) -> Tensor:
    return per_run(x, 4)


@torch.library.impl("unet3d::norm_merge", "cuda")
def _(moments: Tensor, voxels: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from unet3d.kernels.norm import launch

    return launch.merge(moments, voxels, eps)


@torch.library.register_fake("unet3d::norm_merge")  # type: ignore[untyped-decorator]
def _(moments: Tensor, voxels: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _, numbers, n, c = moments.shape
    shapes = ((n, c, 2), (n, c), (1, numbers, n, c))
    mean, rstd, merged = (moments.new_empty(shape) for shape in shapes)
    return mean, rstd, merged


@torch.library.impl("unet3d::norm_normalize", "cuda")
def _(x: Tensor, *affine: Tensor, **options: Any) -> Tensor:
    from unet3d.kernels.norm import launch

    return launch.normalize(x, *affine, **options)


@torch.library.register_fake("unet3d::norm_normalize")  # type: ignore[untyped-decorator]
def _(x: Tensor, *affine: Tensor, slope: float, pads: bool) -> Tensor:
    return empty_map(x, pads)


@torch.library.impl("unet3d::norm_normalize_into", "cuda")
def _(y: Tensor, x: Tensor, *affine: Tensor, **options: Any) -> None:
    from unet3d.kernels.norm import launch

    launch.normalize_into(y, x, *affine, **options)


@torch.library.register_fake("unet3d::norm_normalize_into")  # type: ignore[untyped-decorator]
def _(y: Tensor, x: Tensor, *affine: Tensor, **options: Any) -> None:
    return None


@torch.library.impl("unet3d::norm_sums", "cuda")
def _(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> Tensor:
    from unet3d.kernels.norm import launch

    return launch.sums(dy, x, *affine, slope=slope)


@torch.library.register_fake("unet3d::norm_sums")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> Tensor:
    return per_run(x, 2)


@torch.library.impl("unet3d::norm_total", "cuda")
def _(sums: Tensor) -> Tensor:
    from unet3d.kernels.norm import launch

    return launch.total(sums)


@torch.library.register_fake("unet3d::norm_total")  # type: ignore[untyped-decorator]
def _(sums: Tensor) -> Tensor:
    return sums.new_empty(sums.shape[1:])


@torch.library.impl("unet3d::norm_gradient", "cuda")
def _(dy: Tensor, x: Tensor, *affine: Tensor, **options: Any) -> Tensor:
    from unet3d.kernels.norm import launch

    return launch.gradient(dy, x, *affine, **options)


@torch.library.register_fake("unet3d::norm_gradient")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, *affine: Tensor, pads: bool, **options: Any) -> Tensor:
    return empty_map(x, pads)


def per_run(x: Tensor, numbers: int) -> Tensor:
    """Return memory for so many numbers of each run, sample and channel."""
    n, c, *space = x.shape
    runs = grid_of(n, c, space[0] * space[1] * space[2]).runs
    return x.new_empty((runs, numbers, n, c), dtype=torch.float32)
