"""Affine sampling in one Triton kernel: each thread computes one voxel of image and label map.

A table has the parameters of each output, so one launch samples all of them, adds noise and
multiplies intensities. Positions are computed in float64, which takes little time beside reading
eight voxels of each channel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unet3d.kernels.affine.boxes import TABLE_CHANNELS, Boxes
from unet3d.kernels.affine.plain import EQUAL_SHARES

BLOCK_VOXELS = 128


@triton.jit
def _cell(x, y, z, row, SIZE):
    """Return a position's cell along one axis, and the weight of the cell's second voxel."""
    MX = tl.load(row)
    MY = tl.load(row + 1)
    MZ = tl.load(row + 2)
    START = tl.load(row + 3)
    position = x.to(tl.float64) * MX + y.to(tl.float64) * MY + z.to(tl.float64) * MZ + START
    cell = tl.floor(position)
    # Positions far outside are clamped to just outside, to fit into an int32.
    return tl.minimum(tl.maximum(cell, -2.0), SIZE).to(tl.int32), position - cell


@triton.jit
def _largest_share(classes, weights, EQUAL: tl.constexpr):
    """Return the class with the largest sum of weights; ties go to the smallest."""
    shares = ()
    for i in tl.static_range(8):
        share = weights[i]
        for j in tl.static_range(8):
            if i != j:
                share += tl.where(classes[i] == classes[j], weights[j], 0.0)
        shares = shares + (share,)
    largest = weights[0]
    for i in tl.static_range(8):
        largest = tl.maximum(largest, shares[i])
    winner = classes[0]
    is_found = largest < 0
    for i in tl.static_range(8):
        wins = shares[i] >= largest - EQUAL
        winner = tl.where(wins & ((classes[i] < winner) | ~is_found), classes[i], winner)
        is_found = is_found | wins
    return winner


@triton.jit
def _hash(bits):
    """Mix the bits of uint32; see :mod:`unet3d.kernels.affine.noise`."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _uniform(bits):
    return ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)


@triton.jit
def _gaussian(voxel, seeds):
    """Return a normally distributed number for the index of a voxel."""
    first = _hash(voxel ^ tl.load(seeds).to(tl.int64).to(tl.uint32))
    second = _hash(first + tl.load(seeds + 1).to(tl.int64).to(tl.uint32))
    uniform = _uniform(first)
    rest = 1 - uniform
    # Near 1 the first terms of the logarithm's series are more exact than a GPU's logarithm.
    terms = rest * (1 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4))))
    radius = tl.sqrt(2 * tl.where(rest < 0.01, terms, -tl.log(uniform)))
    # The cosine is the sine of an angle within a right angle, for which a series is exact.
    angle = (tl.abs(_uniform(second) - 0.5) - 0.25) * 6.283185307179586
    square = angle * angle
    series = 1 - square / 42 * (1 - square / 72 * (1 - square / 110))
    return radius * angle * (1 - square / 6 * (1 - square / 20 * series))


# Neither numbers nor pointers are specialised: each kind would compile another kernel.
@triton.jit(do_not_specialize=list(range(14)))
def _sample(
    images, labels, table, image_out, label_out,
    C: tl.int32, NX: tl.int32, NY: tl.int32, NZ: tl.int32,
    FX: tl.int32, FY: tl.int32, FZ: tl.int32, PY: tl.int32, PZ: tl.int32,
    CHANNELS: tl.constexpr, EQUAL: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    index = tl.int64 if WIDE else tl.int32
    number = image_out.dtype.element_ty
    size = NX.to(index) * NY * NZ
    at = tl.program_id(0).to(index) * BV + tl.arange(0, BV)
    is_voxel = at < size
    line = at // NZ
    sheet = line // NY
    x = sheet + FX
    y = line - sheet * NY + FY
    z = at - line * NZ + FZ
    output = tl.program_id(1).to(tl.int64)
    row = table + output * (CHANNELS + 4 * C)
    X = tl.load(row + 12).to(tl.int32)
    Y = tl.load(row + 13).to(tl.int32)
    Z = tl.load(row + 14).to(tl.int32)
    before = tl.load(row + 15).to(tl.int64)
    image = images + before * C
    label = labels + before
    image_out += output * C * size
    label_out += output * size
    i, u = _cell(x, y, z, row, X)
    j, v = _cell(x, y, z, row + 4, Y)
    k, w = _cell(x, y, z, row + 8, Z)
    u = u.to(number)
    v = v.to(number)
    w = w.to(number)
    plane = Y.to(index) * Z
    first = i * plane + j.to(index) * Z + k
    places = ()
    weights = ()
    are_read = ()
    for corner in tl.static_range(8):
        a = corner // 4
        b = corner // 2 % 2
        c = corner % 2
        weight = (u if a else 1 - u) * (v if b else 1 - v) * (w if c else 1 - w)
        is_inside = (i >= -a) & (i < X - a) & (j >= -b) & (j < Y - b) & (k >= -c) & (k < Z - c)
        places = places + (first + a * plane + b * Z + c,)
        weights = weights + (weight,)
        are_read = are_read + (is_inside & is_voxel & (weight > 0),)
    classes = ()
    for corner in tl.static_range(8):
        own = tl.load(label + places[corner], mask=are_read[corner], other=0)
        classes = classes + (own,)
    tl.store(label_out + at, _largest_share(classes, weights, EQUAL), mask=is_voxel)
    box = X.to(tl.int64) * plane
    # The index of a voxel in the whole output; noise uses its lower 32 bits.
    voxel = (x.to(tl.uint32) * PY + y.to(tl.uint32)) * PZ + z.to(tl.uint32)
    given = row + CHANNELS
    for _ in range(C):
        value = tl.zeros((BV,), number)
        for corner in tl.static_range(8):
            stored = tl.load(image + places[corner], mask=are_read[corner], other=0.0)
            value += stored.to(number) * weights[corner]
        std = tl.load(given)
        if std > 0:
            value += (_gaussian(voxel, given + 1) * std.to(tl.float32)).to(number)
        value *= tl.load(given + 3).to(number)
        tl.store(image_out + at, value, mask=is_voxel)
        image += box
        image_out += size
        given += 4


def sample(boxes: Boxes, image_out: Tensor, label_out: Tensor) -> None:
    """Sample boxes into memory; see :func:`unet3d.kernels.affine.api.sample_affine`."""
    number, *size = label_out.shape
    sizes = (image_out.shape[1], *size, *boxes.start, *boxes.size[1:])
    voxels = max(boxes.labels.numel(), label_out[0].numel() + BLOCK_VOXELS)
    constants = {"CHANNELS": TABLE_CHANNELS, "EQUAL": EQUAL_SHARES, "WIDE": voxels >= 2**31}
    grid = (triton.cdiv(label_out[0].numel(), BLOCK_VOXELS), number)
    with torch.cuda.device(image_out.device):
        given = (*boxes[:3], image_out, label_out, *sizes)
        _sample[grid](*given, **constants, BV=BLOCK_VOXELS)
