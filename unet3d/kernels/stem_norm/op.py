"""The kernel of :mod:`unet3d.kernels.stem_norm.kernel` as a PyTorch operation, also on fakes."""

from typing import Any

import torch
from torch import Tensor

torch.library.define(
    "unet3d::stem_norm_weights",
    "(Tensor dy, Tensor x, Tensor y, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, *,"
    " Tensor total, int voxels, Tensor kernel, int before, float slope) -> Tensor",
)

weight_gradient = torch.ops.unet3d.stem_norm_weights.default


@torch.library.impl("unet3d::stem_norm_weights", "cuda")
def _(*maps: Tensor, **options: Any) -> Tensor:
    from unet3d.kernels.stem_norm import kernel

    return kernel.weight_gradient(*maps, **options)


@torch.library.register_fake("unet3d::stem_norm_weights")  # type: ignore[untyped-decorator]
def _(*maps: Tensor, kernel: Tensor, **options: Any) -> Tensor:
    return torch.empty_like(kernel, memory_format=torch.contiguous_format)
