"""Sampling of a patch in one Triton kernel: a position's image and label in one thread.

Positions are computed in float64; that is little beside reading eight voxels of each channel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unet3d.kernels.affine.cells import EQUAL_SHARES, Matrix, Offset

BLOCK_VOXELS = 128


@triton.jit
def _cell(x, y, z, MX, MY, MZ, START, SIZE):
    """Return the cell of a position along one axis, and how much it takes of the next."""
    position = x.to(tl.float64) * MX + y.to(tl.float64) * MY + z.to(tl.float64) * MZ + START
    cell = tl.floor(position)
    # Far outside is the same as just outside, which an int32 can tell.
    return tl.minimum(tl.maximum(cell, -2.0), SIZE).to(tl.int32), position - cell


@triton.jit
def _largest_share(classes, weights, EQUAL: tl.constexpr):
    """Return the class with the largest sum of weights, of equal ones the smallest."""
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


# Nothing is specialised, neither on a number nor on where a sample begins in its batch: every
# sample of a training is drawn differently, and each kernel would be compiled while it waits.
@triton.jit(do_not_specialize=list(range(23)))
def _sample(
    image, label, image_out, label_out,
    C: tl.int32, X: tl.int32, Y: tl.int32, Z: tl.int32, NX: tl.int32, NY: tl.int32, NZ: tl.int32,
    XX: tl.float64, XY: tl.float64, XZ: tl.float64, XS: tl.float64,
    YX: tl.float64, YY: tl.float64, YZ: tl.float64, YS: tl.float64,
    ZX: tl.float64, ZY: tl.float64, ZZ: tl.float64, ZS: tl.float64,
    EQUAL: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    index = tl.int64 if WIDE else tl.int32
    number = image_out.dtype.element_ty
    size = NX.to(index) * NY * NZ
    at = tl.program_id(0).to(index) * BV + tl.arange(0, BV)
    is_voxel = at < size
    line = at // NZ
    x = line // NY
    y = line - x * NY
    z = at - line * NZ
    i, u = _cell(x, y, z, XX, XY, XZ, XS, X)
    j, v = _cell(x, y, z, YX, YY, YZ, YS, Y)
    k, w = _cell(x, y, z, ZX, ZY, ZZ, ZS, Z)
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
    for _ in range(C):
        value = tl.zeros((BV,), number)
        for corner in tl.static_range(8):
            voxel = tl.load(image + places[corner], mask=are_read[corner], other=0.0)
            value += voxel.to(number) * weights[corner]
        tl.store(image_out + at, value, mask=is_voxel)
        image += box
        image_out += size


def sample(
    image: Tensor,
    label: Tensor,
    matrix: Matrix,
    offset: Offset,
    *,
    image_out: Tensor,
    label_out: Tensor,
) -> None:
    """Sample a box into memory; see :func:`unet3d.kernels.affine.api.sample_affine`."""
    rows = [
        float(number) for row, start in zip(matrix, offset, strict=True) for number in (*row, start)
    ]
    sizes = (len(image), *label.shape, *label_out.shape)
    voxels = max(label.numel(), label_out.numel() + BLOCK_VOXELS)
    shape = {"EQUAL": EQUAL_SHARES, "WIDE": voxels >= 2**31, "BV": BLOCK_VOXELS}
    grid = (triton.cdiv(label_out.numel(), BLOCK_VOXELS),)
    with torch.cuda.device(image.device):
        _sample[grid](image, label, image_out, label_out, *sizes, *rows, **shape)
