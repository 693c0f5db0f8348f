"""The stages (:mod:`unet3d.kernels.norm.stages`) on a GPU: memory and grids for the kernels."""

import torch
import triton
from torch import Tensor

from unet3d.kernels.norm import kernel
from unet3d.kernels.norm.grid import Grid, grid_of
from unet3d.kernels.padding import empty_map, has_room, with_padding

SUMMING_WARPS = 8
"""Warps of a program that adds up a run: fewer sums a thread, so more of them at a time."""
MERGED_PARTS = 512
"""Parts that one program merges at a time."""
MERGED_CHANNELS = 8
"""Channels that one program merges."""


def moments(x: Tensor) -> Tensor:
    """Return the moments (P, 4, N, C) of the runs of a map."""
    return _moments(x, None)


def sum_moments(x: Tensor, added: Tensor) -> Tensor:
    """Add a map to x, in its memory, and return the moments (P, 4, N, C) of the sum."""
    return _moments(x, added)


def _moments(x: Tensor, added: Tensor | None) -> Tensor:
    grid, *size = matrix_of(x)
    adds = added is not None
    out = torch.empty((grid.runs, 4, *x.shape[:2]), dtype=torch.float32, device=x.device)
    start, room = start_of_memory(x)
    given = (start, added if adds else start, out, *size, grid.run, row_of(x, room), adds, room)
    with torch.cuda.device(x.device):
        kernel.moments[grid.over_runs](*given, **block_of(grid), num_warps=SUMMING_WARPS)
    return out


def merge(moments: Tensor, voxels: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (N, C, 2), 1 / deviation (N, C) and the merged moments (1, 4, N, C)."""
    parts, _, n, c = moments.shape
    mean, rstd, merged = (
        moments.new_empty(shape) for shape in ((n, c, 2), (n, c), (1, *moments.shape[1:]))
    )
    grid = (triton.cdiv(c, MERGED_CHANNELS), n)
    with torch.cuda.device(moments.device):
        kernel.merge[grid](moments, mean, rstd, merged, voxels, c, parts, eps, **_parts())
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
    y = empty_map(x, pads)
    _normalize(y, x, weight, bias, mean, rstd, slope=slope, pads=pads)
    return y


def normalize_into(
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
    """Write the normalised map to planes of a larger one, with zeros around Z or not."""
    for at in range(len(x)):  # between two samples lie planes that are not written
        own_y, own_x, own_mean, own_rstd = (v.narrow(0, at, 1) for v in (y, x, mean, rstd))
        _normalize(own_y, own_x, weight, bias, own_mean, own_rstd, slope=slope, pads=pads)


def _normalize(
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
    grid, *size = matrix_of(x)
    start, room = start_of_memory(x)
    given = (weight, bias, mean, rstd, *size, slope, row_of(x, room or pads), room, pads)
    with torch.cuda.device(x.device):
        kernel.normalize[grid.over_blocks](start, memory_of(y, pads), *given, **block_of(grid))


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
    grid, *size = matrix_of(x)
    out = torch.empty((grid.runs, 2, *x.shape[:2]), dtype=torch.float32, device=x.device)
    start, room = start_of_memory(x)
    given = (weight, bias, mean, rstd, out, *size, grid.run, slope, row_of(x, room), room)
    with torch.cuda.device(x.device):
        kernel.sums[grid.over_runs](start, dy, *given, **block_of(grid), num_warps=SUMMING_WARPS)
    return out


def total(sums: Tensor) -> Tensor:
    """Return the sums (R, N, C) of all parts (P, R, N, C)."""
    parts, rows, n, c = sums.shape
    out = sums.new_empty(sums.shape[1:])
    grid = (triton.cdiv(c, MERGED_CHANNELS), n, rows)
    with torch.cuda.device(sums.device):
        kernel.total[grid](sums, out, c, parts, rows, **_parts())
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
    grid, *size = matrix_of(x)
    dx = empty_map(x, pads)
    start, room = start_of_memory(x)
    z = row_of(x, room or pads)
    given = (weight, bias, mean, rstd, total, voxels, *size, slope, z, room, pads)
    with torch.cuda.device(x.device):
        kernel.gradient[grid.over_blocks](start, dy, memory_of(dx, pads), *given, **block_of(grid))
    return dx


def matrix_of(x: Tensor) -> tuple[Grid, int, int]:
    """Return how a map is divided, and its voxels and channels."""
    n, c, *space = x.shape
    voxels = space[0] * space[1] * space[2]
    return grid_of(n, c, voxels), voxels, c


def block_of(grid: Grid) -> dict[str, int]:
    """Return the size of a block, as kernels take it."""
    return {"BV": grid.block_voxels, "BC": grid.block_channels}


def row_of(x: Tensor, counts: bool) -> int:
    """Return the voxels along Z where a kernel must know them; each number is another kernel."""
    return x.shape[-1] if counts else 1


def memory_of(x: Tensor, has_padding: bool) -> Tensor:
    """Return a tensor that begins where a map's memory does."""
    return with_padding(x) if has_padding else x


def start_of_memory(x: Tensor) -> tuple[Tensor, bool]:
    """Return a tensor that begins where a map's memory does, and whether it has room around Z."""
    room = has_room(x)
    return memory_of(x, room), room


def _parts() -> dict[str, int]:
    return {"BP": MERGED_PARTS, "BC": MERGED_CHANNELS, "num_warps": 8}
