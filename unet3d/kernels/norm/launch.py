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
    grid, voxels, channels = matrix_of(x)
    out = torch.empty((grid.runs, 4, *x.shape[:2]), dtype=torch.float32, device=x.device)
    given = (x, x, x, out, voxels, channels, grid.run)
    with torch.cuda.device(x.device):
        kernel.moments[grid.over_runs](
            *given, Z=1, ADDS=False, PADS=False, **block_of(grid), num_warps=SUMMING_WARPS
        )
    return out


def sum_moments(x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of two maps, and its moments (P, 4, N, C)."""
    grid, voxels, channels = matrix_of(added)
    total = empty_map(added, pads=False)
    out = torch.empty((grid.runs, 4, *x.shape[:2]), dtype=torch.float32, device=x.device)
    pads = has_room(x)
    given = (start_of_memory(x, pads), added, total, out, voxels, channels, grid.run)
    with torch.cuda.device(x.device):
        kernel.moments[grid.over_runs](
            *given,
            Z=row_of(x, pads),
            ADDS=True,
            PADS=pads,
            **block_of(grid),
            num_warps=SUMMING_WARPS,
        )
    return total, out


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
    grid, *size = matrix_of(x)
    y = empty_map(x, pads)
    given = (weight, bias, mean, rstd, *size, slope, row_of(x, pads), pads)
    with torch.cuda.device(x.device):
        kernel.normalize[grid.over_blocks](x, start_of_memory(y, pads), *given, **block_of(grid))
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
    grid, *size = matrix_of(x)
    out = torch.empty((grid.runs, 2, *x.shape[:2]), dtype=torch.float32, device=x.device)
    given = (weight, bias, mean, rstd, out, *size, grid.run, slope)
    with torch.cuda.device(x.device):
        kernel.sums[grid.over_runs](x, dy, *given, **block_of(grid), num_warps=SUMMING_WARPS)
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
    given = (weight, bias, mean, rstd, total, voxels, *size, slope, row_of(x, pads), pads)
    with torch.cuda.device(x.device):
        kernel.gradient[grid.over_blocks](
            x, dy, start_of_memory(dx, pads), *given, **block_of(grid)
        )
    return dx


def matrix_of(x: Tensor) -> tuple[Grid, int, int]:
    """Return how a map is divided, and its voxels and channels."""
    n, c, *space = x.shape
    voxels = space[0] * space[1] * space[2]
    return grid_of(n, c, voxels), voxels, c


def block_of(grid: Grid) -> dict[str, int]:
    """Return the size of a block, as kernels take it."""
    return {"BV": grid.block_voxels, "BC": grid.block_channels}


def row_of(x: Tensor, pads: bool) -> int:
    """Return the voxels along Z where a kernel must know them; each number is another kernel."""
    return x.shape[-1] if pads else 1


def start_of_memory(x: Tensor, pads: bool) -> Tensor:
    """Return a tensor that begins where a map's memory does."""
    return with_padding(x) if pads else x


def _parts() -> dict[str, int]:
    return {"BP": MERGED_PARTS, "BC": MERGED_CHANNELS, "num_warps": 8}
