"""Where the voxels of an output lie in a box: block by block, as cells and weights.

Positions are integers, a voxel being a power of two: their sums are exact, and cell and weight of
a position are its upper and lower bits. They depend neither on the block nor on which part of a
larger output is made, so a part is as in the whole.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unet3d.kernels.affine.geometry import Matrix, Offset, Voxel

Region = tuple[slice, slice, slice]

BLOCK_EDGE = 64
"""Most voxels of a block along an axis: what is read and computed for it stays in a cache."""
MAX_REACH = 2**20
"""Most voxels of the box around the positions of a block that could be smaller."""
FRACTION_BITS = 24
"""As many bits as a float32 has."""
MAX_REACH_ALONG_AXIS = 127
"""Most voxels that a block reads along an axis, so that positions in it fit into an int32."""


class Cells(Protocol):
    """The cells of a block's V positions, in the voxels that the block reads."""

    def taken(self, read: Tensor) -> Tensor:
        """Return the first voxel of each cell (V)."""

    def chosen(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return where some cells begin in what is read, flattened (P), and their weights (3, P).

        The weights are how much positions take of the second voxel along each axis.
        """

    def interpolated(self, read: Tensor) -> Tensor:
        """Return the values at the positions (V)."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of the output and where it lies in the box."""

    region: Region
    """The part."""
    origin: list[int]
    """First voxel of the box that is read; it may lie outside."""
    reach: list[int]
    """Voxels that are read along each axis, at least 2."""
    cells: Cells
    """The cells of the part's voxels."""


class ScatteredCells:
    """Cells of any positions."""

    def __init__(self, positions: list[Tensor], reach: list[int], dtype: torch.dtype) -> None:
        """Divide positions into cells and weights.

        Args:
            positions: Along X, Y and Z, each int32 of the block's shape.
            reach: Voxels that are read along each axis.
            dtype: Of the weights.
        """
        x, y, z = (position >> FRACTION_BITS for position in positions)
        self._first = x.mul_(reach[1]).add_(y).mul_(reach[2]).add_(z).long().view(-1)
        self._weights = [_fraction(position, dtype).view(-1) for position in positions]

    def taken(self, read: Tensor) -> Tensor:
        """Return the first voxel of each cell (V)."""
        return read.view(-1).index_select(0, self._first)

    def chosen(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return where some cells begin in what is read (P), and their weights (3, P)."""
        weights = [weight.index_select(0, points) for weight in self._weights]
        return self._first.index_select(0, points), torch.stack(weights)

    def interpolated(self, read: Tensor) -> Tensor:
        """Return the values at the positions (V)."""
        flat = read.view(-1)
        along_x, along_y, along_z = self._weights

        def line(start: int) -> Tensor:
            first, second = (flat[start + i :].index_select(0, self._first) for i in (0, 1))
            return first.lerp_(second, along_z)

        def plane(start: int) -> Tensor:
            return line(start).lerp_(line(start + read.stride(1)), along_y)

        return plane(0).lerp_(plane(read.stride(0)), along_x)


class LatticeCells:
    """Cells of positions that lie on a lattice along X, Y and Z: the block is only scaled."""

    def __init__(self, positions: list[Tensor], reach: list[int], dtype: torch.dtype) -> None:
        """Divide positions into cells and weights.

        Args:
            positions: Along X, Y and Z, each int32 (L) of the block's length.
            reach: Voxels that are read along each axis.
            dtype: Of the weights.
        """
        self._reach = reach
        self._cells = [(position >> FRACTION_BITS).long() for position in positions]
        self._weights = [_fraction(position, dtype) for position in positions]
        x, y, z = self._cells
        lines = torch.arange(len(x) * len(y), device=z.device).mul_(reach[2])
        self._along_z = (lines[:, None] + z).view(-1)

    def taken(self, read: Tensor) -> Tensor:
        """Return the first voxel of each cell (V)."""
        x, y, _ = self._cells
        lines = read.index_select(0, x).index_select(1, y)
        return lines.view(-1).index_select(0, self._along_z)

    def chosen(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return where some cells begin in what is read (P), and their weights (3, P)."""
        _, lines, voxels = (len(cells) for cells in self._cells)
        row = points // voxels
        x = row // lines
        places = (x, row - x * lines, points - row * voxels)
        weights = [w.index_select(0, at) for w, at in zip(self._weights, places, strict=True)]
        x, y, z = (cell.index_select(0, at) for cell, at in zip(self._cells, places, strict=True))
        return (x * self._reach[1] + y) * self._reach[2] + z, torch.stack(weights)

    def interpolated(self, read: Tensor) -> Tensor:
        """Return the values at the positions (V)."""
        x, y, z = self._cells
        along_x, along_y, along_z = self._weights
        first, second = (read.index_select(0, x + step) for step in (0, 1))
        read = _between(first, second, along_x[:, None, None])
        first, second = (read.index_select(1, y + step) for step in (0, 1))
        flat = _between(first, second, along_y[:, None]).view(-1)
        first, second = (flat[step:].index_select(0, self._along_z) for step in (0, 1))
        return _between(first.view(-1, len(z)), second.view(-1, len(z)), along_z).view(-1)


def blocks(matrix: Matrix, offset: Offset, start: Voxel, out: Tensor) -> Iterator[Block]:
    """Yield the blocks of an output.

    Args:
        matrix: 3 rows of 3 numbers: voxel o lies at ``matrix @ o + offset``.
        offset: 3 numbers, in voxels of the box.
        start: The output's first voxel.
        out: The image's output (C, X, Y, Z); cells and weights are made on its device.
    """
    size = out.shape[1:]
    edges = _edges(matrix, size)
    is_lattice = not any(matrix[i][j] for i, j in itertools.permutations(range(3), 2))
    # What a voxel's place along each axis of the output adds along each axis of the box.
    places = [
        [_places(*of_axis) for of_axis in zip(row, start, size, strict=True)] for row in matrix
    ]
    ranges = (range(0, voxels, edge) for voxels, edge in zip(size, edges, strict=True))
    for corner in itertools.product(*ranges):
        x, y, z = region = tuple(
            slice(i, min(i + edge, n)) for i, edge, n in zip(corner, edges, size, strict=True)
        )
        origin: list[int] = []
        reach: list[int] = []
        positions = []
        for axis, first in enumerate(offset):
            parts = [place[along] for place, along in zip(places[axis], region, strict=True)]
            begin = round(math.ldexp(first, FRACTION_BITS)) + sum(int(part[0]) for part in parts)
            added = [(part - part[0]).int() for part in parts]
            ends = [(0, int(step[-1])) for step in added]
            origin.append((begin + sum(map(min, ends))) >> FRACTION_BITS)
            begin -= origin[-1] << FRACTION_BITS
            reach.append(((begin + sum(map(max, ends))) >> FRACTION_BITS) + 2)
            if is_lattice:
                positions.append((added[axis] + begin).to(out.device))
            else:
                in_plane = added[0][:, None] + (added[1] + begin)
                positions.append(in_plane.to(out.device)[:, :, None] + added[2].to(out.device))
        kind = LatticeCells if is_lattice else ScatteredCells
        cells = kind(positions, reach, out.dtype)
        yield Block(region=(x, y, z), origin=origin, reach=reach, cells=cells)


def _fraction(position: Tensor, dtype: torch.dtype) -> Tensor:
    fraction = position & ((1 << FRACTION_BITS) - 1)
    return fraction.to(dtype).mul_(math.ldexp(1, -FRACTION_BITS))


def _between(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """Return ``torch.lerp``, which is slow where the weight is not as large as the others."""
    return first.add_(second.sub_(first).mul_(weight))


def _places(factor: float, start: int, count: int) -> Tensor:
    voxels = torch.arange(start, start + count, dtype=torch.float64)
    return voxels.mul_(math.ldexp(factor, FRACTION_BITS)).round_().long()


def _edges(matrix: Matrix, size: torch.Size) -> list[int]:
    """Return the sides of a block, smaller along the axes along which it reaches far."""
    edges = [min(BLOCK_EDGE, voxels) for voxels in size]
    while _reaches_too_far([_reach(row, edges) for row in matrix]) and max(edges) > 1:
        lengths = [
            (edge - 1) * max(abs(row[axis]) for row in matrix) for axis, edge in enumerate(edges)
        ]
        longest = lengths.index(max(lengths))
        edges[longest] = (edges[longest] + 1) // 2
    return edges


def _reaches_too_far(reach: list[int]) -> bool:
    return max(reach) > MAX_REACH_ALONG_AXIS or math.prod(reach) > MAX_REACH


def _reach(row: tuple[float, float, float], edges: list[int]) -> int:
    """Return about how many voxels of the box a block reads along an axis, never too few."""
    return math.ceil(sum(abs(a) * (edge - 1) for a, edge in zip(row, edges, strict=True))) + 3
