"""The class of each voxel, from its logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.memory.fake_devices import is_gpu


def strongest_class(logits: Tensor) -> Tensor:
    """Return the class of the largest logit of each voxel, the first of equal ones.

    Args:
        logits: Shape (K, X, Y, Z).

    Returns:
        Shape (X, Y, Z) of an integer type, on the device of the logits.
    """
    if is_gpu(logits.device):
        return logits.argmax(0)
    # On a CPU argmax goes through the classes of one voxel after the other, 20 times as slowly.
    dtype = torch.uint8 if len(logits) <= 256 else torch.int64
    classes = torch.zeros(logits.shape[1:], dtype=dtype)
    largest = logits[0].clone()
    for label, values in enumerate(logits[1:], start=1):
        # It is larger than those before, so it takes the place of any of them.
        torch.maximum(classes, (values > largest).to(dtype).mul_(label), out=classes)
        torch.maximum(largest, values, out=largest)
    return classes


def written_regions(logits: Tensor, classes: Sequence[int]) -> Tensor:
    """Return a class for each voxel where regions may overlap: that of the last one that it is in.

    A voxel is in a region where the sigmoid of its logit is above one half.

    Args:
        logits: Shape (R, X, Y, Z), one for each region.
        classes: What is written for each region, one over the other; 0 is what is in none.

    Returns:
        Shape (X, Y, Z), uint8 or for classes above 255 int64, on the device of the logits.
    """
    dtype = torch.uint8 if max(classes) <= 255 else torch.int64
    written = torch.zeros(logits.shape[1:], dtype=dtype, device=logits.device)
    for values, label in zip(logits, classes, strict=True):
        written.masked_fill_(values > 0, label)
    return written
