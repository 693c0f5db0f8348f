"""Sampling in PyTorch's own operations, block by block of the output.

The input, positions and values of a block stay in a processor's cache, so reading eight voxels per
position takes less time than the arithmetic of ``grid_sample``.

Positions are fixed-point integers: their sums are exact, and cell and weight of a position are its
upper and lower bits. They depend neither on the block nor on whether only a part of the output is
made, so a part has the same bits as in the whole output.
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
"""The voxels of a cell, as offsets along X, Y and Z from its first."""
EQUAL_SHARES = 1e-6
"""Shares of classes that differ by less are equal: the difference is rounding."""

BLOCK_EDGE = 64
"""Most voxels of a block along an axis, so that its data stay in a cache."""
MAX_REACH = 2**20
"""Most voxels of a box that a block reads, unless the block has one voxel."""
FRACTION_BITS = 24
"""Fraction bits of a position: the significant bits of a float32."""
MAX_REACH_ALONG_AXIS = 127
"""Most voxels that a block reads along an axis, so that positions in it fit into an int32."""


class Block(NamedTuple):
    """A part of the output, of V voxels, and the cells of the box that they lie in."""

    region: Region
    """The part of the output."""
    origin: list[int]
    """First voxel that is read; it may lie outside of the box."""
    reach: list[int]
    """Voxels that are read along each axis, at least 2."""
    first: Tensor
    """Flat index of each voxel's cell in the voxels that are read (V)."""
    weights: list[Tensor]
    """Weight of the cell's second voxel along X, Y and Z, for each voxel (V)."""


def sample(
    image: Tensor,
    label: Tensor,
    matrix: Matrix,
    offset: Offset,
    *,
    image_out: Tensor,
    label_out: Tensor,
    start: Voxel = (0, 0, 0),
) -> None:
    """Sample a box into memory; see :func:`unet3d.kernels.affine.api.sample_affine`."""
    for block in _blocks(matrix, offset, start, image_out):
        inside = _inside(block, label.shape)
        if inside is None:
            image_out[:, *block.region] = 0
            label_out[block.region] = 0
            continue
        for channel, out in zip(image, image_out, strict=True):
            target = out[block.region]
            values = _interpolated(_read(channel, block, inside, image_out.dtype), block)
            target.copy_(values.view(target.shape))
        _label(_read(label, block, inside, label.dtype), block, label_out[block.region])


def _inside(block: Block, shape: torch.Size) -> Region | None:
    """Return the part of the box that a block reads, or None if it reads none of the box."""
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
        return part.contiguous().to(dtype)
    read = box.new_zeros(block.reach, dtype=dtype)
    x, y, z = (
        slice(some.start - origin, some.stop - origin)
        for some, origin in zip(inside, block.origin, strict=True)
    )
    read[x, y, z] = part
    return read


def _interpolated(read: Tensor, block: Block) -> Tensor:
    """Return the values at a block's positions (V)."""
    flat = read.view(-1)
    along_x, along_y, along_z = block.weights

    def line(start: int) -> Tensor:
        first, second = (flat[start + i :].index_select(0, block.first) for i in (0, 1))
        return first.lerp_(second, along_z)

    def plane(start: int) -> Tensor:
        return line(start).lerp_(line(start + read.stride(1)), along_y)

    return plane(0).lerp_(plane(read.stride(0)), along_x)


def _label(read: Tensor, block: Block, target: Tensor) -> None:
    """Write the labels of a block; the voxels of a cell with several classes vote."""
    least, most = read.aminmax()
    if least == most:
        target.copy_(least)
        return
    flat = read.view(-1)
    labels = flat.index_select(0, block.first)
    is_mixed = _is_mixed(read).view(-1).index_select(0, block.first)
    points = is_mixed.nonzero().squeeze(1)
    if len(points) > 0:
        steps = torch.tensor(
            [i * read.stride(0) + j * read.stride(1) + k for i, j, k in CORNERS], device=read.device
        )
        places = steps[:, None] + block.first.index_select(0, points)
        corners = flat.index_select(0, places.view(-1)).view(len(CORNERS), -1)
        second = torch.stack([weight.index_select(0, points) for weight in block.weights])
        x, y, z = torch.stack([1 - second, second], 1)
        weights = torch.stack([x[i] * y[j] * z[k] for i, j, k in CORNERS])
        labels[points] = _largest_share(corners, weights)
    target.copy_(labels.view(target.shape))


def _is_mixed(read: Tensor) -> Tensor:
    """Return, for each voxel, whether the cell that begins there has several classes.

    No cell begins at the last voxel along an axis.
    """
    is_mixed = torch.empty_like(read, dtype=torch.bool)
    least = most = read.view(-1)
    for step in read.stride():
        least = torch.minimum(least[:-step], least[step:])
        most = torch.maximum(most[:-step], most[step:])
    torch.ne(least, most, out=is_mixed.view(-1)[: len(least)])
    return is_mixed


def _largest_share(classes: Tensor, weights: Tensor) -> Tensor:
    """Return the class with the largest sum of weights (8, V); ties go to the smallest class."""
    shares, parts, corners = list(weights.clone()), list(weights), list(classes)
    for i, j in itertools.combinations(range(len(corners)), 2):
        is_equal = (corners[i] == corners[j]).view(torch.uint8).to(weights.dtype)
        shares[i].addcmul_(is_equal, parts[j])
        shares[j].addcmul_(is_equal, parts[i])
    summed = torch.stack(shares)
    is_beaten = (summed < summed.amax(0) - EQUAL_SHARES).view(torch.uint8).to(classes.dtype)
    # Vectorised, unlike masked_fill: all bits except the sign are the largest number.
    return (classes | is_beaten * torch.iinfo(classes.dtype).max).amin(0)


def _blocks(matrix: Matrix, offset: Offset, start: Voxel, out: Tensor) -> Iterator[Block]:
    """Yield the blocks of an output (C, X, Y, Z), which begins at voxel ``start`` of the whole.

    Voxel o of the whole lies at ``matrix @ o + offset``, in voxels of the box.
    """
    size = out.shape[1:]
    edges = _edges(matrix, size)
    # For each axis of the box: the contribution of each output axis to the position along it.
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
    """Return the edge lengths of a block, halved until the block reads few enough voxels."""
    edges = [min(BLOCK_EDGE, voxels) for voxels in size]
    while max(edges) > 1:
        reach = [  # upper estimate of the voxels read along each axis
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
