"""Interpolation along the axes of arrays, as one small matrix per axis.

Every interpolation here is linear in the voxels and separable. The matrices are SciPy's ``zoom`` of
the identity with ``grid_mode=True``: voxels are cells, the outer *faces* of the two grids coincide,
and values beyond the border repeat it.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Order = Literal[0, 1, 3]
"""Of splines: the nearest voxel, linear, cubic."""

NEGLIGIBLE_WEIGHT = 1e-12

BAND_ROWS = 64
"""Rows of a matrix that are multiplied together: few enough to leave out most of its zeros."""


KEPT_NUMBERS = 2**20
"""Of the largest matrix that is kept for other images: of 1024 voxels for as many, 4 MiB. One of
5000 voxels for 10000 takes 200 MB, which a process would hold until it ends."""

KEPT_MATRICES = 32
"""Those that are kept, 128 MiB at most: a folder has scans of few sizes."""


def centres(size: int, new_size: int) -> Tensor:
    """Return where the voxels of a line have their centres among those of another, (new_size,).

    Args:
        size: Voxels of the other one; its centres are 0, 1, 2, ...
        new_size: Voxels of the line.
    """
    # The order of operations decides about what lies just between two of them.
    return size / new_size * (torch.arange(new_size, dtype=torch.float64) + 0.5) - 0.5


def nearest_voxels(size: int, new_size: int) -> Tensor:
    """Return the voxel next to each one of another line: of two that are as near, the second.

    Args:
        size: As in :func:`centres`.
        new_size: As there.
    """
    return (centres(size, new_size) + 0.5).floor().long().clamp(0, size - 1)


def line_matrix(size: int, new_size: int, order: Order) -> Tensor:
    """Return the weights of the voxels of a line in those of another, shape (new_size, size).

    A spline depends on all voxels of a line, but on those far away by less than
    :data:`NEGLIGIBLE_WEIGHT`.

    Args:
        size: Voxels of the line.
        new_size: Voxels of the new one.
        order: Of the splines.
    """
    is_kept = size * new_size <= KEPT_NUMBERS
    return (_kept_matrix if is_kept else _line_matrix)(size, new_size, order)


def _line_matrix(size: int, new_size: int, order: Order) -> Tensor:
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


_kept_matrix = functools.lru_cache(maxsize=KEPT_MATRICES)(_line_matrix)


def reached(matrix: Tensor) -> slice:
    """Return the columns of a matrix from the first to the last that are not zero.

    Args:
        matrix: Of a row or more, none of them zero.
    """
    columns = torch.nonzero(matrix.any(dim=0)).flatten()
    return slice(int(columns[0]), int(columns[-1]) + 1)


def interpolated(array: Tensor, matrices: Mapping[int, Tensor]) -> Tensor:
    """Multiply dimensions of an array by matrices, on its device.

    Args:
        array: In float32, of any shape and order of memory, which the result has, too.
        matrices: Of each dimension that changes, on the CPU.
    """
    order = in_memory(array)
    array = array.permute(order).contiguous()  # a copy only if it has gaps
    # Whatever makes the array smaller comes first.
    for dim, matrix in sorted(matrices.items(), key=lambda one: one[1].shape[0] / one[1].shape[1]):
        array = _multiplied(array, order.index(dim), matrix)
    return array.permute([order.index(dim) for dim in range(array.ndim)])


def in_memory(array: Tensor) -> list[int]:
    """Return the dimensions of an array from the slowest in memory to the fastest.

    Args:
        array: Of any shape.
    """
    return sorted(range(array.ndim), key=array.stride, reverse=True)


def _multiplied(array: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """Return the products of a contiguous array, contiguous as well, without a copy of it."""
    before, after = array.shape[:dim], array.shape[dim + 1 :]
    lines = array.reshape(math.prod(before), array.shape[dim], math.prod(after))
    result = array.new_empty(len(lines), len(matrix), lines.shape[2])
    weights = matrix.to(array.device)
    for rows, columns in _bands(matrix):
        band, source, made = weights[rows, columns], lines[:, columns], result[:, rows]
        if len(lines) == 1:
            torch.mm(band, source[0], out=made[0])
        elif lines.shape[2] == 1:
            torch.mm(source[..., 0], band.T, out=made[..., 0])
        else:
            torch.bmm(band.expand(len(lines), -1, -1), source, out=made)
    return result.view(*before, len(matrix), *after)


def _bands(matrix: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield some rows of a matrix, and the columns that they need."""
    for first in range(0, len(matrix), BAND_ROWS):
        rows = slice(first, min(first + BAND_ROWS, len(matrix)))
        yield rows, reached(matrix[rows])
