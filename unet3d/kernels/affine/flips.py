"""Patches that are only cut out and mirrored: copied, so exact to the bit."""

import torch
from torch import Tensor


def signs_of(
    matrix: tuple[tuple[float, ...], ...], offset: tuple[float, ...]
) -> tuple[int, ...] | None:
    """Return 1 or -1 for each axis if voxels can be copied, else None."""
    signs = tuple(int(row[axis]) for axis, row in enumerate(matrix))
    mirrors = [
        [float(sign) if other == axis else 0.0 for other in range(3)]
        for axis, sign in enumerate(signs)
    ]
    copies = set(signs) <= {1, -1} and [list(row) for row in matrix] == mirrors
    return signs if copies and all(float(step).is_integer() for step in offset) else None


def copy(box: Tensor, signs: tuple[int, ...], offset: tuple[int, ...], out: Tensor) -> None:
    """Copy voxel ``sign * o + offset`` of a box (..., X, Y, Z) to voxel o, 0 where there is none.

    Args:
        box: Of any type.
        signs: 1 or -1 along each axis.
        offset: The voxel of the box that comes first.
        out: (..., *size).
    """
    part, inside = box, out
    flipped = []
    for axis, (sign, first) in enumerate(zip(signs, offset, strict=True), start=-3):
        voxels, size = box.shape[axis], out.shape[axis]
        last = first + sign * (size - 1)
        low, high = max(0, min(first, last)), min(voxels - 1, max(first, last))
        if low > high:
            out.zero_()
            return
        begin = low - first if sign > 0 else first - high
        part = part.narrow(axis, low, high + 1 - low)
        inside = inside.narrow(axis, begin, high + 1 - low)
        if sign < 0:
            flipped.append(axis)
    if inside.numel() < out.numel():
        out.zero_()
    inside.copy_(torch.flip(part, flipped) if flipped else part)
