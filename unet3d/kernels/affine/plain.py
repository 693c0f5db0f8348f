"""Sampling in PyTorch's own operations, block by block of the output.

A block's neighbourhood in the box, its positions and its values stay in a processor's cache, so
reading eight voxels for each position costs less than ``grid_sample`` takes for its arithmetic.
Positions are integers, a voxel being a power of two: their sums are exact, and cell and weight of
a position are its upper and lower bits.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unet3d.kernels.affine.geometry import CORNERS, EQUAL_SHARES, Matrix, Offset

Region = tuple[slice, slice, slice]

BLOCK_EDGE = 32
"""Most voxels of a block along an axis."""
MAX_REACH = 2**18
"""Most voxels of the box around a block's positions, if the block is to be as large."""
MAX_VOTES = 2**16
"""Positions for which it is voted at a time."""
FRACTION_BITS = 24
"""As many bits as a float32 has; fewer where a block reaches over more than 127 voxels."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Where the positions of a block lie."""

    region: Region
    """The block in the output."""
    origin: list[int]
    """First voxel of the box that is read; it may lie outside."""
    reach: list[int]
    """Voxels that are read along each axis, at least 2."""
    positions: list[Tensor]
    """Along X, Y and Z of the box, from the origin: int32 of the block's shape."""
    bits: int
    """Lower bits of a position, which are its fraction."""


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Positions as cells and weights, each (V) of the block's voxels."""

    first: Tensor
    """Index of the cell's first voxel in the flattened voxels that are read; int64."""
    weights: tuple[Tensor, ...]
    """How much of the second voxel a position takes along X, Y and Z."""
    reach: list[int]
    """Voxels that are read along each axis."""

    def corner(self, flat: Tensor, corner: tuple[int, ...], first: Tensor) -> Tensor:
        """Return the voxels at one corner of some cells."""
        step = (corner[0] * self.reach[1] + corner[1]) * self.reach[2] + corner[2]
        return torch.index_select(flat[step:], 0, first)


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
    votes = Votes(label_out)
    for block in _blocks(matrix, offset, label_out.shape):
        inside = _inside(block, label.shape)
        if inside is None:
            image_out[(..., *block.region)] = 0
            label_out[block.region] = 0
            continue
        cells = _cells(block, image_out.dtype)
        for channel, out in zip(image, image_out, strict=True):
            read = _read(channel, block, inside, image_out.dtype)
            target = out[block.region]
            target.copy_(_interpolated(read, cells).view(target.shape))
        read = _read(label, block, inside, label.dtype)
        least, most = read.aminmax()
        if least == most:
            label_out[block.region] = least
        else:
            _label(read, cells, block.region, votes)
    votes.count()


class Votes:
    """Positions between several classes, which wait until they are many."""

    def __init__(self, label_out: Tensor) -> None:
        """Begin without any.

        Args:
            label_out: (X, Y, Z), to which winners are written.
        """
        self.label_out = label_out
        self._waiting: list[tuple[Tensor, ...]] = []
        self._count = 0

    def add(self, at: Tensor, corners: Tensor, weights: Tensor) -> None:
        """Add positions.

        Args:
            at: Where they lie in the flattened output (V).
            corners: Their classes (8, V).
            weights: How much of the second voxel they take along X, Y and Z (3, V).
        """
        self._waiting.append((at, corners, weights))
        self._count += len(at)
        if self._count >= MAX_VOTES:
            self.count()

    def count(self) -> None:
        """Write the class of every position that waits."""
        if self._waiting:
            at, corners, seconds = (
                torch.cat(some, -1) for some in zip(*self._waiting, strict=True)
            )
            x, y, z = ((1 - second, second) for second in seconds)
            weights = [x[i] * y[j] * z[k] for i, j, k in CORNERS]
            self.label_out.view(-1)[at] = strongest(corners, weights)
        self._waiting, self._count = [], 0


def strongest(classes: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the class with the largest sum of weights, of equal ones the smallest.

    Args:
        classes: (8, V), not negative.
        weights: 8 of (V).
    """
    shares = torch.stack(weights)
    for i, j in itertools.combinations(range(len(classes)), 2):
        equal = (classes[i] == classes[j]).to(shares.dtype)
        shares[i].addcmul_(equal, weights[j])
        shares[j].addcmul_(equal, weights[i])
    # The sums of one class differ by rounding, with the order of its voxels.
    is_beaten = (shares < shares.amax(0) - EQUAL_SHARES).to(classes.dtype)
    return (classes | is_beaten * torch.iinfo(classes.dtype).max).amin(0)


def _label(read: Tensor, cells: Cells, region: Region, votes: Votes) -> None:
    """Write the labels of a block where a cell has one class; let vote where it has several."""
    flat = read.view(-1)
    target = votes.label_out[region]
    target.copy_(torch.index_select(flat, 0, cells.first).view(target.shape))
    is_mixed = torch.index_select(_is_mixed(flat, cells.reach), 0, cells.first)
    points = is_mixed.nonzero().squeeze(1)
    if len(points) == 0:
        return
    first, *weights = (torch.index_select(x, 0, points) for x in (cells.first, *cells.weights))
    corners = torch.stack([cells.corner(flat, corner, first) for corner in CORNERS])
    votes.add(_places(points, target, votes.label_out), corners, torch.stack(weights))


def _places(points: Tensor, part: Tensor, whole: Tensor) -> Tensor:
    """Return where voxels of a flattened part lie in the flattened volume that it is a view of."""
    _, lines, voxels = part.shape
    plane, line, _ = part.stride()
    row = points // voxels
    above = row.div(lines, rounding_mode="floor")
    begin = int(part.storage_offset()) - int(whole.storage_offset())
    return points + row * (line - voxels) + above * (plane - lines * line) + begin


def _is_mixed(flat: Tensor, reach: list[int]) -> Tensor:
    """Return whether the cell that begins at a voxel has several classes."""
    least = most = flat
    for step in (1, reach[2], reach[1] * reach[2]):
        least = torch.minimum(least[:-step], least[step:])
        most = torch.maximum(most[:-step], most[step:])
    return least != most


def _interpolated(read: Tensor, cells: Cells) -> Tensor:
    flat = read.view(-1)
    x, y, z = cells.weights
    planes = []
    for i in (0, 1):
        lines = [
            cells.corner(flat, (i, j, 0), cells.first).lerp_(
                cells.corner(flat, (i, j, 1), cells.first), z
            )
            for j in (0, 1)
        ]
        planes.append(lines[0].lerp_(lines[1], y))
    return planes[0].lerp_(planes[1], x)


def _cells(block: Block, dtype: torch.dtype) -> Cells:
    one = 1 << block.bits
    x, y, z = (position >> block.bits for position in block.positions)
    first = x.mul_(block.reach[1]).add_(y).mul_(block.reach[2]).add_(z)
    weights = tuple(
        (position & (one - 1)).to(dtype).mul_(1 / one).view(-1) for position in block.positions
    )
    return Cells(first=first.long().view(-1), weights=weights, reach=block.reach)


def _inside(block: Block, shape: torch.Size) -> Region | None:
    """Return which part of the box a block reads, None if it reads none."""
    low = [max(0, origin) for origin in block.origin]
    high = [
        min(size, origin + reach)
        for size, origin, reach in zip(shape, block.origin, block.reach, strict=True)
    ]
    if any(first >= end for first, end in zip(low, high, strict=True)):
        return None
    x, y, z = (slice(first, end) for first, end in zip(low, high, strict=True))
    return x, y, z


def _read(box: Tensor, block: Block, inside: Region, dtype: torch.dtype) -> Tensor:
    """Return the voxels that a block reads, 0 outside of the box."""
    part = box[inside]
    if list(part.shape) == block.reach:
        return part.to(dtype, memory_format=torch.contiguous_format).contiguous()
    read = box.new_zeros(block.reach, dtype=dtype)
    read[
        tuple(
            slice(some.start - origin, some.stop - origin)
            for some, origin in zip(inside, block.origin, strict=True)
        )
    ] = part
    return read


def _blocks(matrix: Matrix, offset: Offset, size: torch.Size) -> Iterator[Block]:
    edges = _edges(matrix, size)
    span = max(_reach(row, edges) for row in matrix)
    bits = min(FRACTION_BITS, 31 - span.bit_length())
    # What a step along each axis of the output adds to each axis of the box.
    steps = [
        [
            torch.arange(edge, dtype=torch.float64).mul_(math.ldexp(factor, bits)).round_().int()
            for factor, edge in zip(row, edges, strict=True)
        ]
        for row in matrix
    ]
    for start in itertools.product(
        *(range(0, voxels, edge) for voxels, edge in zip(size, edges, strict=True))
    ):
        ends = [min(first + edge, n) for first, edge, n in zip(start, edges, size, strict=True)]
        x, y, z = (slice(first, end) for first, end in zip(start, ends, strict=True))
        first = [
            math.fsum([shift, *(a * b for a, b in zip(row, start, strict=True))])
            for row, shift in zip(matrix, offset, strict=True)
        ]
        lengths = [end - begin for begin, end in zip(start, ends, strict=True)]
        yield _block((x, y, z), first, [_shortened(axis, lengths) for axis in steps], bits)


def _shortened(steps: list[Tensor], lengths: list[int]) -> list[Tensor]:
    return [step[:length] for step, length in zip(steps, lengths, strict=True)]


def _block(region: Region, first: list[float], steps: list[list[Tensor]], bits: int) -> Block:
    origins, reaches, positions = [], [], []
    for position, (x, y, z) in zip(first, steps, strict=True):
        start = round(math.ldexp(position, bits))
        ends = [(0, int(step[-1])) for step in (x, y, z)]
        origin = (start + sum(map(min, ends))) >> bits
        start -= origin << bits
        origins.append(origin)
        reaches.append(((start + sum(map(max, ends))) >> bits) + 2)
        positions.append((x[:, None] + (y + start))[:, :, None] + z)
    return Block(region=region, origin=origins, reach=reaches, positions=positions, bits=bits)


def _edges(matrix: Matrix, size: torch.Size) -> list[int]:
    """Return the sides of a block, smaller along the axes along which it reaches far."""
    edges = [min(BLOCK_EDGE, voxels) for voxels in size]
    while math.prod(_reach(row, edges) for row in matrix) > MAX_REACH and max(edges) > 1:
        lengths = [
            (edge - 1) * max(abs(row[axis]) for row in matrix) for axis, edge in enumerate(edges)
        ]
        longest = lengths.index(max(lengths))
        edges[longest] = (edges[longest] + 1) // 2
    return edges


def _reach(row: tuple[float, ...], edges: list[int]) -> int:
    """Return about how many voxels of the box a block reads along an axis, never too few."""
    return math.ceil(sum(abs(a) * (edge - 1) for a, edge in zip(row, edges, strict=True))) + 3
