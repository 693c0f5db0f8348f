"""How far a prediction and the truth overlap: the sums over voxels that the loss is made of.

PyTorch would keep several float32 tensors of the logits' size for backward; the Triton version
keeps the logits alone and reads them once each way.
"""

import torch
from torch import Tensor

import unet3d.kernels.dice_ce.op  # noqa: F401 - registers the operation
from unet3d.kernels.triton_support import triton_available

MAX_CLASSES = 256
"""More do not fit into one program's registers."""


def dice_ce_sums(logits: Tensor, target: Tensor) -> Tensor:
    """Return what a Dice and a cross-entropy need to know, summed over the voxels.

    Args:
        logits: (N, K, X, Y, Z).
        target: Class indices (N, X, Y, Z) of any integer type.

    Returns:
        (4, N, K) in float32 at least. With p the softmax of the logits: the sum of -log p over the
        voxels of each class, that of p over them, that of p over all voxels, and their number.
    """
    low = (torch.float32, torch.bfloat16, torch.float16)
    if logits.dtype in low and logits.shape[1] <= MAX_CLASSES and triton_available(logits):
        sums: Tensor = torch.ops.unet3d.dice_ce_sums(logits, target)
        return sums
    return reference(logits, target)


def reference(logits: Tensor, target: Tensor) -> Tensor:
    """Do as :func:`dice_ce_sums` does, with PyTorch's own operations."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    logs = torch.log_softmax(logits, 1, exact)
    probabilities = logs.exp()
    rows = []
    for label in range(logits.shape[1]):
        inside = target == label
        log, probability = logs[:, label], probabilities[:, label]
        nothing = log.new_zeros(())
        sums = [
            torch.where(inside, -log, nothing),
            torch.where(inside, probability, nothing),
            probability,
            inside.to(exact),
        ]
        rows.append(torch.stack([value.sum((1, 2, 3)) for value in sums]))
    return torch.stack(rows, -1)
