"""Where the voxels of an output lie in a box: block by block, as cells and weights.

Positions are integers, a voxel being a power of two: their sums are exact, and cell and weight of
a position are its upper and lower bits. They depend neither on the block nor on which part of a
larger output is made, so a part is as in the whole.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Matrix = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]
Offset = tuple[float, float, float]
Voxel = tuple[int, int, int]
Region = tuple[slice, slice, slice]

CORNERS = tuple(itertools.product((0, 1), repeat=3))
"""The voxels of a cell, along X, Y and Z from its first."""
EQUAL_SHARES = 1e-6
"""Classes whose shares of a position differ by less have the same: the rest is rounding."""

BLOCK_EDGE = 64
"""Most voxels of a block along an axis: what is read and computed for it stays in a cache."""
MAX_REACH = 2**20
"""Most voxels of the box around the positions of a block that could be smaller."""
FRACTION_BITS = 24
"""As many bits as a float32 has."""
MAX_REACH_ALONG_AXIS = 127
"""Most voxels that a block reads along an axis, so that positions in it fit into an int32."""


class Block(NamedTuple):
    """A part of the output, of V voxels, and the cells of the box that they lie in."""

    region: Region
    """The part."""
    origin: list[int]
    """First voxel of the box that is read; it may lie outside."""
    reach: list[int]
    """Voxels that are read along each axis, at least 2."""
    first: Tensor
    """Where the cell of each voxel begins in what is read, flattened (V)."""
    weights: list[Tensor]
    """How much each voxel takes of the cell's second voxel along X, Y and Z (V)."""


def blocks(matrix: Matrix, offset: Offset, start: Voxel, out: Tensor) -> Iterator[Block]:
    """Yield the blocks of an image's output (C, X, Y, Z), whose first voxel is ``start``.

    Voxel o lies at ``matrix @ o + offset``, in voxels of the box.
    """
    size = out.shape[1:]
    edges = _edges(matrix, size)
    # What a voxel's place along each axis of the output adds along each axis of the box.
    places = [
        [_places(*of_axis) for of_axis in zip(row, start, size, strict=True)] for row in matrix
    ]
    ranges = (range(0, voxels, edge) for voxels, edge in zip(size, edges, strict=True))
    for corner in itertools.product(*ranges):
        x, y, z = region = tuple(
            slice(i, min(i + edge, n)) for i, edge, n in zip(corner, edges, size, strict=True)
        )
        origin, reach, cells, weights = [], [], [], []
        for axis, begin_of_axis in enumerate(offset):
            parts = [place[along] for place, along in zip(places[axis], region, strict=True)]
            begin = round(math.ldexp(begin_of_axis, FRACTION_BITS))
            begin += sum(int(part[0]) for part in parts)
            added = [(part - part[0]).int() for part in parts]
            ends = [(0, int(step[-1])) for step in added]
            origin.append((begin + sum(map(min, ends))) >> FRACTION_BITS)
            begin -= origin[-1] << FRACTION_BITS
            reach.append(((begin + sum(map(max, ends))) >> FRACTION_BITS) + 2)
            in_plane = added[0][:, None] + (added[1] + begin)
            position = in_plane.to(out.device)[:, :, None] + added[2].to(out.device)
            cells.append(position >> FRACTION_BITS)
            fraction = position.bitwise_and_((1 << FRACTION_BITS) - 1).to(out.dtype).view(-1)
            weights.append(fraction.mul_(math.ldexp(1, -FRACTION_BITS)))
        first = cells[0].mul_(reach[1]).add_(cells[1]).mul_(reach[2]).add_(cells[2])
        yield Block((x, y, z), origin, reach, first.long().view(-1), weights)


def _places(factor: float, start: int, count: int) -> Tensor:
    voxels = torch.arange(start, start + count, dtype=torch.float64)
    return voxels.mul_(math.ldexp(factor, FRACTION_BITS)).round_().long()


def _edges(matrix: Matrix, size: torch.Size) -> list[int]:
    """Return the sides of a block, smaller along the axes along which it reaches far."""
    edges = [min(BLOCK_EDGE, voxels) for voxels in size]
    while max(edges) > 1:
        reach = [  # about what a block reads along each axis, never too few
            math.ceil(sum(abs(a) * (edge - 1) for a, edge in zip(row, edges, strict=True))) + 3
            for row in matrix
        ]
        if max(reach) <= MAX_REACH_ALONG_AXIS and math.prod(reach) <= MAX_REACH:
            break
        lengths = [
            (edge - 1) * max(abs(row[axis]) for row in matrix) for axis, edge in enumerate(edges)
        ]
        longest = lengths.index(max(lengths))
        edges[longest] = (edges[longest] + 1) // 2
    return edges
