"""The Triton convolution of few channels as an operation of PyTorch's: gradient and shapes."""

from typing import Any

import torch
from torch import Tensor

torch.library.define("unet3d::stem", "(Tensor x, Tensor weight) -> Tensor")
torch.library.define("unet3d::stem_backward", "(Tensor dy, Tensor x, Tensor weight) -> Tensor")


@torch.library.impl("unet3d::stem", "cuda")
def _forward(x: Tensor, weight: Tensor) -> Tensor:
    from unet3d.kernels.conv import stem_kernel as stem_triton

    return stem_triton.forward(x, weight)


@torch.library.register_fake("unet3d::stem")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor) -> Tensor:
    shape = (x.shape[0], weight.shape[0], *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)


@torch.library.impl("unet3d::stem_backward", "cuda")
def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    from unet3d.kernels.conv import stem_kernel as stem_triton

    return stem_triton.weight_gradient(dy, x, weight)


@torch.library.register_fake("unet3d::stem_backward")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
    return None, torch.ops.unet3d.stem_backward(dy, *ctx.saved_tensors)


torch.library.register_autograd("unet3d::stem", _differentiate, setup_context=_save)
