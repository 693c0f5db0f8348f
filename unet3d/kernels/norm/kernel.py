"""The Triton version of :mod:`unet3d.kernels.norm.api`, for channels-last volumes.

A volume is a matrix of V voxels by C channels. Forward::

    moments    each program takes a run of voxels: mean and sum of squared differences per channel
    combine    merges the runs of a channel (Chan, Golub and LeVeque, 1979): mean, 1 / deviation
    normalize  one pass over the matrix

Backward makes the normalised values again from x, so only x, mean and 1 / deviation are kept::

    sums       per run: of g and of g * normalised, where g is the gradient before LeakyReLU
    total      merges the runs
    gradient   one pass over the matrix

No atomics, so results are the same in every run. Differences are taken from the first voxel of
each run, and the mean is kept as two float32 numbers, so a mean far from zero costs no digits.
Offsets are 64 bits wide.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from unet3d.kernels.padding import empty_padded, with_padding

BLOCK_ELEMENTS = 4096
"""Of the matrix, in one program at a time: 32 values a thread with 4 warps."""
MAX_BLOCK_CHANNELS = 64
WANTED_PROGRAMS = 1056
"""Eight for each of an H100's 132 processors, so that none waits long for the last."""


@triton.jit
def _moments(x, shifts, means, squares, V, C, RUN, S, BV: tl.constexpr, BC: tl.constexpr):
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
    out = (sample * S + run) * C + channel
    tl.store(shifts + out, shift, mask=known)
    tl.store(means + out, mean, mask=known)
    tl.store(squares + out, square, mask=known)


@triton.jit
def _combine(
    shifts, means, squares, mean_out, rstd_out, V, C, RUN, S, eps,
    BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channel < C
    total = tl.zeros((BC,), tl.float64)
    for start in range(0, S, BS):
        run = start + tl.arange(0, BS)
        inside = (run < S)[:, None] & known[None, :]
        count = tl.minimum(RUN, V - run.to(tl.int64) * RUN).to(tl.float64)
        at = (sample * S + run)[:, None] * C + channel[None, :]
        mean = tl.load(means + at, mask=inside, other=0.0).to(tl.float64)
        mean += tl.load(shifts + at, mask=inside, other=0.0).to(tl.float64)
        total += tl.sum(tl.where(inside, mean * count[:, None], 0.0), axis=0)
    mean_all = total / V
    square_all = tl.zeros((BC,), tl.float64)
    for start in range(0, S, BS):
        run = start + tl.arange(0, BS)
        inside = (run < S)[:, None] & known[None, :]
        count = tl.minimum(RUN, V - run.to(tl.int64) * RUN).to(tl.float64)
        at = (sample * S + run)[:, None] * C + channel[None, :]
        mean = tl.load(means + at, mask=inside, other=0.0).to(tl.float64)
        mean += tl.load(shifts + at, mask=inside, other=0.0).to(tl.float64)
        square = tl.load(squares + at, mask=inside, other=0.0).to(tl.float64)
        away = mean - mean_all[None, :]
        square_all += tl.sum(tl.where(inside, square + away * away * count[:, None], 0.0), axis=0)
    rstd = 1.0 / tl.sqrt(square_all / V + eps)
    out = sample * C + channel
    # In float32 a mean of 1e4 is off by up to 5e-4; the rest is kept behind it.
    high = mean_all.to(tl.float32)
    tl.store(mean_out + 2 * out, high, mask=known)
    tl.store(mean_out + 2 * out + 1, (mean_all - high.to(tl.float64)).to(tl.float32), mask=known)
    tl.store(rstd_out + out, rstd.to(tl.float32), mask=known)


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
    x, dy, weight, bias, means, rstds, sum_g, sum_gx, V, C, RUN, S, slope,
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
    out = (sample * S + run) * C + channel
    tl.store(sum_g + out, total_g, mask=known)
    tl.store(sum_gx + out, total_gx, mask=known)


@triton.jit
def _total(sum_g, sum_gx, out_g, out_gx, C, S, BS: tl.constexpr, BC: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channel < C
    total_g = tl.zeros((BC,), tl.float64)
    total_gx = tl.zeros((BC,), tl.float64)
    for start in range(0, S, BS):
        run = start + tl.arange(0, BS)
        inside = (run < S)[:, None] & known[None, :]
        at = (sample * S + run)[:, None] * C + channel[None, :]
        total_g += tl.sum(tl.load(sum_g + at, mask=inside, other=0.0).to(tl.float64), axis=0)
        total_gx += tl.sum(tl.load(sum_gx + at, mask=inside, other=0.0).to(tl.float64), axis=0)
    out = sample * C + channel
    tl.store(out_g + out, total_g.to(tl.float32), mask=known)
    tl.store(out_gx + out, total_gx.to(tl.float32), mask=known)


@triton.jit
def _gradient(
    x, dy, dx, weight, bias, means, rstds, sum_g, sum_gx, V, C, Z, slope,
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
    mean_g = tl.load(sum_g + sample * C + channel, mask=known, other=0.0) / V
    mean_gx = tl.load(sum_gx + sample * C + channel, mask=known, other=0.0) / V
    scale = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    normal = ((value - mean[None, :]) - rest[None, :]) * rstd[None, :]
    g = tl.where(normal * scale[None, :] + shift[None, :] > 0, g, g * slope)
    value = (g - mean_g[None, :] - normal * mean_gx[None, :]) * (rstd * scale)[None, :]
    place = _place(sample, voxel, V, Z, PADS)
    _store(dx, place, voxel, value, channel, inside, C, Z, PADS)


class _Grid:
    """How the matrix is divided among programs."""

    def __init__(self, samples: int, channels: int, voxels: int) -> None:
        self.samples, self.channels, self.voxels = samples, channels, voxels
        self.block_channels = min(MAX_BLOCK_CHANNELS, triton.next_power_of_2(self.channels))
        self.block_voxels = BLOCK_ELEMENTS // self.block_channels
        self.channel_blocks = triton.cdiv(self.channels, self.block_channels)
        blocks = triton.cdiv(self.voxels, self.block_voxels)
        wanted = triton.cdiv(WANTED_PROGRAMS, self.samples * self.channel_blocks)
        self.run = triton.cdiv(blocks, wanted) * self.block_voxels
        self.runs = triton.cdiv(self.voxels, self.run)
        self.over_runs = (self.runs, self.channel_blocks, self.samples)
        self.over_blocks = (blocks, self.channel_blocks, self.samples)
        self.over_channels = (self.channel_blocks, self.samples)
        self.block = {"BV": self.block_voxels, "BC": self.block_channels}
        self.merge = {"BS": 32, "BC": self.block_channels}

    def per_run(self, x: Tensor) -> Tensor:
        shape = (self.samples, self.runs, self.channels)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def per_channel(self, x: Tensor, numbers: int = 1) -> Tensor:
        shape = (self.samples, self.channels * numbers)
        return torch.empty(shape, dtype=torch.float32, device=x.device)


_grid = functools.cache(_Grid)
"""Its arithmetic takes longer than a launch."""


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float, pads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, with zeros around Z or not, the mean as two numbers, and 1 / deviation."""
    x = _channels_last(x)
    grid = _grid(*x.shape[:2], x.shape[2:].numel())
    v, c = grid.voxels, grid.channels
    runs = (grid.per_run(x), grid.per_run(x), grid.per_run(x))
    mean, rstd = grid.per_channel(x, 2), grid.per_channel(x)
    with torch.cuda.device(x.device):
        _moments[grid.over_runs](x, *runs, v, c, grid.run, grid.runs, **grid.block)
        _combine[grid.over_channels](
            *runs, mean, rstd, v, c, grid.run, grid.runs, eps, **grid.merge
        )
    return normalize(x, weight, bias, mean, rstd, slope, pads), mean, rstd


def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    slope: float,
    pads: bool = False,
) -> Tensor:
    """Return y once more, from what forward returned."""
    x = _channels_last(x)
    grid = _grid(*x.shape[:2], x.shape[2:].numel())
    y = empty_padded(x) if pads else torch.empty_like(x)
    given = (weight, bias, mean, rstd, grid.voxels, grid.channels, x.shape[-1], slope, pads)
    with torch.cuda.device(x.device):
        _normalize[grid.over_blocks](x, _start(y, pads), *given, **grid.block)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    slope: float,
    pads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, with zeros around Z or not, weight and bias."""
    x, dy = _channels_last(x), _channels_last(dy)
    grid = _grid(*x.shape[:2], x.shape[2:].numel())
    v, c = grid.voxels, grid.channels
    dx = empty_padded(x) if pads else torch.empty_like(x)
    runs_g, runs_gx = grid.per_run(x), grid.per_run(x)
    sum_g, sum_gx = grid.per_channel(x), grid.per_channel(x)
    given = (weight, bias, mean, rstd)
    with torch.cuda.device(x.device):
        _sums[grid.over_runs](
            x, dy, *given, runs_g, runs_gx, v, c, grid.run, grid.runs, slope, **grid.block
        )
        _total[grid.over_channels](runs_g, runs_gx, sum_g, sum_gx, c, grid.runs, **grid.merge)
        sums = (sum_g, sum_gx, v, c, x.shape[-1], slope, pads)
        _gradient[grid.over_blocks](x, dy, _start(dx, pads), *given, *sums, **grid.block)
    return dx, sum_gx.sum(0).to(weight.dtype), sum_g.sum(0).to(bias.dtype)


def _start(x: Tensor, pads: bool) -> Tensor:
    """Return a tensor that begins where a map's memory does."""
    return with_padding(x) if pads else x
