"""Averages of small blocks of voxels."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.padding import is_channels_last
from unet3d.memory.fake_devices import is_gpu


def average_pool(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Average the voxels of each block of a map (N, C, X, Y, Z), but for a rest at an axis' end.

    PyTorch's operation returns channels-first memory; on a CPU a map that is channels-last stays
    so, and keeps its type under autocast.
    """
    if is_gpu(x.device) or not is_channels_last(x):
        return F.avg_pool3d(x, tuple(stride), tuple(stride))
    n, c, *space = x.shape
    counts = [size // step for size, step in zip(space, stride, strict=True)]
    for axis, (count, step) in enumerate(zip(counts, stride, strict=True), start=2):
        if x.shape[axis] > count * step:
            x = x.narrow(axis, 0, count * step)
    pairs = [size for pair in zip(counts, stride, strict=True) for size in pair]
    blocks = x.permute(0, 2, 3, 4, 1).reshape(n, *pairs, c)
    return blocks.mean((2, 4, 6)).permute(0, 4, 1, 2, 3)
