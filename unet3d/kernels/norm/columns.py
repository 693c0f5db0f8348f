"""A whole volume at once on a CPU, where memory is channels-last.

A sample is a matrix of V voxels by C channels. PyTorch's batch normalisation goes through it row by
row, which is slow where a row is short: with four channels at 64^3 its statistics take 4.6 ms, 33
times as long as with 64. So k voxels are taken as one of k * C channels, which is a view, and what
belongs to one channel is added up afterwards, in float64. That also keeps the sums short, and so
exact.

Backward is made of the sums, and of one pass each over x and the gradient, because PyTorch's
operation for all of it would take the sums of k voxels for those of one.

Small maps are common on CPUs, and there the time is that of the calls: so there are few.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.norm.reference import exact_type

MAX_COLUMNS = 1024
"""The most columns that a matrix is folded to."""

# PyTorch's statistics, and its variant that writes to given memory, have no fake versions.
torch.library.define("unet3d::column_statistics", "(Tensor x, float eps) -> (Tensor, Tensor)")
torch.library.define(
    "unet3d::scale_columns", "(Tensor(a!) y, Tensor x, Tensor scale, Tensor shift) -> ()"
)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised map, the mean (N, C, 1) and 1 / deviation (N, C)."""
    mean, rstd = torch.ops.unet3d.column_statistics.default(x, eps)
    mean = mean.unsqueeze(-1)
    return normalize(x, weight, bias, mean, rstd, slope=slope), mean, rstd


def normalize(x: Tensor, *affine: Tensor, slope: float) -> Tensor:
    """Return the normalised map from its statistics."""
    y = _before_activation(x, *affine)
    return y if slope == 1 else F.leaky_relu_(y, slope)


def backward(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    weight, _, mean, rstd = affine
    g = dy.contiguous(memory_format=torch.channels_last_3d)
    if slope == 1:
        dx = torch.empty_like(x)
    else:
        before = _before_activation(x, *affine)
        # Into the memory of what is not needed any more, as is the result.
        g = dx = torch.ops.aten.leaky_relu_backward.grad_input(
            g, before, slope, False, grad_input=before
        )
    sum_g, sum_gx = _sums(g, x, mean.squeeze(-1), rstd)
    voxels = x[0, 0].numel()
    # The gradient scale * (g - mean of g - normalised * mean of gx), as scale * g + (a * x + b).
    scale = rstd * weight
    a = -scale * rstd * (sum_gx / voxels)
    b = -scale * (sum_g / voxels) - a * mean.squeeze(-1)
    torch.ops.unet3d.scale_columns.default(dx, g, scale, torch.zeros_like(scale))
    return dx.add_(_scaled(x, a, b)), sum_gx.sum(0), sum_g.sum(0)


@torch.library.impl("unet3d::column_statistics", "cpu")
def _(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, c = x.shape[:2]
    k, exact = _fold(x), exact_type(x)
    # Running statistics that nobody reads make PyTorch return a low type's in float32.
    unused = torch.empty(k * c, dtype=exact)
    parts = [torch.batch_norm_update_stats(view, unused, unused, 0.0) for view in _views(x, k)]
    means, variances = (
        torch.cat(values).view(n, k, c).double() for values in zip(*parts, strict=True)
    )
    # The variance of all is the mean of the variances, and the variance of the means.
    between, mean = torch.var_mean(means, 1, correction=0)
    rstd = between.add_(variances.mean(1)).add_(eps).rsqrt_()
    return mean.to(exact), rstd.to(exact)


@torch.library.register_fake("unet3d::column_statistics")  # type: ignore[untyped-decorator]
def _(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:2], dtype=exact_type(x)) for _ in range(2))
    return mean, rstd


@torch.library.impl("unet3d::scale_columns", "cpu")
def _(y: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> None:
    # A normalisation by a mean of nothing and a variance of one, which scales and shifts in a pass.
    k = _fold(x)
    nothing, one, unused = _constants(k * x.shape[1], scale.dtype)
    scales, shifts = _repeated(scale, k), _repeated(shift, k)
    for view, made, *affine in zip(_views(x, k), _views(y, k), scales, shifts, strict=True):
        given = (*affine, nothing, one, False, 0.0, 0.0)
        torch.ops.aten.native_batch_norm.out(
            view, *given, out=made, save_mean=unused, save_invstd=unused
        )


@torch.library.register_fake("unet3d::scale_columns")  # type: ignore[untyped-decorator]
def _(y: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> None:
    pass


def _before_activation(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> Tensor:
    scale = rstd * weight
    return _scaled(x, scale, torch.addcmul(bias, mean.squeeze(-1), scale, value=-1))


def _scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.ops.unet3d.scale_columns.default(y, x, scale, shift)
    return y


def _sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums (N, C) of g and of g * normalised."""
    n, c = x.shape[:2]
    k = _fold(x)
    given = (_views(g, k), _views(x, k), _repeated(mean, k), _repeated(rstd, k))
    sums = []
    for g_one, x_one, mean_one, rstd_one in zip(*given, strict=True):
        _, sum_gx, sum_g = torch.ops.aten.native_batch_norm_backward(
            g_one, x_one, None, None, None, mean_one, rstd_one, True, 0.0, (False, True, True)
        )
        sums += [sum_g, sum_gx]
    together = torch.cat(sums).view(n, 2, k, c).sum(2, dtype=torch.float64).to(exact_type(x))
    return together[:, 0], together[:, 1]


def _fold(x: Tensor) -> int:
    """Return how many voxels are taken as one: a power of two that divides them."""
    n, c, *space = x.shape
    voxels, k = space[0] * space[1] * space[2], 1
    while 2 * k * c <= MAX_COLUMNS and voxels % (2 * k) == 0:
        k *= 2
    return k


def _views(x: Tensor, k: int) -> list[Tensor]:
    """Return each sample as (1, k * C, V / k, 1, 1)."""
    n, c, *space = x.shape
    elements, columns = c * space[0] * space[1] * space[2], k * c
    shape, strides = (
        (1, columns, elements // columns, 1, 1),
        (elements, 1, columns, columns, columns),
    )
    start = x.storage_offset()
    return [x.as_strided(shape, strides, start + index * elements) for index in range(n)]


def _repeated(values: Tensor, k: int) -> tuple[Tensor, ...]:
    """Return k times the values of each sample's channels."""
    n, c = values.shape
    return values.unsqueeze(1).expand(n, k, c).reshape(n, k * c).unbind(0)


@functools.cache
def _constants(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return nothing and one for each column, and memory that nobody reads."""
    nothing = torch.zeros(columns, dtype=dtype)
    return nothing, torch.ones_like(nothing), nothing.new_empty(0)
