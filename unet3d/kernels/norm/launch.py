"""The stages (:mod:`unet3d.kernels.norm.op`) on a GPU: memory and grids for the kernels."""

import torch
import triton
from torch import Tensor

from unet3d.kernels.maps import empty_map, has_room, with_padding
from unet3d.kernels.norm import kernel
from unet3d.kernels.norm.op import Grid, grid_of, merged_memory, per_run

SUMMING_WARPS = 8
"""Warps of a program that sums a run: more warps mean fewer sums per thread."""
MERGED_PARTS = 512
"""Parts that one program merges at a time."""
MERGED_CHANNELS = 8
"""Channels that one program merges."""

_MERGING = {"BP": MERGED_PARTS, "BC": MERGED_CHANNELS, "num_warps": 8}


def moments(x: Tensor, added: Tensor | None = None) -> Tensor:
    """Return the moments of x, or of its sum with another map; the sum is written over x."""
    grid, *size = matrix_of(x)
    out = per_run(x, 4)
    start, room, z = start_of_memory(x)
    adds = added is not None
    given = (start, added if adds else start, out, *size, grid.run, z, adds, room)
    with torch.cuda.device(x.device):
        kernel.moments[grid.over_runs](*given, **block_of(grid), num_warps=SUMMING_WARPS)
    return out


def merge(moments: Tensor, voxels: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, 1 / deviation and the merged moments of all parts."""
    parts, _, n, c = moments.shape
    made = merged_memory(moments)
    grid = (triton.cdiv(c, MERGED_CHANNELS), n)
    with torch.cuda.device(moments.device):
        kernel.merge[grid](moments, *made, voxels, c, parts, eps, **_MERGING)
    return made


def normalize(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    slope: float,
    pads: bool,
) -> None:
    """Write the normalised map to y, which is a whole map or some planes of a larger one."""
    if len(x) > 1 and y.stride(0) > y.shape[2] * y.stride(2):  # samples are not adjacent
        for at in range(len(x)):
            one_y, one_x, *own = (v.narrow(0, at, 1) for v in (y, x, mean, rstd))
            normalize(one_y, one_x, weight, bias, *own, slope=slope, pads=pads)
        return
    grid, *size = matrix_of(x)
    start, room, z = start_of_memory(x, pads)
    affine = (weight, bias, mean, rstd)
    given = (with_padding(y) if pads else y, *affine, *size, slope, z, room, pads)
    with torch.cuda.device(x.device):
        kernel.normalize[grid.over_blocks](start, *given, **block_of(grid))


def sums(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> Tensor:
    """Return the sums over the runs of a map."""
    grid, *size = matrix_of(x)
    out = per_run(x, 2)
    start, room, z = start_of_memory(x)
    given = (start, dy, *affine, out, *size, grid.run, slope, z, room)
    with torch.cuda.device(x.device):
        kernel.sums[grid.over_runs](*given, **block_of(grid), num_warps=SUMMING_WARPS)
    return out


def total(sums: Tensor) -> Tensor:
    """Return the sums over all parts."""
    parts, rows, n, c = sums.shape
    out = sums.new_empty(sums.shape[1:])
    grid = (triton.cdiv(c, MERGED_CHANNELS), n, rows)
    with torch.cuda.device(sums.device):
        kernel.total[grid](sums, out, c, parts, rows, **_MERGING)
    return out


def gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    head: Tensor | None = None,
    *,
    total: Tensor,
    voxels: int,
    slope: float,
    pads: bool,
) -> Tensor:
    """Return the gradient of x, from dy, the gradient of the result or of a head's logits."""
    grid, *size = matrix_of(x)
    dx = empty_map(x, pads)
    start, room, z = start_of_memory(x, pads)
    out = with_padding(dx) if pads else dx
    classes = 0 if head is None else len(head)
    affine = (weight, bias, mean, rstd, start if head is None else head)
    given = (start, dy, out, *affine, total, voxels, *size, slope, z, room, pads, classes)
    with torch.cuda.device(x.device):
        kernel.gradient[grid.over_blocks](*given, **block_of(grid))
    return dx


def matrix_of(x: Tensor) -> tuple[Grid, int, int]:
    """Return the division of a map, and its voxels and channels."""
    n, c, *space = x.shape
    voxels = space[0] * space[1] * space[2]
    return grid_of(n, c, voxels), voxels, c


def block_of(grid: Grid) -> dict[str, int]:
    """Return the size of a block, as arguments of the kernels."""
    return {"BV": grid.block_voxels, "BC": grid.block_channels}


def start_of_memory(x: Tensor, pads: bool = False) -> tuple[Tensor, bool, int]:
    """Return a tensor at the start of a map's memory, whether it has room around Z, and Z.

    Z is 1 if a kernel needs it neither for room nor for padding, because each value compiles
    another kernel.
    """
    room = has_room(x)
    return with_padding(x) if room else x, room, x.shape[-1] if room or pads else 1
