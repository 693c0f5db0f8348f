"""Memory and grids for the kernels of a normalisation with its head."""

from typing import Any

import torch
import triton
from torch import Tensor

from unet3d.kernels.norm.launch import matrix_of, memory_of, row_of, start_of_memory
from unet3d.kernels.norm_head import kernel
from unet3d.kernels.padding import empty_map

LOGITS_ELEMENTS = 8192
"""Elements of a block that logits are made from."""
GRADIENT_ELEMENTS = 4096
"""Elements of a block that a gradient is made for."""
SUMMED_NUMBERS = 5 * 4096
"""Most numbers that a program adds up at a time: 160 a thread."""


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
    shape = (len(x), len(head), *x.shape[2:])
    layout = torch.channels_last_3d
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    start, room = start_of_memory(x)
    block = LOGITS_ELEMENTS // grid.block_channels
    given = (weight, bias, mean, rstd, head, head_bias, voxels, channels, slope, row_of(x, room))
    sizes = {"ROOM": room, "K": len(head), "BV": block, "BC": grid.block_channels}
    with torch.cuda.device(x.device):
        kernel.logits[(triton.cdiv(voxels, block), len(x))](start, y, *given, **sizes)
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
    start, room = start_of_memory(x)
    given = (weight, bias, mean, rstd, head, out, ends, *size, grid.run, slope, row_of(x, room))
    most = SUMMED_NUMBERS // (2 + classes) // grid.block_channels
    block = 1 << (most.bit_length() - 1)
    sizes = {"ROOM": room, "K": classes, "BV": block, "BC": grid.block_channels}
    with torch.cuda.device(x.device):
        kernel.sums[(grid.runs, n)](start, dy, *given, **sizes)
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
    start, room = start_of_memory(x)
    block = GRADIENT_ELEMENTS // grid.block_channels
    given = (weight, bias, mean, rstd, head, total, voxels, *size, slope, row_of(x, room or pads))
    options: dict[str, Any] = {"ROOM": room, "PADS": pads, "K": len(head)}
    sizes = {"BV": block, "BC": grid.block_channels}
    with torch.cuda.device(x.device):
        kernel.gradient[(triton.cdiv(size[0], block), len(x))](
            start, dy, memory_of(dx, pads), *given, **options, **sizes
        )
    return dx
