"""The stages (:mod:`unet3d.kernels.norm.op`) in PyTorch's own operations, for any device.

A sample's channel is treated as a channel of a batch normalisation: a map (N, C, X, Y, Z) is rows
(1, N * C, X, Y, Z). The mean is one number (M is 1), and no map is stored with zeros around Z. For
a whole volume nothing is exchanged, so one operation does several stages (:func:`forward`,
:func:`backward`).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.operations import operation

_ALONG_CHANNELS = (1, -1, 1, 1, 1)


def moments(x: Tensor) -> Tensor:
    """Return the moments (1, 3, N, C) of a map as one part."""
    n, c, *space = x.shape
    mean, variance = _statistics(_rows(x))
    count = torch.full_like(mean, space[0] * space[1] * space[2])
    return torch.stack((count, variance, mean)).view(1, 3, n, c)


def merge(moments: Tensor, voxels: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (N, C, 1), 1 / deviation (N, C) and the merged moments (1, 3, N, C)."""
    counts, variances, *means_of = moments.double().unbind(1)
    means = torch.stack(means_of).sum(0)
    # Relative to the first part's mean, so that a single part keeps its moments bit-exactly.
    mean = means[0] + (counts * (means - means[0])).sum(0) / voxels
    spread = variances - variances[0] + (means - mean).square()
    variance = variances[0] + (counts * spread).sum(0) / voxels
    rstd = (variance + eps).rsqrt()
    merged = torch.stack((torch.full_like(mean, voxels), variance, mean)).unsqueeze(0)
    dtype = moments.dtype
    return mean.to(dtype).unsqueeze(-1), rstd.to(dtype), merged.to(dtype)


def normalize(
    y: Tensor, x: Tensor, *affine: Tensor, slope: float, pads: Literal[False] = False
) -> None:
    """Write the normalised map to existing memory."""
    y.copy_(_activated(_before_activation(x, *affine), slope).reshape(x.shape))


def sums(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> Tensor:
    """Return the sums (1, 2, N, C) of a map as one part."""
    g = _gradient_before_activation(dy, x, *affine, slope=slope)
    _, sum_gx, sum_g = _backward(g, x, *affine, wanted=(False, True, True))
    return torch.stack((sum_g, sum_gx)).view(1, 2, *x.shape[:2])


def total(sums: Tensor) -> Tensor:
    """Return the sums (2, N, C) over all parts."""
    return sums.sum(0)


def gradient(
    dy: Tensor,
    x: Tensor,
    *affine: Tensor,
    total: Tensor,
    voxels: int,
    slope: float,
    pads: Literal[False] = False,
) -> Tensor:
    """Return the gradient of a map, from the sums over the volume."""
    weight, _, mean, rstd = affine
    g = _gradient_before_activation(dy, x, *affine, slope=slope)
    mean_g, mean_gx = (value.view(_ALONG_CHANNELS) for value in (total / voxels).unbind(0))
    scale = (rstd * weight).view(_ALONG_CHANNELS)
    normal = (_rows(x) - mean.view(_ALONG_CHANNELS)) * rstd.view(_ALONG_CHANNELS)
    dx = (g - mean_g).addcmul_(normal, mean_gx, value=-1).mul_(scale)
    return dx.to(x.dtype).reshape(x.shape)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised map, the mean (N, C, 1) and 1 / deviation (N, C) of a whole volume."""
    n, c = x.shape[:2]
    given = (weight.repeat(n), bias.repeat(n), None, None, True, 0.0, eps)
    y, mean, rstd = torch.native_batch_norm(_rows(x), *given)
    return _activated(y.reshape(x.shape), slope), mean.view(n, c, 1), rstd.view(n, c)


def backward(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias of a whole volume."""
    n, c = x.shape[:2]
    g = _gradient_before_activation(dy, x, *affine, slope=slope)
    dx, sum_gx, sum_g = _backward(g, x, *affine, wanted=(True, True, True))
    return dx.reshape(x.shape), sum_gx.view(n, c).sum(0), sum_g.view(n, c).sum(0)


def exact_type(x: Tensor) -> torch.dtype:
    """Return the type of sums and statistics: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: Tensor) -> Tensor:
    """View (N, C, X, Y, Z) as (1, N * C, X, Y, Z)."""
    n, c, *space = x.shape
    return x.reshape(1, n * c, *space)


def _before_activation(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> Tensor:
    """Return the rows of the normalised map before LeakyReLU."""
    scale = (rstd * weight).flatten()
    shift = torch.addcmul(bias.repeat(len(x)), mean.flatten(), scale, value=-1)
    # A normalisation with mean 0 and variance 1 scales and shifts in one pass.
    nothing, one = torch.zeros_like(scale), torch.ones_like(scale)
    return torch.native_batch_norm(_rows(x), scale, shift, nothing, one, False, 0.0, 0.0)[0]


def _activated(y: Tensor, slope: float) -> Tensor:
    return y if slope == 1 else F.leaky_relu_(y, slope)


def _gradient_before_activation(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> Tensor:
    """Return the rows of the gradient before LeakyReLU."""
    g = _rows(dy)
    if slope == 1:
        return g
    before = _before_activation(x, *affine)
    # Reuses memory that is no longer needed.
    made: Tensor = torch.ops.aten.leaky_relu_backward.grad_input(
        g, before, slope, False, grad_input=before
    )
    return made


def _backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rows, and the sums of g * normalised and g for each row."""
    rows = _rows(x)
    if g.stride() != rows.stride():  # on a CPU PyTorch sums wrong voxels if layouts differ
        g = torch.empty_like(rows).copy_(g)
    statistics = (None, None, mean.flatten(), rstd.flatten())
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        g, rows, weight.repeat(len(x)), *statistics, True, 0.0, wanted
    )
    return gradients


def _statistics_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    # With unused running statistics, PyTorch returns the statistics of a low type in float32.
    unused = torch.zeros(2, rows.shape[1], dtype=exact_type(rows), device=rows.device)
    mean, variance = torch.batch_norm_update_stats(rows, unused[0], unused[1], 0.0)
    return mean, variance


# PyTorch's own operation has no fake version, so predicting memory would allocate it.
_statistics = operation(
    "channel_statistics",
    "(Tensor rows) -> (Tensor, Tensor)",
    _statistics_of,
    lambda rows: tuple(rows.new_empty(rows.shape[1], dtype=exact_type(rows)) for _ in range(2)),
    ("cpu", "cuda"),
)
