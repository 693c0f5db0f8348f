"""Memory and grids for the kernels of a normalisation with its head."""

from typing import Any

import torch
import triton
from torch import Tensor

from unet3d.kernels.norm.launch import SUMMING_WARPS, block_of, matrix_of, row_of, start_of_memory
from unet3d.kernels.norm_head import kernel
from unet3d.kernels.padding import empty_map

MIN_CLASSES = 16
"""A matrix unit multiplies no fewer; those that are not there are zeros."""


def logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    head: Tensor,
    head_bias: Tensor,
    *,
    slope: float,
) -> Tensor:
    """Return the logits (N, K, X, Y, Z) of a map."""
    grid, voxels, channels = matrix_of(x)
    classes = len(head)
    like = torch.channels_last_3d
    y = torch.empty(
        (len(x), classes, *x.shape[2:]), dtype=x.dtype, device=x.device, memory_format=like
    )
    given = (weight, bias, mean, rstd, head, head_bias, voxels, channels, classes, slope)
    with torch.cuda.device(x.device):
        kernel.logits[(grid.over_blocks[0], len(x))](
            x, y, *given, **block_of(grid), **_classes(head)
        )
    return y


def sums(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    head: Tensor,
    *,
    slope: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums (P, 2 + K, N, C) and (P, N, K) over the runs of a map."""
    grid, *size = matrix_of(x)
    n, c = x.shape[:2]
    classes = len(head)
    out = torch.empty((grid.runs, 2 + classes, n, c), dtype=torch.float32, device=x.device)
    ends = torch.empty((grid.runs, n, classes), dtype=torch.float32, device=x.device)
    given = (weight, bias, mean, rstd, head, out, ends, *size, classes, grid.run, slope)
    with torch.cuda.device(x.device):
        kernel.sums[(grid.runs, n)](
            x, dy, *given, **block_of(grid), **_classes(head), num_warps=SUMMING_WARPS
        )
    return out, ends


def gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    head: Tensor,
    *,
    total: Tensor,
    voxels: int,
    slope: float,
    pads: bool,
) -> Tensor:
    """Return the gradient of a map, with zeros around Z or not."""
    grid, *size = matrix_of(x)
    dx = empty_map(x, pads)
    given = (weight, bias, mean, rstd, head, total, voxels, *size, len(head), slope)
    options: dict[str, Any] = {"Z": row_of(x, pads), "PADS": pads}
    with torch.cuda.device(x.device):
        kernel.gradient[(grid.over_blocks[0], len(x))](
            x, dy, start_of_memory(dx, pads), *given, **options, **block_of(grid), **_classes(head)
        )
    return dx


def _classes(head: Tensor) -> dict[str, int]:
    return {"BK": max(MIN_CLASSES, triton.next_power_of_2(len(head)))}
