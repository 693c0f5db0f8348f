"""Sampling in PyTorch's own operations, block by block of the output.

What a block reads, its positions and its values stay in a processor's cache, so that reading eight
voxels for each position takes less time than ``grid_sample`` needs for its arithmetic.
"""

import torch
from torch import Tensor

from unet3d.kernels.affine.cells import Block, Region, blocks
from unet3d.kernels.affine.geometry import CORNERS, Matrix, Offset
from unet3d.kernels.affine.voting import Votes


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
    for block in blocks(matrix, offset, label_out.shape, image_out.dtype):
        inside = _inside(block, label.shape)
        if inside is None:
            image_out[:, *block.region] = 0
            label_out[block.region] = 0
            continue
        for channel, out in zip(image, image_out, strict=True):
            target = out[block.region]
            values = block.cells.interpolated(_read(channel, block, inside, image_out.dtype))
            target.copy_(values.view(target.shape))
        _label(_read(label, block, inside, label.dtype), block, label_out, votes)
    votes.count()


def _label(read: Tensor, block: Block, label_out: Tensor, votes: Votes) -> None:
    """Write the labels of a block where a cell has one class; let vote where it has several."""
    target = label_out[block.region]
    least, most = read.aminmax()
    if least == most:
        target.copy_(least)
        return
    flat = read.view(-1)
    first = block.cells.first
    target.copy_(flat.index_select(0, first).view(target.shape))
    points = _is_mixed(flat, block.reach).index_select(0, first).nonzero().squeeze(1)
    if len(points) == 0:
        return
    first = first.index_select(0, points)
    _, y, z = block.reach
    corners = [flat[(i * y + j) * z + k :].index_select(0, first) for i, j, k in CORNERS]
    places = _places(points, target, label_out)
    votes.add(places, torch.stack(corners), block.cells.weights(points))


def _places(points: Tensor, part: Tensor, whole: Tensor) -> Tensor:
    """Return where voxels of a flattened part lie in the flattened volume that it is a view of."""
    _, lines, voxels = part.shape
    plane, line, _ = part.stride()
    row = points // voxels
    begin = int(part.storage_offset()) - int(whole.storage_offset())
    return points + row * (line - voxels) + row // lines * (plane - lines * line) + begin


def _is_mixed(flat: Tensor, reach: list[int]) -> Tensor:
    """Return whether the cell that begins at a voxel has several classes."""
    least = most = flat
    for step in (1, reach[2], reach[1] * reach[2]):
        least = torch.minimum(least[:-step], least[step:])
        most = torch.maximum(most[:-step], most[step:])
    return least != most


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
