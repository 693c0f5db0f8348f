"""Triton's kernels of a normalisation with its head as PyTorch operations with fake versions.

As in :mod:`unet3d.kernels.norm.op`, this module needs no Triton, and the operations have no
gradients of their own. Maps are channels-last.
"""

from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.norm.op import per_run
from unet3d.kernels.padding import empty_map

_MAPS = "Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, Tensor head"

for _name, _signature in {
    "norm_head_logits": f"({_MAPS}, Tensor head_bias, *, float slope) -> Tensor",
    "norm_head_sums": f"(Tensor dy, {_MAPS}, *, float slope) -> (Tensor, Tensor)",
    "norm_head_gradient": f"(Tensor dy, {_MAPS}, *, Tensor total, int voxels, float slope,"
    " bool pads) -> Tensor",
}.items():
    torch.library.define(f"unet3d::{_name}", _signature)

logits = torch.ops.unet3d.norm_head_logits.default
sums = torch.ops.unet3d.norm_head_sums.default
gradient = torch.ops.unet3d.norm_head_gradient.default


@torch.library.impl("unet3d::norm_head_logits", "cuda")
def _(x: Tensor, *given: Tensor, slope: float) -> Tensor:
    from unet3d.kernels.norm_head import launch

    return launch.logits(x, *given, slope=slope)


@torch.library.register_fake("unet3d::norm_head_logits")  # type: ignore[untyped-decorator]
def _(x: Tensor, *given: Tensor, slope: float) -> Tensor:
    shape = (len(x), len(given[-1]), *x.shape[2:])
    layout = torch.channels_last_3d
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


@torch.library.impl("unet3d::norm_head_sums", "cuda")
def _(dy: Tensor, x: Tensor, *given: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    from unet3d.kernels.norm_head import launch

    return launch.sums(dy, x, *given, slope=slope)


@torch.library.register_fake("unet3d::norm_head_sums")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, *given: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    classes = len(given[-1])
    sums = per_run(x, 2 + classes)
    return sums, sums.new_empty((len(sums), len(x), classes))


@torch.library.impl("unet3d::norm_head_gradient", "cuda")
def _(dy: Tensor, x: Tensor, *given: Tensor, **options: Any) -> Tensor:
    from unet3d.kernels.norm_head import launch

    return launch.gradient(dy, x, *given, **options)


@torch.library.register_fake("unet3d::norm_head_gradient")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, *given: Tensor, pads: bool, **options: Any) -> Tensor:
    return empty_map(x, pads)
