"""A normalisation with LeakyReLU and the head that reads it, in Triton.

The head mixes the channels of a voxel, so the normalised map need not be stored for it, nor the
gradient of that map: both follow from x and, for each voxel, a few numbers. Forward and backward
read x instead of writing and reading maps of its size::

    logits     one pass: normalises a block and multiplies it by the head's matrix
    sums       per run: of g and g * normalised, where g is the gradient before LeakyReLU, which is
               made from that of the logits, and of the gradients of the head's weight and bias
    gradient   one pass, with the same g

Blocks hold all channels of a voxel. Between the passes come the stages of the normalisation
(:mod:`unet3d.kernels.norm`).
"""

import triton
import triton.language as tl

from unet3d.kernels.norm.blocks import (
    gradient_factors,
    load_affine,
    load_block,
    start_of,
    store_block,
)


@triton.jit
def _head_matrix(head, label, channel, known, is_class, C):
    """Return the head's matrix, (classes, channels), with zeros for classes that are not there."""
    at = label[:, None] * C + channel[None, :]
    return tl.load(head + at, mask=is_class[:, None] & known[None, :], other=0.0)


@triton.jit
def logits(
    x, y, weight, bias, means, rstds, head, head_bias, V, C, K, slope,
    BV: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the logits of a block."""
    sample = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BV
    row = tl.arange(0, BV)
    channel = tl.arange(0, BC)
    label = tl.arange(0, BK)
    known = channel < C
    is_class = label < K
    is_voxel = row < V - first
    inside = is_voxel[:, None] & known[None, :]
    mean, scale, shift, _, _ = load_affine(weight, bias, means, rstds, sample, channel, known, C)
    value = load_block(x + sample * V * C, first, row, channel, inside, C, 1, False)
    value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
    value = tl.where(value > 0, value, value * slope).to(x.dtype.element_ty)
    matrix = _head_matrix(head, label, channel, known, is_class, C).to(x.dtype.element_ty)
    out = tl.dot(value, tl.trans(matrix), input_precision="ieee")
    out += tl.load(head_bias + label, mask=is_class, other=0.0).to(tl.float32)[None, :]
    at = (sample * V + first) * K + row[:, None] * K + label[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=is_voxel[:, None] & is_class[None, :])


@triton.jit
def sums(
    x, dy, weight, bias, means, rstds, head, sums, ends, V, C, K, RUN, slope,
    BV: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the sums over a run."""
    run = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BV)
    channel = tl.arange(0, BC)
    label = tl.arange(0, BK)
    known = channel < C
    is_class = label < K
    affine = load_affine(weight, bias, means, rstds, sample, channel, known, C)
    mean, scale, shift, rest, rstd = affine
    matrix = _head_matrix(head, label, channel, known, is_class, C).to(x.dtype.element_ty)
    first = run * RUN
    count = tl.minimum(RUN, V - first).to(tl.int32)
    x += (sample * V + first) * C
    dy += (sample * V + first) * K
    one = tl.zeros((BV, BC), tl.float32)
    two = tl.zeros((BV, BC), tl.float32)
    of_head = tl.zeros((BK, BC), tl.float32)
    of_bias = tl.zeros((BV, BK), tl.float32)
    for start in range(0, count, BV):
        is_voxel = row < count - start
        inside = is_voxel[:, None] & known[None, :]
        at = (start + row)[:, None] * C + channel[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        at = (start + row)[:, None] * K + label[None, :]
        given = tl.load(dy + at, mask=is_voxel[:, None] & is_class[None, :], other=0.0)
        g = tl.dot(given, matrix, input_precision="ieee")
        before = value * scale[None, :] + shift[None, :]
        is_up = before > 0
        g = tl.where(is_up, g, g * slope)
        one += g
        two += g * value
        normal = tl.where(is_up, before, before * slope).to(x.dtype.element_ty)
        of_head = tl.dot(tl.trans(given), normal, of_head, input_precision="ieee")
        of_bias += given.to(tl.float32)
    sum_g = tl.sum(one, axis=0)
    sum_gx = (tl.sum(two, axis=0) - sum_g * rest) * rstd
    line = tl.num_programs(1) * C
    out = sums + run * (2 + K) * line + sample * C
    tl.store(out + channel, sum_g, mask=known)
    tl.store(out + line + channel, sum_gx, mask=known)
    at = (2 + label)[:, None] * line + channel[None, :]
    tl.store(out + at, of_head, mask=is_class[:, None] & known[None, :])
    out = ends + (run * tl.num_programs(1) + sample) * K + label
    tl.store(out, tl.sum(of_bias, axis=0), mask=is_class)


@triton.jit
def gradient(
    x, dy, dx, weight, bias, means, rstds, head, totals, COUNT, V, C, K, slope,
    Z: tl.constexpr, PADS: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block."""
    sample = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BV
    row = tl.arange(0, BV)
    channel = tl.arange(0, BC)
    label = tl.arange(0, BK)
    known = channel < C
    is_class = label < K
    is_voxel = row < V - first
    inside = is_voxel[:, None] & known[None, :]
    value = load_block(x + sample * V * C, first, row, channel, inside, C, 1, False)
    at = (sample * V + first) * K + row[:, None] * K + label[None, :]
    given = tl.load(dy + at, mask=is_voxel[:, None] & is_class[None, :], other=0.0)
    matrix = _head_matrix(head, label, channel, known, is_class, C).to(x.dtype.element_ty)
    g = tl.dot(given, matrix, input_precision="ieee")
    affine = load_affine(weight, bias, means, rstds, sample, channel, known, C)
    mean, scale, shift, rest, rstd = affine
    column, line = sample * C + channel, tl.num_programs(1) * C
    slant, level = gradient_factors(totals, column, known, rest, rstd, scale, COUNT, line)
    value -= mean[None, :]
    g = tl.where(value * scale[None, :] + shift[None, :] > 0, g, g * slope)
    value = g * scale[None, :] + (value * slant[None, :] + level[None, :])
    dx += start_of(sample, V, Z, PADS) * C
    store_block(dx, first, row, value, channel, inside, C, Z, PADS)
