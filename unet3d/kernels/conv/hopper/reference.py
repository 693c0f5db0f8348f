"""The hand-written convolutions (:mod:`unet3d.kernels.conv.hopper.op`) in PyTorch's own operations.

Tests use them in place of the kernels, on a CPU and in any number type.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv3d_weight

from unet3d.kernels.maps import channels_last

_AROUND = (2, 3, 4)


def convolve(
    x: Tensor,
    kernel: Tensor,
    *given: Any,
    slope: float,
    before: int,
    after: int,
    moments: bool,
) -> tuple[Tensor, Tensor]:
    """Convolve x, normalised first if an affine is given; return the result and its moments."""
    y = F.conv3d(_extended(x, given, slope, before, after), kernel)
    if not moments:
        return channels_last(y), x.new_empty((0, 4, *y.shape[:2]), dtype=_exact(x))
    return channels_last(y), _moments(y)


def add_convolution(y: Tensor, x: Tensor, kernel: Tensor, *, before: int, after: int) -> Tensor:
    """Add the convolution of x to y in place, and return the moments of the sum."""
    y += F.conv3d(_padded(x, before, after), kernel)
    return _moments(y)


def input_gradient(
    dy: Tensor,
    kernel: Tensor,
    x: Tensor | None,
    *affine: Any,
    slope: float,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor]:
    """Return the convolved map's gradient and, if that map is x normalised, the gradient's sums."""
    turned = kernel.flip(_AROUND).transpose(0, 1)
    dx = channels_last(F.conv3d(_padded(dy, 2 - before, 2 - after), turned))
    exact = _exact(dy)
    if x is None:
        return dx, dy.new_empty((0, 2, *dx.shape[:2]), dtype=exact)
    normal, value = _normal(x, *affine)
    g = torch.where(value > 0, dx.to(exact), dx.to(exact) * slope)
    return dx, torch.stack((g.sum(_AROUND), (g * normal).sum(_AROUND)))[None]


def weight_gradient(dy: Tensor, x: Tensor, *given: Any, slope: float, before: int) -> Tensor:
    """Return the gradient of the kernel (O, I, 3, 3, 3)."""
    after = dy.shape[2] + 2 - x.shape[2] - before
    padded = _extended(x, given, slope, before, after)
    shape = (dy.shape[1], x.shape[1], 3, 3, 3)
    exact = (padded.to(_exact(x)), shape, dy.to(_exact(x)))
    dweight: Tensor = conv3d_weight(*exact)  # type: ignore[no-untyped-call]
    return dweight


def _moments(y: Tensor) -> Tensor:
    variance, mean = torch.var_mean(y.to(_exact(y)), _AROUND, correction=0)
    count = torch.full_like(mean, y[0, 0].numel())
    return torch.stack((count, variance, mean, torch.zeros_like(mean)))[None]


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _extended(x: Tensor, given: tuple[Any, ...], slope: float, before: int, after: int) -> Tensor:
    """Return the convolution's input, normalised, with its neighbours' planes and zeros around."""
    *affine, preceding, following = given
    planes = [plane for plane in (preceding, x, following) if plane is not None]
    z = _normalized(torch.cat(planes, 2), *affine, slope=slope)
    return _padded(z, before - (preceding is not None), after - (following is not None))


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, (1, 1, 1, 1, before, after))


def _normal(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the normalised map without weight and bias, and with them."""
    rows = (*x.shape[:2], 1, 1, 1)
    normal = (x.to(_exact(x)) - mean.sum(-1).view(rows)) * rstd.view(rows)
    return normal, normal * weight.view(-1, 1, 1, 1) + bias.view(-1, 1, 1, 1)


def _normalized(x: Tensor, *affine: Any, slope: float) -> Tensor:
    if affine[0] is None:
        return x
    value = _normal(x, *affine)[1]
    return torch.where(value > 0, value, value * slope).to(x.dtype)
