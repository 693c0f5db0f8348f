"""The Triton sums of :mod:`unet3d.kernels.overlap` as an operation of PyTorch's."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("unet3d::overlap", mutates_args=(), device_types="cuda")
def _forward(logits: Tensor, target: Tensor) -> Tensor:
    from unet3d.kernels import overlap_triton

    return overlap_triton.forward(logits, target)


@_forward.register_fake
def _(logits: Tensor, target: Tensor) -> Tensor:
    return logits.new_empty((4, *logits.shape[:2]), dtype=torch.float32)


@torch.library.custom_op("unet3d::overlap_backward", mutates_args=(), device_types="cuda")
def _backward(gradient: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    from unet3d.kernels import overlap_triton

    return overlap_triton.backward(gradient, logits, target)


@_backward.register_fake
def _(gradient: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.channels_last_3d)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.unet3d.overlap_backward(gradient, *ctx.saved_tensors), None


_forward.register_autograd(_differentiate, setup_context=_save)
