"""The first convolution of a network, from very few channels, in Triton.

cuDNN has no tensor-core kernel for one input channel. Here the 27 neighbours of a voxel are the
rows of a matrix product that is never stored: each program gathers them for a run of voxels, which
stay in the cache, so almost all that remains is to write the result once. Voxels of a sample are
counted in 32 bits, because dividing 64 takes longer than gathering.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_VOXELS = 128
WANTED_PROGRAMS = 1056


@triton.jit
def offsets(voxel, k, BEFORE, X, Y, Z, CI: tl.constexpr):
    """Return for voxels and neighbours, which broadcast, where they are and whether inside."""
    tap = k // CI
    dx = tap // 9 - BEFORE
    dy = tap // 3 % 3 - 1
    dz = tap % 3 - 1
    z = voxel % Z + dz
    y = voxel // Z % Y + dy
    x = voxel // (Y * Z) + dx
    inside = (x >= 0) & (x < X) & (y >= 0) & (y < Y) & (z >= 0) & (z < Z) & (k < 27 * CI)
    return (voxel + (dx * Y + dy) * Z + dz) * CI + k % CI, inside


@triton.jit
def _forward(
    x, w, y, BEFORE, X, Y, Z, V, CO,
    CI: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BV
    row = tl.arange(0, BV)
    voxel = first + row
    k = tl.arange(0, K)
    o = tl.arange(0, BO)
    at, inside = offsets(voxel[:, None], k[None, :], BEFORE, X, Y, Z, CI)
    start = x + sample * X * Y * Z * CI
    values = tl.load(start + at, mask=inside & (voxel < V)[:, None], other=0.0)
    known = (k < 27 * CI)[:, None] & (o < CO)[None, :]
    matrix = tl.load(w + k[:, None] * CO + o[None, :], mask=known, other=0.0)
    out = tl.dot(values, matrix)
    y += (sample * V + first) * CO
    place = row[:, None] * CO + o[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=(voxel < V)[:, None] & (o < CO)[None, :])


@triton.jit
def _weights(
    x, dy, partial, BEFORE, X, Y, Z, V, CO, RUN, S,
    CI: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K)
    o = tl.arange(0, BO)
    row = tl.arange(0, BV)
    x += sample * X * Y * Z * CI
    total = tl.zeros((K, BO), tl.float32)
    first = run * RUN
    last = tl.minimum(first + RUN, V)
    for start in range(first, last, BV):
        voxel = start + row
        at, inside = offsets(voxel[None, :], k[:, None], BEFORE, X, Y, Z, CI)
        values = tl.load(x + at, mask=inside & (voxel < last)[None, :], other=0.0)
        place = dy + (sample * V + start) * CO + row[:, None] * CO + o[None, :]
        given = (voxel < last)[:, None] & (o < CO)[None, :]
        total += tl.dot(values, tl.load(place, mask=given, other=0.0))
    out = (sample * S + run) * K * BO + k[:, None] * BO + o[None, :]
    tl.store(partial + out, total)


def forward(x: Tensor, weight: Tensor, before: int, after: int) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, 3, 3, 3), with so many planes of zeros around X."""
    x = x.contiguous(memory_format=torch.channels_last_3d)
    n, i, *space = x.shape
    o = weight.shape[0]
    matrix = weight.permute(2, 3, 4, 1, 0).reshape(27 * i, o).contiguous()
    planes = space[0] + before + after - 2
    y = torch.empty(
        (n, o, planes, *space[1:]),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last_3d,
    )
    voxels = planes * space[1] * space[2]
    grid = (triton.cdiv(voxels, BLOCK_VOXELS), n)
    with torch.cuda.device(x.device):
        _forward[grid](x, matrix, y, before, *space, voxels, o, **_sizes(i, o))
    return y


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, before: int) -> Tensor:
    """Return the gradient of the weights; the arguments are those of :func:`forward`."""
    x, dy = (value.contiguous(memory_format=torch.channels_last_3d) for value in (x, dy))
    runs, partial, sizes = parts_of_weights(dy, x)
    given = (before, *x.shape[2:], *runs)
    with torch.cuda.device(x.device):
        _weights[(runs[-1], len(x))](x, dy, partial, *given, **sizes)
    return sum_of_parts(partial, weight)


def parts_of_weights(
    dy: Tensor, x: Tensor
) -> tuple[tuple[int, int, int, int], Tensor, dict[str, int]]:
    """Return how the gradient of the weights is divided among programs.

    V, CO, RUN and S, as kernels take them; memory for the parts; and the sizes of blocks.
    """
    n, o = dy.shape[:2]
    sizes = _sizes(x.shape[1], o)
    voxels = dy.shape[2] * dy.shape[3] * dy.shape[4]
    run = triton.cdiv(triton.cdiv(voxels, WANTED_PROGRAMS), BLOCK_VOXELS) * BLOCK_VOXELS
    runs = triton.cdiv(voxels, run)
    partial = torch.empty((n * runs, sizes["K"], sizes["BO"]), device=x.device)
    return (voxels, o, run, runs), partial, sizes


def sum_of_parts(partial: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weights from its parts."""
    o, i = weight.shape[:2]
    matrix = partial.sum(0)[: 27 * i, :o]
    return matrix.view(3, 3, 3, i, o).permute(4, 3, 0, 1, 2).to(weight.dtype).contiguous()


def _sizes(inputs: int, outputs: int) -> dict[str, int]:
    return {
        "CI": inputs,
        "K": triton.next_power_of_2(27 * inputs),
        "BV": BLOCK_VOXELS,
        "BO": max(16, triton.next_power_of_2(outputs)),
    }
