"""The sums over voxels that the Dice and the cross-entropy of a prediction are made of.

Autograd would keep several float32 tensors of the logits' size for backward; here only the logits
are kept. The Triton version reads them once each way and stores no probabilities.
"""

import torch
from torch import Tensor

import unet3d.kernels.dice_ce.op  # noqa: F401 - registers the operation
from unet3d.kernels.dice_ce import reference
from unet3d.kernels.triton_support import triton_available

MAX_CLASSES = 256
"""More classes do not fit into one program's registers."""

_FAST_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def dice_ce_sums(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sums over voxels from which Dice and cross-entropy follow.

    Args:
        logits: (N, K, X, Y, Z).
        target: Class indices (N, X, Y, Z) of any integer type. Voxels whose index is K or more are
            left out, and the gradient of their logits is 0.

    Returns:
        (4, N, K) in float32 at least. With p the softmax of the logits: the sum of -log p over the
        voxels of each class, that of p over them, that of p over all voxels, and their number.
    """
    if logits.dtype in _FAST_TYPES and logits.shape[1] <= MAX_CLASSES and triton_available(logits):
        sums: Tensor = torch.ops.unet3d.dice_ce_sums(logits, target)
        return sums
    return reference.sums(logits, target)
