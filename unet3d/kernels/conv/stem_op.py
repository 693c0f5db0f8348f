"""The Triton convolution of few channels as a PyTorch operation, with gradient and fake version."""

from typing import Any

import torch
from torch import Tensor

torch.library.define("unet3d::stem", "(Tensor x, Tensor weight, int before, int after) -> Tensor")
torch.library.define(
    "unet3d::stem_backward", "(Tensor dy, Tensor x, Tensor weight, int before) -> Tensor"
)


@torch.library.impl("unet3d::stem", "cuda")
def _forward(x: Tensor, weight: Tensor, before: int, after: int) -> Tensor:
    from unet3d.kernels.conv import stem_kernel

    return stem_kernel.forward(x, weight, before, after)


@torch.library.register_fake("unet3d::stem")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, before: int, after: int) -> Tensor:
    shape = (x.shape[0], weight.shape[0], x.shape[2] + before + after - 2, *x.shape[3:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)


@torch.library.impl("unet3d::stem_backward", "cuda")
def _backward(dy: Tensor, x: Tensor, weight: Tensor, before: int) -> Tensor:
    from unet3d.kernels.conv import stem_kernel

    return stem_kernel.weight_gradient(dy, x, weight, before)


@torch.library.register_fake("unet3d::stem_backward")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, weight: Tensor, before: int) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, before, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.before = before


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dweight = torch.ops.unet3d.stem_backward(dy, *ctx.saved_tensors, ctx.before)
    return None, dweight, None, None


torch.library.register_autograd("unet3d::stem", _differentiate, setup_context=_save)
