"""Instance normalisation of whole channels-last volumes on a CPU.

A sample is a matrix of V voxels by C channels. PyTorch's batch normalisation goes through it row by
row, which is slow where a row is short: with four channels at 64^3 its statistics take 4.6 ms, 33
times as long as with 64. So k voxels are viewed as one voxel of k * C channels, and the k sums of a
channel are added up afterwards, in float64. That also keeps the sums short, and so exact.

Large maps do not stay in a processor's cache, and reading them takes longer than computing. So maps
are processed in parts that fit the cache, and all operations of a pass are done on one part before
the next: backward reads and writes half as much as on whole maps.

Small maps are common on CPUs. They take as long as the overhead of calls, so this module makes few
calls.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.norm.reference import exact_type
from unet3d.kernels.operations import operation

MAX_COLUMNS = 1024
"""Most columns of a folded matrix."""
PART_ELEMENTS = 2**17
"""Most elements of a part per thread, if the rows can be divided evenly."""


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised map, the mean (N, C, 1) and 1 / deviation (N, C)."""
    mean, rstd = _statistics(x, eps)
    mean = mean.unsqueeze(-1)
    return normalize(x, weight, bias, mean, rstd, slope=slope), mean, rstd


def normalize(x: Tensor, *affine: Tensor, slope: float) -> Tensor:
    """Return the normalised map from its statistics."""
    weight, bias, mean, rstd = affine
    scale_and_shift = _affine(weight, bias, mean.squeeze(-1), rstd)
    y: Tensor = _scaled(x, *scale_and_shift, slope)
    return y


def backward(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    weight, bias, mean, rstd = affine
    dy = dy.contiguous(memory_format=torch.channels_last_3d)
    given = (dy, x, weight, bias, mean.squeeze(-1), rstd, slope)
    gradients: tuple[Tensor, Tensor, Tensor] = _gradients(*given)
    return gradients


def _statistics_of(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, c = x.shape[:2]
    k, num_parts = _divided(x)
    exact = exact_type(x)
    # With unused running statistics, PyTorch returns the statistics of a low type in float32.
    unused = torch.empty(k * c, dtype=exact)
    parts = [
        torch.batch_norm_update_stats(_as_map(part), unused, unused, 0.0)
        for parts in _parts(x, k, num_parts)
        for part in parts
    ]
    means, variances = (
        torch.cat(values).view(n, num_parts * k, c).double() for values in zip(*parts, strict=True)
    )
    # The total variance is the mean of the variances plus the variance of the means.
    between, mean = torch.var_mean(means, 1, correction=0)
    rstd = between.add_(variances.mean(1)).add_(eps).rsqrt_()
    return mean.to(exact), rstd.to(exact)


def _scaled_of(x: Tensor, scale: Tensor, shift: Tensor, slope: float) -> Tensor:
    y = torch.empty_like(x)
    k, num_parts = _divided(x)
    maps = (_parts(x, k, num_parts), _parts(y, k, num_parts))
    for parts, places, *affine in zip(*maps, *_repeated(k, scale, shift), strict=True):
        for part, place in zip(parts, places, strict=True):
            _scale(place, part, *affine)
            if slope != 1:
                F.leaky_relu_(place, slope)
    return y


def _gradients_of(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    n, c = x.shape[:2]
    k, num_parts = _divided(x)
    # The result's memory first holds the gradient before LeakyReLU, g.
    dx = torch.empty_like(x)
    xs, dys, dxs = (_parts(value, k, num_parts) for value in (x, dy, dx))
    scale, shift = _affine(weight, bias, mean, rstd)
    sums = []
    for index, values in enumerate(zip(*_repeated(k, scale, shift, mean, rstd), strict=True)):
        for part, g, made in zip(xs[index], dys[index], dxs[index], strict=True):
            if slope != 1:
                _scale(made, part, *values[:2])
                torch.ops.aten.leaky_relu_backward.grad_input(
                    g, made, slope, False, grad_input=made
                )
                g = made
            given = (_as_map(g), _as_map(part), None, None, None, *values[2:], True, 0.0)
            _, sum_gx, sum_g = torch.ops.aten.native_batch_norm_backward(
                *given, (False, True, True)
            )
            sums += [sum_g, sum_gx]
    together = torch.cat(sums).view(n, num_parts, 2, k, c).sum((1, 3), dtype=torch.float64)
    sum_g, sum_gx = together.to(exact_type(x)).unbind(1)
    voxels = x[0, 0].numel()
    # The gradient scale * (g - mean of g - normalised * mean of gx), as scale * g + (a * x + b).
    a = -scale * rstd * (sum_gx / voxels)
    b = -scale * (sum_g / voxels) - a * mean
    gs = dys if slope == 1 else dxs
    room = torch.empty_like(dxs[0][0], dtype=exact_type(x))
    for index, values in enumerate(zip(*_repeated(k, scale, a, b), strict=True)):
        scales, *affine = values
        for part, g, made in zip(xs[index], gs[index], dxs[index], strict=True):
            _scale(room, part, *affine)
            torch.addcmul(room, g, scales, out=made)
    return dx, sum_gx.sum(0), sum_g.sum(0)


def _affine(weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and shift (N, C) of each channel."""
    scale = rstd * weight
    return scale, torch.addcmul(bias, mean, scale, value=-1)


def _scale(y: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Write a matrix with scaled and shifted columns to another one."""
    if x.dtype == scale.dtype:
        torch.addcmul(shift, x, scale, out=y)
    elif y.dtype == scale.dtype:
        torch.mul(x, scale, out=y).add_(shift)
    else:  # a normalisation with mean 0 and variance 1 needs no conversion first
        nothing, one, unused = _constants(len(scale), scale.dtype)
        given = (scale, shift, nothing, one, False, 0.0, 0.0)
        torch.ops.aten.native_batch_norm.out(
            _as_map(x), *given, out=_as_map(y), save_mean=unused, save_invstd=unused
        )


def _divided(x: Tensor) -> tuple[int, int]:
    """Return k, the voxels that are treated as one, and the parts per sample: powers of two."""
    n, c, *space = x.shape
    voxels, k, num_parts = space[0] * space[1] * space[2], 1, 1
    while 2 * k * c <= MAX_COLUMNS and voxels % (2 * k) == 0:
        k *= 2
    most = PART_ELEMENTS * torch.get_num_threads()
    while c * voxels > num_parts * most and voxels // k % (2 * num_parts) == 0:
        num_parts *= 2
    return k, num_parts


def _parts(x: Tensor, k: int, num_parts: int) -> list[Sequence[Tensor]]:
    """Return the parts of each sample, matrices (V / k / num_parts, k * C)."""
    n, c, *space = x.shape
    rows, columns = space[0] * space[1] * space[2] // (k * num_parts), k * c
    shape = (n, num_parts, rows, columns)
    strides = (num_parts * rows * columns, rows * columns, columns, 1)
    return [sample.unbind() for sample in x.as_strided(shape, strides).unbind()]


def _as_map(matrix: Tensor) -> Tensor:
    """View rows by columns as a map (1, columns, rows, 1, 1), as PyTorch's statistics take it."""
    rows, columns = matrix.shape
    shape, strides = (1, columns, rows, 1, 1), (rows * columns, 1, columns, columns, columns)
    return matrix.as_strided(shape, strides)


def _repeated(k: int, *values: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the values of each sample's channels, repeated k times."""
    return [
        value.unsqueeze(1).expand(-1, k, -1).reshape(len(value), -1).unbind() for value in values
    ]


@functools.cache
def _constants(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return 0 and 1 for each column, and scratch memory."""
    nothing = torch.zeros(columns, dtype=dtype)
    return nothing, torch.ones_like(nothing), nothing.new_empty(0)


# PyTorch's operations that write to given memory have no fake versions, and a large map would need
# many of their calls.
_statistics = operation(
    "column_statistics",
    "(Tensor x, float eps) -> (Tensor, Tensor)",
    _statistics_of,
    lambda x, eps: tuple(x.new_empty(x.shape[:2], dtype=exact_type(x)) for _ in range(2)),
    "cpu",
)
_scaled = operation(
    "scale_columns",
    "(Tensor x, Tensor scale, Tensor shift, float slope) -> Tensor",
    _scaled_of,
    lambda x, *given: torch.empty_like(x),
    "cpu",
)
_gradients = operation(
    "column_gradients",
    "(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, float slope)"
    " -> (Tensor, Tensor, Tensor)",
    _gradients_of,
    lambda dy, x, weight, bias, *given: tuple(map(torch.empty_like, (x, weight, bias))),
    "cpu",
)
