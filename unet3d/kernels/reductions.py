"""Reductions: the class of each voxel from its logits, averages of blocks of voxels."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.maps import is_channels_last
from unet3d.memory.fake_devices import is_gpu


def strongest_class(logits: Tensor) -> Tensor:
    """Return the class (X, Y, Z) of the largest logit (K, X, Y, Z); ties go to the first."""
    if is_gpu(logits.device):
        return logits.argmax(0)
    # On a CPU argmax reduces the classes voxel by voxel, which takes 20 times as long.
    dtype = torch.uint8 if len(logits) <= 256 else torch.int64
    classes = torch.zeros(logits.shape[1:], dtype=dtype)
    largest = logits[0].clone()
    for label, values in enumerate(logits[1:], start=1):
        # This label is larger than all before, so the maximum replaces any of them.
        torch.maximum(classes, (values > largest).to(dtype).mul_(label), out=classes)
        torch.maximum(largest, values, out=largest)
    return classes


def written_regions(logits: Tensor, classes: Sequence[int]) -> Tensor:
    """Return each voxel's class (X, Y, Z): the class of the last region that contains the voxel.

    A region contains a voxel if the sigmoid of the region's logit there, (R, X, Y, Z), is above one
    half. ``classes`` has a class for each region; voxels in no region are 0.
    """
    dtype = torch.uint8 if max(classes) <= 255 else torch.int64
    written = torch.zeros(logits.shape[1:], dtype=dtype, device=logits.device)
    for values, label in zip(logits, classes, strict=True):
        written.masked_fill_(values > 0, label)
    return written


def average_pool(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Average blocks of voxels of a map (N, C, X, Y, Z), without a partial block at an axis' end.

    PyTorch's operation returns channels-first memory. On a CPU the result of a channels-last map is
    channels-last, too, and has the map's type even under autocast.
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
