"""Sampling in PyTorch's own operations, block by block of the output.

What a block reads, its positions and its values stay in a processor's cache, so that reading eight
voxels for each position takes less time than ``grid_sample`` needs for its arithmetic.
"""

import torch
from torch import Tensor

from unet3d.kernels.affine.cells import Block, Region, blocks
from unet3d.kernels.affine.geometry import CORNERS, Matrix, Offset, Voxel
from unet3d.kernels.affine.voting import corner_weights, largest_share


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
            values = block.cells.interpolated(_read(channel, block, inside, image_out.dtype))
            target.copy_(values.view(target.shape))
        _label(_read(label, block, inside, label.dtype), block, label_out[block.region])


def _label(read: Tensor, block: Block, target: Tensor) -> None:
    """Write the labels of a block: a cell has one class, or its voxels vote."""
    least, most = read.aminmax()
    if least == most:
        target.copy_(least)
        return
    cells = block.cells
    labels = cells.taken(read)
    is_mixed = cells.taken(_is_mixed(read))
    points = is_mixed.nonzero().squeeze(1)
    if len(points) > 0:
        first, second = cells.chosen(points)
        steps = torch.tensor(
            [i * read.stride(0) + j * read.stride(1) + k for i, j, k in CORNERS], device=read.device
        )
        corners = read.view(-1).index_select(0, (steps[:, None] + first).view(-1)).view(8, -1)
        labels[points] = largest_share(corners, corner_weights(second))
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
