"""The stages (:mod:`unet3d.kernels.norm.op`) in Triton, for channels-last volumes.

A volume is a matrix of V voxels by C channels. Forward::

    moments    each program takes a run of voxels: its count, variance and mean per channel
    merge      merges the runs of a channel (Chan, Golub and LeVeque, 1979): mean, 1 / deviation
    normalize  one pass over the matrix

Backward recomputes the normalised values from x, so only x, mean and 1 / deviation are kept::

    sums       per run: of g and of g * normalised, where g is the gradient before LeakyReLU
    total      adds up the runs
    gradient   one pass over the matrix

There are no atomics, so results are deterministic. Each thread sums the values that it reads; the
sums of threads are added once, at the end of a run. The mean of a run's first block is subtracted
from the values, and the mean is kept as two float32 numbers (M is 2), so a mean far from zero costs
no digits. The index of a program's first voxel has 64 bits, offsets from it 32. Maps must be
channels-last. If x has room around Z (:mod:`unet3d.kernels.maps`; ROOM), or the output gets zeros
there (PADS), Z is a compile-time constant, because dividing by a variable takes longer than reading
a voxel.
"""

import triton
import triton.language as tl

from unet3d.kernels.norm.blocks import (
    before_activation,
    before_head,
    gradient_of,
    load_affine,
    load_block,
    load_gradient,
    normalized,
    place_of,
    start_of,
    store_block,
)


@triton.jit
def _sum_block(
    x, added, first, row, channel, inside, C,
    Z: tl.constexpr, ADDS: tl.constexpr, ROOM: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Load a block of x, or of the sum with the added map, rounded to the stored type."""
    base, place, _ = place_of(first, row, Z, ROOM)
    at = x + base * C + place[:, None] * C + channel[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += load_block(added, first, row, channel, inside, C, Z, False)
        stored = value.to(x.dtype.element_ty)
        if STORES:
            tl.store(at, stored, mask=inside)
        value = stored.to(tl.float32)
    return value


@triton.jit
def moments(
    x, added, moments, V, C, RUN,
    Z: tl.constexpr, ADDS: tl.constexpr, ROOM: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the moments of a run; if a map is added, x becomes the sum."""
    run = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    row = tl.arange(0, BV)
    first = run * RUN
    count = tl.minimum(RUN, V - first).to(tl.int32)
    x += start_of(sample, V, Z, ROOM) * C
    added += sample * V * C
    inside = (row < count)[:, None] & known[None, :]
    block = _sum_block(x, added, first, row, channel, inside, C, Z, ADDS, ROOM, False)
    shift = tl.sum(block, axis=0) / tl.minimum(count, BV).to(tl.float32)
    if ADDS:
        tl.debug_barrier()  # all threads have read before any of them writes
    one = tl.zeros((BV, BC), tl.float32)
    two = tl.zeros((BV, BC), tl.float32)
    whole = count // BV * BV
    all_rows = (row >= 0)[:, None] & known[None, :]
    for start in range(0, whole, BV):
        at = first + start
        value = _sum_block(x, added, at, row, channel, all_rows, C, Z, ADDS, ROOM, True)
        value -= shift[None, :]
        one += value
        two += value * value
    at = first + whole
    inside = (whole + row < count)[:, None] & known[None, :]
    value = _sum_block(x, added, at, row, channel, inside, C, Z, ADDS, ROOM, True)
    value = tl.where(inside, value - shift[None, :], 0.0)
    one += value
    two += value * value
    number = count.to(tl.float32)
    away = tl.sum(one, axis=0) / number
    variance = tl.sum(two, axis=0) / number - away * away
    line = tl.num_programs(2) * C
    out = moments + run * 4 * line + sample * C + channel
    tl.store(out, tl.zeros((BC,), tl.float32) + number, mask=known)
    tl.store(out + line, tl.maximum(variance, 0.0), mask=known)
    tl.store(out + 2 * line, shift, mask=known)
    tl.store(out + 3 * line, away, mask=known)


@triton.jit(do_not_specialize=["V", "C", "P"])  # compiling again takes longer than running
def merge(
    moments, means, rstds, merged, V, C, P, eps,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Merge the moments of all parts."""
    sample = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channel < C
    line = tl.num_programs(1) * C
    column = sample * C + channel
    # Differences from the first part's mean; float64 keeps their squares exact enough.
    origin = tl.load(moments + 2 * line + column, mask=known, other=0.0).to(tl.float64)
    one = tl.zeros((BP, BC), tl.float64)
    two = tl.zeros((BP, BC), tl.float64)
    for start in range(0, P, BP):
        part = start + tl.arange(0, BP)
        inside = (part < P)[:, None] & known[None, :]
        at = moments + part[:, None].to(tl.int64) * 4 * line + column[None, :]
        count = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        variance = tl.load(at + line, mask=inside, other=0.0).to(tl.float64)
        away = tl.load(at + 2 * line, mask=inside, other=0.0).to(tl.float64) - origin[None, :]
        away += tl.load(at + 3 * line, mask=inside, other=0.0).to(tl.float64)
        one += away * count
        two += (variance + away * away) * count
    away = tl.sum(one, axis=0) / V
    mean = origin + away
    variance = tl.maximum(tl.sum(two, axis=0) / V - away * away, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    # In float32 a mean of 1e4 is off by up to 5e-4; a second number keeps the rest.
    high = mean.to(tl.float32)
    rest = (mean - high.to(tl.float64)).to(tl.float32)
    tl.store(means + 2 * column, high, mask=known)
    tl.store(means + 2 * column + 1, rest, mask=known)
    tl.store(rstds + column, rstd.to(tl.float32), mask=known)
    out = merged + column
    tl.store(out, tl.zeros((BC,), tl.float32) + V, mask=known)
    tl.store(out + line, variance.to(tl.float32), mask=known)
    tl.store(out + 2 * line, high, mask=known)
    tl.store(out + 3 * line, rest, mask=known)


@triton.jit
def normalize(
    x, y, weight, bias, means, rstds, V, C, slope,
    Z: tl.constexpr, ROOM: tl.constexpr, PADS: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the normalised values of a block."""
    sample = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BV
    row = tl.arange(0, BV)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    inside = (row < V - first)[:, None] & known[None, :]
    mean, scale, shift, _, _ = load_affine(weight, bias, means, rstds, sample, channel, known, C)
    x += start_of(sample, V, Z, ROOM) * C
    value = load_block(x, first, row, channel, inside, C, Z, ROOM)
    value = normalized(value, mean, scale, shift, slope)
    y += start_of(sample, V, Z, PADS) * C
    store_block(y, first, row, value, channel, inside, C, Z, PADS)


@triton.jit
def _add_to_sums(
    one, two, x, dy, first, row, channel, inside, mean, scale, shift, slope, C,
    Z: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Add a block to the sums of g and of g * (x - mean)."""
    value = load_block(x, first, row, channel, inside, C, Z, ROOM) - mean[None, :]
    g = load_block(dy, first, row, channel, inside, C, Z, False)
    g = before_activation(g, value, scale, shift, slope)
    return one + g, two + g * value


@triton.jit
def sums(
    x, dy, weight, bias, means, rstds, sums, V, C, RUN, slope,
    Z: tl.constexpr, ROOM: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the sums over a run."""
    run = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    affine = load_affine(weight, bias, means, rstds, sample, channel, known, C)
    mean, scale, shift, rest, rstd = affine
    first = run * RUN
    count = tl.minimum(RUN, V - first).to(tl.int32)
    x += start_of(sample, V, Z, ROOM) * C
    dy += sample * V * C
    row = tl.arange(0, BV)
    one = tl.zeros((BV, BC), tl.float32)
    two = tl.zeros((BV, BC), tl.float32)
    whole = count // BV * BV
    all_rows = (row >= 0)[:, None] & known[None, :]
    for start in range(0, whole, BV):
        one, two = _add_to_sums(
            one, two, x, dy, first + start, row, channel, all_rows, mean, scale, shift, slope, C,
            Z, ROOM,
        )  # fmt: skip
    inside = (whole + row < count)[:, None] & known[None, :]
    one, two = _add_to_sums(
        one, two, x, dy, first + whole, row, channel, inside, mean, scale, shift, slope, C, Z, ROOM
    )
    sum_g = tl.sum(one, axis=0)
    sum_gx = (tl.sum(two, axis=0) - sum_g * rest) * rstd
    line = tl.num_programs(2) * C
    out = sums + run * 2 * line + sample * C + channel
    tl.store(out, sum_g, mask=known)
    tl.store(out + line, sum_gx, mask=known)


@triton.jit(do_not_specialize=["C", "P", "R"])
def total(sums, totals, C, P, R, BP: tl.constexpr, BC: tl.constexpr):
    """Add up one of the R sums over all parts."""
    number = tl.program_id(2)
    sample = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channel < C
    line = tl.num_programs(1) * C
    column = number * line + sample * C + channel
    total = tl.zeros((BP, BC), tl.float64)
    for start in range(0, P, BP):
        part = start + tl.arange(0, BP)
        inside = (part < P)[:, None] & known[None, :]
        at = sums + part[:, None].to(tl.int64) * R * line + column[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(tl.float64)
    tl.store(totals + column, tl.sum(total, axis=0).to(tl.float32), mask=known)


@triton.jit
def gradient(
    x, dy, dx, weight, bias, means, rstds, head, totals, COUNT, V, C, slope,
    Z: tl.constexpr, ROOM: tl.constexpr, PADS: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of x, from dy, the gradient of the result or of K logits."""
    sample = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BV
    row = tl.arange(0, BV)
    channel = tl.arange(0, BC)
    if not K:  # with a head, one block has all channels
        channel += tl.program_id(1) * BC
    known = channel < C
    is_voxel = row < V - first
    inside = is_voxel[:, None] & known[None, :]
    x += start_of(sample, V, Z, ROOM) * C
    value = load_block(x, first, row, channel, inside, C, Z, ROOM)
    if K:
        at = dy + (sample * V + first) * K
        g = before_head(at, head, row, is_voxel, channel, known, C, BV, BC, K)
    else:
        g = load_block(dy + sample * V * C, first, row, channel, inside, C, Z, False)
    samples = tl.num_programs(2)
    mean, scale, shift, slant, level = load_gradient(
        weight, bias, means, rstds, totals, sample, samples, channel, known, C, COUNT
    )
    value = gradient_of(g, value - mean[None, :], scale, shift, slant, level, slope)
    dx += start_of(sample, V, Z, PADS) * C
    store_block(dx, first, row, value, channel, inside, C, Z, PADS)
