"""The Triton convolution of few channels as a PyTorch operation, with gradient and fake version."""

from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.triton_support import operation


def _fake(x: Tensor, weight: Tensor, before: int, after: int) -> Tensor:
    shape = (x.shape[0], weight.shape[0], x.shape[2] + before + after - 2, *x.shape[3:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, before: int) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


stem = operation(
    "stem",
    "(Tensor x, Tensor weight, int before, int after) -> Tensor",
    "conv.stem_kernel.forward",
    _fake,
)
_stem_backward = operation(
    "stem_backward",
    "(Tensor dy, Tensor x, Tensor weight, int before) -> Tensor",
    "conv.stem_kernel.weight_gradient",
    _fake_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, before, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.before = before


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return None, _stem_backward(dy, *ctx.saved_tensors, ctx.before), None, None


torch.library.register_autograd("unet3d::stem", _differentiate, setup_context=_save)
