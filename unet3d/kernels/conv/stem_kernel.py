"""The first convolution of a network, from very few channels, in Triton.

cuDNN has no tensor-core kernel for one input channel. Here the neighbours of voxels are the rows of
a matrix that is never stored, only multiplied. A tile is a run of voxels, in memory order, of a
plane along Y and Z, and a program moves it along X. So the places of a voxel's nine neighbours in a
plane are computed once for all planes, and each plane is read once. Programs take equal runs of the
planes of all tiles, in order of tiles. A program also sums its run for moments, as a program of a
normalisation does (:mod:`unet3d.kernels.norm.kernel`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unet3d.kernels.conv.stem_op import (
    FORWARD,
    WEIGHTS,
    Launch,
    division_of,
    empty_moments,
    launch_of,
)
from unet3d.kernels.maps import empty_result
from unet3d.kernels.norm.blocks import gradient_of, load_gradient


@triton.jit
def tile_of(tile, Y, Z, CI: tl.constexpr, K: tl.constexpr, BV: tl.constexpr):
    """Return where in a plane the neighbours (BV, K) of a tile's voxels are, and which exist.

    Voxels of the tile behind the plane's last voxel have no neighbours.
    """
    voxel = (tile * BV + tl.arange(0, BV))[:, None]
    k = tl.arange(0, K)[None, :]
    dy = k // (3 * CI) - 1
    dz = k // CI % 3 - 1
    y = voxel // Z
    z = voxel % Z + dz
    inside = (y < Y) & (y + dy >= 0) & (y + dy < Y) & (z >= 0) & (z < Z) & (k < 9 * CI)
    return (voxel + dy * Z + dz) * CI + k % CI, inside


@triton.jit
def load_plane(x, number, at, inside, X, Y, Z, CI: tl.constexpr):
    """Load the neighbours in one plane of a sample, which may be a plane of zeros around it."""
    inside &= (number >= 0) & (number < X)
    return tl.load(x + number * (Y * Z * CI) + at, mask=inside, other=0.0)


@triton.jit
def sum_pairs(value):
    """Add up pairs of rows of a product (BV, C), eight rows apart: both are in one thread."""
    return tl.sum(tl.reshape(value, (value.shape[0] // 16, 2, 8, value.shape[1])), axis=1)


@triton.jit
def _forward(
    x, w, y, moments, X, Y, Z, PLANES, TILES, RUN, CO,
    BEFORE: tl.constexpr, CI: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BO: tl.constexpr,
    MOMENTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BV)
    k = tl.arange(0, K)
    o = tl.arange(0, BO)
    known = o < CO
    x += sample * X * Y * Z * CI
    # A matrix for each of the three planes that a voxel reads.
    w += k[:, None] * CO + o[None, :]
    has_weight = (k < 9 * CI)[:, None] & known[None, :]
    w0 = tl.load(w, mask=has_weight, other=0.0)
    w1 = tl.load(w + 9 * CI * CO, mask=has_weight, other=0.0)
    w2 = tl.load(w + 18 * CI * CO, mask=has_weight, other=0.0)
    shift = tl.zeros((BO,), tl.float32)
    one = tl.zeros((BV // 16, 8, BO), tl.float32)
    two = tl.zeros((BV // 16, 8, BO), tl.float32)
    count = 0
    start = program * RUN
    end = tl.minimum(start + RUN, TILES * PLANES)
    for tile in range(start // PLANES, tl.cdiv(end, PLANES)):
        first = tl.maximum(start - tile * PLANES, 0)
        last = tl.minimum(end - tile * PLANES, PLANES)
        at, inside = tile_of(tile, Y, Z, CI, K, BV)
        voxels = tl.minimum(Y * Z - tile * BV, BV)
        stored = (row < voxels)[:, None] & known[None, :]
        is_voxel = (row < voxels).to(tl.float32)
        a = load_plane(x, first - BEFORE, at, inside, X, Y, Z, CI)
        b = load_plane(x, first - BEFORE + 1, at, inside, X, Y, Z, CI)
        c = load_plane(x, first - BEFORE + 2, at, inside, X, Y, Z, CI)
        for plane in range(first, last):
            following = load_plane(x, plane - BEFORE + 3, at, inside, X, Y, Z, CI)
            out = tl.dot(c, w2, tl.dot(b, w1, tl.dot(a, w0)))
            voxel = (sample * PLANES + plane) * (Y * Z) + tile * BV
            place = y + voxel * CO + (row[:, None] * CO + o[None, :])
            tl.store(place, out.to(y.dtype.element_ty), mask=stored)
            if MOMENTS:
                if tile * PLANES + plane == start:
                    shift = tl.sum(out, axis=0) / voxels.to(tl.float32)
                out -= is_voxel[:, None] * shift[None, :]  # 0 - 0 where there is no voxel
                one += sum_pairs(out)
                two += sum_pairs(out * out)
            a = b
            b = c
            c = following
        count += voxels * (last - first)
    if MOMENTS:
        one = tl.sum(one, axis=0)
        two = tl.sum(two, axis=0)
        number = 1.0 * count
        away = tl.sum(one, axis=0) / number
        variance = tl.sum(two, axis=0) / number - away * away
        line = tl.num_programs(1) * CO
        moments += program.to(tl.int64) * 4 * line + sample * CO + o
        tl.store(moments, tl.zeros((BO,), tl.float32) + number, mask=known)
        tl.store(moments + line, tl.maximum(variance, 0.0), mask=known)
        tl.store(moments + 2 * line, shift, mask=known)
        tl.store(moments + 3 * line, away, mask=known)


@triton.jit
def _weights(
    x, dy, y, weight, bias, means, rstds, totals, partial, COUNT, slope,
    X, Y, Z, PLANES, TILES, RUN, CO,
    BEFORE: tl.constexpr, CI: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BO: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BV)
    k = tl.arange(0, K)
    o = tl.arange(0, BO)
    known = o < CO
    x += sample * X * Y * Z * CI
    if HAS_NORM:
        samples = tl.num_programs(1)
        mean, scale, shift, slant, level = load_gradient(
            weight, bias, means, rstds, totals, sample, samples, o, known, CO, COUNT
        )
        shift -= mean * scale  # exact enough for 16-bit numbers without x - mean
        level -= mean * slant
    total0 = tl.zeros((K, BO), tl.float32)
    total1 = tl.zeros((K, BO), tl.float32)
    total2 = tl.zeros((K, BO), tl.float32)
    start = program * RUN
    end = tl.minimum(start + RUN, TILES * PLANES)
    for tile in range(start // PLANES, tl.cdiv(end, PLANES)):
        first = tl.maximum(start - tile * PLANES, 0)
        last = tl.minimum(end - tile * PLANES, PLANES)
        at, inside = tile_of(tile, Y, Z, CI, K, BV)
        given = (row < Y * Z - tile * BV)[:, None] & known[None, :]
        a = load_plane(x, first - BEFORE, at, inside, X, Y, Z, CI)
        b = load_plane(x, first - BEFORE + 1, at, inside, X, Y, Z, CI)
        c = load_plane(x, first - BEFORE + 2, at, inside, X, Y, Z, CI)
        for plane in range(first, last):
            following = load_plane(x, plane - BEFORE + 3, at, inside, X, Y, Z, CI)
            voxel = (sample * PLANES + plane) * (Y * Z) + tile * BV
            place = voxel * CO + (row[:, None] * CO + o[None, :])
            g = tl.load(dy + place, mask=given, other=0.0)
            if HAS_NORM:
                value = tl.load(y + place, mask=given, other=0.0).to(tl.float32)
                value = gradient_of(g.to(tl.float32), value, scale, shift, slant, level, slope)
                g = value.to(g.dtype)  # where there is no voxel, it has no neighbours either
            total0 = tl.dot(tl.trans(a), g, total0)
            total1 = tl.dot(tl.trans(b), g, total1)
            total2 = tl.dot(tl.trans(c), g, total2)
            a = b
            b = c
            c = following
    out = partial + (sample * tl.num_programs(0) + program) * 3 * K * BO
    out += k[:, None] * BO + o[None, :]
    tl.store(out, total0)
    tl.store(out + K * BO, total1)
    tl.store(out + 2 * K * BO, total2)


def forward(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, 3, 3, 3), with ``padding`` planes of zeros around X."""
    return _convolve(x, weight, padding, None)


def forward_with_moments(x: Tensor, weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Convolve as :func:`forward` does, and return the moments of the result too."""
    moments = empty_moments(x, weight, padding)
    return _convolve(x, weight, padding, moments), moments


def _convolve(x: Tensor, weight: Tensor, padding: int, moments: Tensor | None) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last_3d)
    o, i = weight.shape[:2]
    y = empty_result(x, o, x.shape[2] + 2 * padding - 2)
    matrix = weight.permute(2, 3, 4, 1, 0).reshape(27 * i, o).contiguous()
    makes = moments is not None
    grid, sizes, options = _divided(launch_of(FORWARD, weight), x, y, padding)
    with torch.cuda.device(x.device):
        _forward[grid](x, matrix, y, moments if makes else y, *sizes, MOMENTS=makes, **options)
    return y


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    *affine: Tensor | None,
    total: Tensor | None,
    voxels: int,
    kernel: Tensor,
    padding: int,
    slope: float,
) -> Tensor:
    """Return the gradient of the weights (O, I, 3, 3, 3).

    If y is given, it is the convolution's result, and dy is the gradient of y after a normalisation
    with LeakyReLU.
    """
    x, dy = (value.contiguous(memory_format=torch.channels_last_3d) for value in (x, dy))
    grid, sizes, options = _divided(launch_of(WEIGHTS, kernel), x, dy, padding)
    partial = dy.new_empty((len(x) * grid[0], 3, options["K"], options["BO"]), dtype=torch.float32)
    maps = (dy,) * 6 if y is None else (y, *affine, total)
    with torch.cuda.device(x.device):
        _weights[grid](
            x, dy, *maps, partial, voxels, slope, *sizes, HAS_NORM=y is not None, **options
        )
    o, i = kernel.shape[:2]
    matrix = partial.sum(0)[:, : 9 * i, :o]
    return matrix.reshape(3, 3, 3, i, o).permute(4, 3, 0, 1, 2).to(kernel.dtype).contiguous()


def _divided(
    launch: Launch, x: Tensor, y: Tensor, padding: int
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """Return the grid, and the sizes and constants that kernels take, for an image and a result."""
    n, i, *space = x.shape
    o, planes = y.shape[1:3]
    tiles, run, runs = division_of(launch, n, planes, space[1] * space[2])
    options = {
        "BEFORE": padding,  # a constant: otherwise the kernel takes half as long again with 0
        "CI": i,
        "K": triton.next_power_of_2(9 * i),
        "BV": launch.block_voxels,
        "BO": max(16, triton.next_power_of_2(o)),
        "num_warps": launch.warps,
        "maxnreg": launch.registers,
    }
    return (runs, n), (*space, planes, tiles, run, o), options
