"""Sampling in PyTorch's own operations, block by block of the output.

What a block reads, its positions and its values stay in a processor's cache, so that reading eight
voxels for each position takes less time than ``grid_sample`` needs for its arithmetic.
"""

import itertools

import torch
from torch import Tensor

from unet3d.kernels.affine.cells import (
    CORNERS,
    EQUAL_SHARES,
    Block,
    Matrix,
    Offset,
    Region,
    Voxel,
    blocks,
)


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
    for block in blocks(matrix, offset, start, image_out):
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
    """Write the labels of a block: a cell has one class, or its voxels vote."""
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

    At the last voxels along an axis begins none.
    """
    is_mixed = torch.empty_like(read, dtype=torch.bool)
    least = most = read.view(-1)
    for step in read.stride():
        least = torch.minimum(least[:-step], least[step:])
        most = torch.maximum(most[:-step], most[step:])
    torch.ne(least, most, out=is_mixed.view(-1)[: len(least)])
    return is_mixed


def _largest_share(classes: Tensor, weights: Tensor) -> Tensor:
    """Return of classes (8, V) that with the largest sum of weights, of equal ones the smallest."""
    shares, parts, corners = list(weights.clone()), list(weights), list(classes)
    for i, j in itertools.combinations(range(len(corners)), 2):
        is_equal = (corners[i] == corners[j]).view(torch.uint8).to(weights.dtype)
        shares[i].addcmul_(is_equal, parts[j])
        shares[j].addcmul_(is_equal, parts[i])
    summed = torch.stack(shares)
    is_beaten = (summed < summed.amax(0) - EQUAL_SHARES).view(torch.uint8).to(classes.dtype)
    # masked_fill is not vectorised; this is: nothing is larger than all bits but the sign's.
    return (classes | is_beaten * torch.iinfo(classes.dtype).max).amin(0)
