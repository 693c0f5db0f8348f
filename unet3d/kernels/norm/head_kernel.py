"""A normalisation with LeakyReLU and the head that reads it, in Triton.

The head mixes the channels of a voxel, so neither the normalised map nor its gradient is stored:
both follow from x and the gradients of a voxel's few logits. Forward and backward read x instead of
writing and reading maps of its size::

    logits     one pass: normalises a block and multiplies it by the head's matrix
    sums       per run: the sums of g and of g * normalised, where g is the gradient before
               LeakyReLU, computed from the gradient of the logits; and the contributions to the
               gradients of the head's weight and bias

The gradient of x is a stage of the normalisation (:mod:`unet3d.kernels.norm.kernel`, which also
explains ROOM and Z). It computes the same g.

Blocks hold all channels of a voxel. Classes are unrolled: for a few, a matrix unit would multiply
mostly zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unet3d.kernels.maps import empty_result
from unet3d.kernels.norm.blocks import (
    before_head,
    load_affine,
    load_block,
    normalized,
    start_of,
)
from unet3d.kernels.norm.head import empty_sums
from unet3d.kernels.norm.launch import matrix_of, start_of_memory

LOGITS_ELEMENTS = 8192
"""Elements of a block of the kernel that makes logits."""
SUMMED_NUMBERS = 5 * 4096
"""Most sums of a program at a time: 160 per thread."""


@triton.jit
def logits(
    x, y, weight, bias, means, rstds, head, head_bias, V, C, slope,
    Z: tl.constexpr, ROOM: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the logits of a block."""
    sample = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BV
    row = tl.arange(0, BV)
    channel = tl.arange(0, BC)
    known = channel < C
    is_voxel = row < V - first
    inside = is_voxel[:, None] & known[None, :]
    x += start_of(sample, V, Z, ROOM) * C
    value = load_block(x, first, row, channel, inside, C, Z, ROOM)
    mean, scale, shift, _, _ = load_affine(weight, bias, means, rstds, sample, channel, known, C)
    value = normalized(value, mean, scale, shift, slope)
    y += (sample * V + first) * K
    for k in tl.static_range(K):
        of_class = tl.load(head + k * C + channel, mask=known, other=0.0).to(tl.float32)
        made = tl.sum(value * of_class[None, :], axis=1) + tl.load(head_bias + k).to(tl.float32)
        tl.store(y + row * K + k, made.to(y.dtype.element_ty), mask=is_voxel)


@triton.jit
def sums(
    x, dy, weight, bias, means, rstds, head, sums, ends, V, C, RUN, slope,
    Z: tl.constexpr, ROOM: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the sums over a run."""
    run = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BV)
    channel = tl.arange(0, BC)
    known = channel < C
    affine = load_affine(weight, bias, means, rstds, sample, channel, known, C)
    mean, scale, shift, rest, rstd = affine
    first = run * RUN
    count = tl.minimum(RUN, V - first).to(tl.int32)
    x += start_of(sample, V, Z, ROOM) * C
    dy += (sample * V + first) * K
    one = tl.zeros((BV, BC), tl.float32)
    two = tl.zeros((BV, BC), tl.float32)
    of_head = ()
    of_bias = ()
    for _ in tl.static_range(K):
        of_head = of_head + (tl.zeros((BV, BC), tl.float32),)
        of_bias = of_bias + (tl.zeros((BV,), tl.float32),)
    for start in range(0, count, BV):
        is_voxel = row < count - start
        inside = is_voxel[:, None] & known[None, :]
        block = load_block(x, first + start, row, channel, inside, C, Z, ROOM)
        value = tl.where(inside, block - mean[None, :], 0.0)
        at = dy + start * K
        g = before_head(at, head, row, is_voxel, channel, known, C, BV, BC, K)
        before = value * scale[None, :] + shift[None, :]
        normal = tl.where(before > 0, before, before * slope)
        g = tl.where(before > 0, g, g * slope)
        one += g
        two += g * value
        next_head = ()
        next_bias = ()
        for k in tl.static_range(K):
            given = tl.load(at + row * K + k, mask=is_voxel, other=0.0).to(tl.float32)
            next_head = next_head + (of_head[k] + given[:, None] * normal,)
            next_bias = next_bias + (of_bias[k] + given,)
        of_head = next_head
        of_bias = next_bias
    sum_g = tl.sum(one, axis=0)
    sum_gx = (tl.sum(two, axis=0) - sum_g * rest) * rstd
    line = tl.num_programs(1) * C
    out = sums + run * (2 + K) * line + sample * C + channel
    tl.store(out, sum_g, mask=known)
    tl.store(out + line, sum_gx, mask=known)
    end = ends + (run * tl.num_programs(1) + sample) * K
    for k in tl.static_range(K):
        tl.store(out + (2 + k) * line, tl.sum(of_head[k], axis=0), mask=known)
        tl.store(end + k, tl.sum(of_bias[k], axis=0))


def write_logits(x: Tensor, *given: Tensor, slope: float) -> Tensor:
    """Return the logits of a map."""
    classes = len(given[-1])
    y = empty_result(x, classes, x.shape[2])
    grid, *size = matrix_of(x)
    start, room, z = start_of_memory(x)
    block = LOGITS_ELEMENTS // grid.block_channels
    sizes = {"ROOM": room, "K": classes, "BV": block, "BC": grid.block_channels}
    with torch.cuda.device(x.device):
        logits[(triton.cdiv(size[0], block), len(x))](start, y, *given, *size, slope, z, **sizes)
    return y


def write_sums(dy: Tensor, x: Tensor, *affine: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Return the sums over the runs of a map."""
    classes = len(affine[-1])
    made = empty_sums(x, affine[-1])
    grid, *size = matrix_of(x)
    start, room, z = start_of_memory(x)
    most = SUMMED_NUMBERS // (2 + classes) // grid.block_channels
    block = 1 << (most.bit_length() - 1)
    sizes = {"ROOM": room, "K": classes, "BV": block, "BC": grid.block_channels}
    given = (start, dy, *affine, *made, *size, grid.run, slope, z)
    with torch.cuda.device(x.device):
        sums[(grid.runs, len(x))](*given, **sizes)
    return made
