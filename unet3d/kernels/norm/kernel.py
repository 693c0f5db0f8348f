"""The stages (:mod:`unet3d.kernels.norm.stages`) in Triton, for channels-last volumes.

A volume is a matrix of V voxels by C channels. Forward::

    moments    each program takes a run of voxels: its count, variance and mean per channel
    merge      merges the runs of a channel (Chan, Golub and LeVeque, 1979): mean, 1 / deviation
    normalize  one pass over the matrix

Backward recomputes the normalised values from x, so only x, mean and 1 / deviation are kept::

    sums       per run: of g and of g * normalised, where g is the gradient before LeakyReLU
    total      adds up the runs
    gradient   one pass over the matrix

There are no atomics, so results are the same in every run. Differences are taken from the first
voxel of each run, and the mean is kept as two float32 numbers (M is 2), so a mean far from zero
costs no digits. Offsets are 64 bits wide. Maps are channels-last already.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unet3d.kernels.norm.grid import Grid, grid_of
from unet3d.kernels.padding import empty_map, with_padding


@triton.jit
def _moments(x, moments, V, C, RUN, BV: tl.constexpr, BC: tl.constexpr):
    run = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    count = 0.0
    mean = tl.zeros((BC,), tl.float32)
    square = tl.zeros((BC,), tl.float32)
    first = run * RUN
    last = tl.minimum(first + RUN, V)
    shift = tl.load(x + (sample * V + first) * C + channel, mask=known, other=0.0).to(tl.float32)
    for start in range(first, last, BV):
        voxel = start + tl.arange(0, BV)
        inside = (voxel < last)[:, None] & known[None, :]
        at = (sample * V + voxel)[:, None] * C + channel[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values - shift[None, :], 0.0)
        added = tl.minimum(last - start, BV).to(tl.float32)
        block_mean = tl.sum(values, axis=0) / added
        difference = tl.where(inside, values - block_mean[None, :], 0.0)
        total = count + added
        step = block_mean - mean
        square += tl.sum(difference * difference, axis=0) + step * step * (count * added / total)
        mean += step * (added / total)
        count = total
    row = tl.num_programs(2) * C
    out = moments + run * 4 * row + sample * C + channel
    tl.store(out, tl.zeros((BC,), tl.float32) + count, mask=known)
    tl.store(out + row, square / count, mask=known)
    tl.store(out + 2 * row, shift, mask=known)
    tl.store(out + 3 * row, mean, mask=known)


@triton.jit
def _merge(
    moments, means, rstds, merged, V, C, P, eps,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channel < C
    row = tl.num_programs(1) * C
    column = sample * C + channel
    # Differences from the first part's mean, so that the rounding of large counts does no harm.
    origin = tl.load(moments + 2 * row + column, mask=known, other=0.0).to(tl.float64)
    total = tl.zeros((BC,), tl.float64)
    for start in range(0, P, BP):
        part = start + tl.arange(0, BP)
        inside = (part < P)[:, None] & known[None, :]
        at = moments + (part * 4 * row)[:, None] + column[None, :]
        count = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        mean = tl.load(at + 2 * row, mask=inside, other=0.0).to(tl.float64)
        mean += tl.load(at + 3 * row, mask=inside, other=0.0).to(tl.float64)
        total += tl.sum((mean - origin[None, :]) * count, axis=0)
    mean_all = origin + total / V
    square_all = tl.zeros((BC,), tl.float64)
    for start in range(0, P, BP):
        part = start + tl.arange(0, BP)
        inside = (part < P)[:, None] & known[None, :]
        at = moments + (part * 4 * row)[:, None] + column[None, :]
        count = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        variance = tl.load(at + row, mask=inside, other=0.0).to(tl.float64)
        mean = tl.load(at + 2 * row, mask=inside, other=0.0).to(tl.float64)
        mean += tl.load(at + 3 * row, mask=inside, other=0.0).to(tl.float64)
        away = mean - mean_all[None, :]
        square_all += tl.sum((variance + away * away) * count, axis=0)
    variance_all = square_all / V
    rstd = 1.0 / tl.sqrt(variance_all + eps)
    # In float32 a mean of 1e4 is off by up to 5e-4; the rest is kept behind it.
    high = mean_all.to(tl.float32)
    rest = (mean_all - high.to(tl.float64)).to(tl.float32)
    tl.store(means + 2 * column, high, mask=known)
    tl.store(means + 2 * column + 1, rest, mask=known)
    tl.store(rstds + column, rstd.to(tl.float32), mask=known)
    out = merged + column
    tl.store(out, tl.zeros((BC,), tl.float32) + V, mask=known)
    tl.store(out + row, variance_all.to(tl.float32), mask=known)
    tl.store(out + 2 * row, high, mask=known)
    tl.store(out + 3 * row, rest, mask=known)


@triton.jit
def _place(sample, voxel, V, Z, PADS: tl.constexpr):
    """Return which voxel of a map, with or without zeros around Z, each voxel is written to."""
    place = sample * V + voxel
    if PADS:
        place += 2 * (place // Z) + 1
    return place


@triton.jit
def _store(out, place, voxel, value, channel, inside, C, Z, PADS: tl.constexpr):
    """Store a block, and the zeros before and behind its rows."""
    at = place[:, None] * C + channel[None, :]
    value = value.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=inside)
    if PADS:
        zero = tl.zeros_like(value)
        tl.store(out + at - C, zero, mask=inside & (voxel % Z == 0)[:, None])
        tl.store(out + at + C, zero, mask=inside & (voxel % Z == Z - 1)[:, None])


@triton.jit
def _normalize(
    x, y, weight, bias, means, rstds, V, C, Z, slope,
    PADS: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(2).to(tl.int64)
    voxel = tl.program_id(0).to(tl.int64) * BV + tl.arange(0, BV)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    inside = (voxel < V)[:, None] & known[None, :]
    at = (sample * V + voxel)[:, None] * C + channel[None, :]
    mean = tl.load(means + 2 * (sample * C + channel), mask=known, other=0.0)
    rest = tl.load(means + 2 * (sample * C + channel) + 1, mask=known, other=0.0)
    scale = tl.load(rstds + sample * C + channel, mask=known, other=0.0)
    scale = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = ((value - mean[None, :]) - rest[None, :]) * scale[None, :] + shift[None, :]
    value = tl.where(value > 0, value, value * slope)
    place = _place(sample, voxel, V, Z, PADS)
    _store(y, place, voxel, value, channel, inside, C, Z, PADS)


@triton.jit
def _sums(
    x, dy, weight, bias, means, rstds, sums, V, C, RUN, slope,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    mean = tl.load(means + 2 * (sample * C + channel), mask=known, other=0.0)
    rest = tl.load(means + 2 * (sample * C + channel) + 1, mask=known, other=0.0)
    rstd = tl.load(rstds + sample * C + channel, mask=known, other=0.0)
    scale = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    total_g = tl.zeros((BC,), tl.float32)
    total_gx = tl.zeros((BC,), tl.float32)
    first = run * RUN
    last = tl.minimum(first + RUN, V)
    for start in range(first, last, BV):
        voxel = start + tl.arange(0, BV)
        inside = (voxel < last)[:, None] & known[None, :]
        at = (sample * V + voxel)[:, None] * C + channel[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        normal = ((value - mean[None, :]) - rest[None, :]) * rstd[None, :]
        g = tl.where(normal * scale[None, :] + shift[None, :] > 0, g, g * slope)
        total_g += tl.sum(g, axis=0)
        total_gx += tl.sum(g * normal, axis=0)
    row = tl.num_programs(2) * C
    out = sums + run * 2 * row + sample * C + channel
    tl.store(out, total_g, mask=known)
    tl.store(out + row, total_gx, mask=known)


@triton.jit
def _total(sums, totals, C, P, BP: tl.constexpr, BC: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channel < C
    row = tl.num_programs(1) * C
    column = sample * C + channel
    total_g = tl.zeros((BC,), tl.float64)
    total_gx = tl.zeros((BC,), tl.float64)
    for start in range(0, P, BP):
        part = start + tl.arange(0, BP)
        inside = (part < P)[:, None] & known[None, :]
        at = sums + (part * 2 * row)[:, None] + column[None, :]
        total_g += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float64), axis=0)
        total_gx += tl.sum(tl.load(at + row, mask=inside, other=0.0).to(tl.float64), axis=0)
    tl.store(totals + column, total_g.to(tl.float32), mask=known)
    tl.store(totals + row + column, total_gx.to(tl.float32), mask=known)


@triton.jit
def _gradient(
    x, dy, dx, weight, bias, means, rstds, totals, COUNT, V, C, Z, slope,
    PADS: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(2).to(tl.int64)
    voxel = tl.program_id(0).to(tl.int64) * BV + tl.arange(0, BV)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    inside = (voxel < V)[:, None] & known[None, :]
    at = (sample * V + voxel)[:, None] * C + channel[None, :]
    mean = tl.load(means + 2 * (sample * C + channel), mask=known, other=0.0)
    rest = tl.load(means + 2 * (sample * C + channel) + 1, mask=known, other=0.0)
    rstd = tl.load(rstds + sample * C + channel, mask=known, other=0.0)
    at_g = totals + sample * C + channel
    mean_g = tl.load(at_g, mask=known, other=0.0) / COUNT
    mean_gx = tl.load(at_g + tl.num_programs(2) * C, mask=known, other=0.0) / COUNT
    scale = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    normal = ((value - mean[None, :]) - rest[None, :]) * rstd[None, :]
    g = tl.where(normal * scale[None, :] + shift[None, :] > 0, g, g * slope)
    value = (g - mean_g[None, :] - normal * mean_gx[None, :]) * (rstd * scale)[None, :]
    place = _place(sample, voxel, V, Z, PADS)
    _store(dx, place, voxel, value, channel, inside, C, Z, PADS)


MERGED_PARTS = 32
"""Parts that one program merges at a time."""


def moments(x: Tensor) -> Tensor:
    """Return the moments (P, 4, N, C) of the runs of a map."""
    grid, voxels, channels = _matrix(x)
    out = torch.empty((grid.runs, 4, *x.shape[:2]), dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        _moments[grid.over_runs](x, out, voxels, channels, grid.run, **_block(grid))
    return out


def merge(moments: Tensor, voxels: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (N, C, 2), 1 / deviation (N, C) and the merged moments (1, 4, N, C)."""
    parts, _, n, c = moments.shape
    grid = grid_of(n, c, 1)
    mean, rstd, merged = (
        moments.new_empty(shape) for shape in ((n, c, 2), (n, c), (1, *moments.shape[1:]))
    )
    with torch.cuda.device(moments.device):
        _merge[grid.over_channels](
            moments, mean, rstd, merged, voxels, c, parts, eps, **_parts(grid)
        )
    return mean, rstd, merged


def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    slope: float,
    pads: bool,
) -> Tensor:
    """Return the normalised map, with zeros around Z or not."""
    grid, *size = _matrix(x)
    y = empty_map(x, pads)
    given = (weight, bias, mean, rstd, *size, x.shape[-1], slope, pads)
    with torch.cuda.device(x.device):
        _normalize[grid.over_blocks](x, _start(y, pads), *given, **_block(grid))
    return y


def sums(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    slope: float,
) -> Tensor:
    """Return the sums (P, 2, N, C) over the runs of a map."""
    grid, *size = _matrix(x)
    out = torch.empty((grid.runs, 2, *x.shape[:2]), dtype=torch.float32, device=x.device)
    given = (weight, bias, mean, rstd, out, *size, grid.run, slope)
    with torch.cuda.device(x.device):
        _sums[grid.over_runs](x, dy, *given, **_block(grid))
    return out


def total(sums: Tensor) -> Tensor:
    """Return the sums (2, N, C) of all parts."""
    parts, _, n, c = sums.shape
    grid = grid_of(n, c, 1)
    out = sums.new_empty(sums.shape[1:])
    with torch.cuda.device(sums.device):
        _total[grid.over_channels](sums, out, c, parts, **_parts(grid))
    return out


def gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    total: Tensor,
    voxels: int,
    slope: float,
    pads: bool,
) -> Tensor:
    """Return the gradient of a map, with zeros around Z or not."""
    grid, *size = _matrix(x)
    dx = empty_map(x, pads)
    given = (weight, bias, mean, rstd, total, voxels, *size, x.shape[-1], slope, pads)
    with torch.cuda.device(x.device):
        _gradient[grid.over_blocks](x, dy, _start(dx, pads), *given, **_block(grid))
    return dx


def _matrix(x: Tensor) -> tuple[Grid, int, int]:
    """Return how a map is divided, and its voxels and channels."""
    n, c, *space = x.shape
    voxels = space[0] * space[1] * space[2]
    return grid_of(n, c, voxels), voxels, c


def _block(grid: Grid) -> dict[str, int]:
    return {"BV": grid.block_voxels, "BC": grid.block_channels}


def _parts(grid: Grid) -> dict[str, int]:
    return {"BP": MERGED_PARTS, "BC": grid.block_channels}


def _start(x: Tensor, pads: bool) -> Tensor:
    """Return a tensor that begins where a map's memory does."""
    return with_padding(x) if pads else x
