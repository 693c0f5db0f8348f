"""The Triton normalisation as an operation of PyTorch's: its gradient, and its shapes.

This module needs no Triton, so the memory of a network can be predicted where there is none. The
operations are defined one by one because ``torch.library.custom_op`` adds checks to every call that
take longer than a small kernel.
"""

from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.padding import empty_padded, mark_padded

torch.library.define(
    "unet3d::instance_norm",
    "(Tensor x, Tensor weight, Tensor bias, float eps, float slope, bool pads_output,"
    " bool pads_gradient) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "unet3d::normalize",
    "(Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, float slope) -> Tensor",
)
torch.library.define(
    "unet3d::instance_norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, float slope,"
    " bool pads) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("unet3d::instance_norm", "cuda")
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    slope: float,
    pads_output: bool,
    pads_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from unet3d.kernels.norm import kernel as norm_triton

    return norm_triton.forward(x, weight, bias, eps, slope, pads_output)


@torch.library.register_fake("unet3d::instance_norm")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    slope: float,
    pads_output: bool,
    pads_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y = _room(x, pads_output)
    samples, channels = x.shape[:2]
    mean = x.new_empty((samples, 2 * channels), dtype=torch.float32)
    return y, mean, x.new_empty((samples, channels), dtype=torch.float32)


@torch.library.impl("unet3d::instance_norm_backward", "cuda")
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    slope: float,
    pads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from unet3d.kernels.norm import kernel as norm_triton

    return norm_triton.backward(dy, x, weight, bias, mean, rstd, slope, pads)


@torch.library.register_fake("unet3d::instance_norm_backward")  # type: ignore[untyped-decorator]
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    slope: float,
    pads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _room(x, pads), torch.empty_like(weight), torch.empty_like(bias)


@torch.library.impl("unet3d::normalize", "cuda")
def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, slope: float
) -> Tensor:
    from unet3d.kernels.norm import kernel as norm_triton

    return norm_triton.normalize(x, weight, bias, mean, rstd, slope)


@torch.library.register_fake("unet3d::normalize")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, slope: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last_3d)


def _room(x: Tensor, pads: bool) -> Tensor:
    return empty_padded(x) if pads else torch.empty_like(x, memory_format=torch.channels_last_3d)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, slope, _, pads_gradient = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.slope, ctx.pads = slope, pads_gradient
    ctx.mark_non_differentiable(mean, rstd)


def _differentiate(ctx: Any, dy: Tensor, _mean: None, _rstd: None) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = torch.ops.unet3d.instance_norm_backward(
        dy, *ctx.saved_tensors, ctx.slope, ctx.pads
    )
    return mark_padded(dx) if ctx.pads else dx, dweight, dbias, None, None, None, None


torch.library.register_autograd("unet3d::instance_norm", _differentiate, setup_context=_save)


def probe() -> None:
    """Compile and run once, to find out whether this machine can."""
    with torch.enable_grad():  # the first to ask may be a prediction
        x = torch.zeros(1, 1, 1, 1, 2, device="cuda", requires_grad=True)
        one = torch.ones(1, device="cuda")
        torch.ops.unet3d.instance_norm(x, one, one, 1e-5, 0.01, False, False)[0].sum().backward()
    torch.cuda.synchronize()
