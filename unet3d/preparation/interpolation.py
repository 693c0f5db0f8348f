"""Interpolation along the axes of arrays, as one small matrix per axis.

Every interpolation here is linear in the voxels and separable. The matrices are SciPy's ``zoom`` of
the identity with ``grid_mode=True``: voxels are cells, the outer *faces* of the two grids coincide,
and values beyond the border repeat it.
"""

import functools
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Order = Literal[0, 1, 3]
"""Of splines: the nearest voxel, linear, cubic."""

NEGLIGIBLE_WEIGHT = 1e-8

BAND_ROWS = 64
"""Rows of a matrix that are multiplied together: few enough to leave out most of its zeros."""

KEPT_MATRICES = 16
"""For the next images, of which a folder has few sizes; one of 512 voxels for 1024 takes 2 MiB."""


def centres(size: int, new_size: int) -> Tensor:
    """Return where the new voxels of a line have their centres among the old, 0, 1, 2, ..."""
    # The order of operations decides about what lies just between two of them.
    return size / new_size * (torch.arange(new_size, dtype=torch.float64) + 0.5) - 0.5


def nearest_voxels(size: int, new_size: int) -> Tensor:
    """Return the old voxel next to each new one; of two that are as near, the second."""
    return (centres(size, new_size) + 0.5).floor().long().clamp(0, size - 1)


@functools.lru_cache(maxsize=KEPT_MATRICES)
def line_matrix(size: int, new_size: int, order: Order) -> Tensor:
    """Return the weights of the old voxels of a line in the new ones, (new_size, size), on the CPU.

    A spline depends on all voxels of a line, but on those far away by less than
    :data:`NEGLIGIBLE_WEIGHT`.
    """
    if size == new_size:
        return torch.eye(size)
    if order == 0:
        return torch.nn.functional.one_hot(nearest_voxels(size, new_size), size).float()
    from scipy import ndimage  # takes a third of a second, and images at their own spacing do not

    rows = [
        ndimage.zoom(column, new_size / size, order=order, mode="nearest", grid_mode=True)
        for column in np.eye(size)
    ]
    matrix = np.stack(rows, axis=1).astype(np.float32)
    # The weights of a spline fade by a factor of four with each voxel, down to denormal numbers,
    # which slow every multiplication tenfold and which no float32 result can show.
    matrix[np.abs(matrix) < NEGLIGIBLE_WEIGHT] = 0
    return torch.from_numpy(matrix)


def reached(matrix: Tensor) -> slice:
    """Return the columns of a matrix from the first to the last that are not zero."""
    columns = torch.nonzero(matrix.any(dim=0)).flatten()
    return slice(int(columns[0]), int(columns[-1]) + 1)


def interpolated(array: Tensor, matrices: Mapping[int, Tensor]) -> Tensor:
    """Multiply dimensions of an array in float32 by matrices, on its device.

    The result has the array's order of memory.
    """
    order = in_memory(array)
    array = array.permute(order).contiguous()  # a copy only if it has gaps
    # Whatever makes the array smaller comes first.
    for dim, matrix in sorted(matrices.items(), key=lambda one: one[1].shape[0] / one[1].shape[1]):
        array = _multiplied(array, order.index(dim), matrix)
    return array.permute([order.index(dim) for dim in range(array.ndim)])


def in_memory(array: Tensor) -> list[int]:
    """Return the dimensions of an array from the slowest in memory to the fastest."""
    return sorted(range(array.ndim), key=array.stride, reverse=True)


def _multiplied(array: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """Return the products of a contiguous array, contiguous as well, without a copy of it."""
    before, after = array.shape[:dim], array.shape[dim + 1 :]
    lines = array.reshape(math.prod(before), array.shape[dim], math.prod(after))
    result = array.new_empty(len(lines), len(matrix), lines.shape[2])
    weights = matrix.to(array.device)
    for first in range(0, len(matrix), BAND_ROWS):
        rows = slice(first, first + BAND_ROWS)
        columns = reached(matrix[rows])
        band, source, made = weights[rows, columns], lines[:, columns], result[:, rows]
        if len(lines) == 1:
            torch.mm(band, source[0], out=made[0])
        elif lines.shape[2] == 1:
            torch.mm(source[..., 0], band.T, out=made[..., 0])
        else:
            torch.bmm(band.expand(len(lines), -1, -1), source, out=made)
    return result.view(*before, len(matrix), *after)
