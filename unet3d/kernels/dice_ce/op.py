"""The Triton sums of :mod:`unet3d.kernels.dice_ce.api` as a PyTorch operation, also on fakes."""

from typing import Any

import torch
from torch import Tensor

torch.library.define("unet3d::dice_ce_sums", "(Tensor logits, Tensor target) -> Tensor")
torch.library.define(
    "unet3d::dice_ce_sums_backward", "(Tensor gradient, Tensor logits, Tensor target) -> Tensor"
)


@torch.library.impl("unet3d::dice_ce_sums", "cuda")
def _forward(logits: Tensor, target: Tensor) -> Tensor:
    from unet3d.kernels.dice_ce import kernel

    return kernel.forward(logits, target)


@torch.library.register_fake("unet3d::dice_ce_sums")  # type: ignore[untyped-decorator]
def _(logits: Tensor, target: Tensor) -> Tensor:
    return logits.new_empty((4, *logits.shape[:2]), dtype=torch.float32)


@torch.library.impl("unet3d::dice_ce_sums_backward", "cuda")
def _backward(gradient: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    from unet3d.kernels.dice_ce import kernel

    return kernel.backward(gradient, logits, target)


@torch.library.register_fake("unet3d::dice_ce_sums_backward")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.channels_last_3d)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.unet3d.dice_ce_sums_backward(gradient, *ctx.saved_tensors), None


torch.library.register_autograd("unet3d::dice_ce_sums", _differentiate, setup_context=_save)
