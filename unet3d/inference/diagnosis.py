"""What is wrong with a network or an image that nothing can be computed with, in words."""

import math

import numpy as np
import torch

from unet3d.errors import CheckpointError
from unet3d.model import BlockNetwork

MAX_WEIGHT = 1e6
"""Beyond it a variance soon overflows in float32. What is normalised by it becomes 0, and the
segmentation empty, though no number in sight is NaN or infinite. Trained weights stay below 100."""

LARGEST_USUAL = 1e4
"""Weights and intensities beyond this are named as the cause of an output that is not finite."""

MAX_FLOAT16 = 65504


def refuse_diverged(model: BlockNetwork, name: str) -> None:
    """Refuse weights with which nothing can be computed."""
    largest = _largest_weight(model)
    if not largest <= MAX_WEIGHT:
        raise CheckpointError(_weights(name, largest))


def cause_of_non_finite(model: BlockNetwork, name: str, intensity: float, precision: str) -> str:
    """Return the likely cause of an output that is not finite, and what to do about it."""
    weight = _largest_weight(model)
    if not weight <= LARGEST_USUAL:
        return _weights(name, weight)
    if not intensity <= LARGEST_USUAL:
        return (
            f"its normalised intensities {_reach(intensity)}; look for single voxels that are "
            "far from all others"
        )
    if precision == "float16":
        return (
            f"in float16, numbers beyond {MAX_FLOAT16} overflow; add --precision bfloat16, which "
            "reaches further"
        )
    return "its intensities are probably unlike those of the training; look at the image"


def _weights(name: str, largest: float) -> str:
    return f"{name}'s weights {_reach(largest)}: its training has diverged; use another checkpoint"


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a tensor; NaN if there is one."""
    if not tensor.numel():
        return 0.0
    return torch.stack(torch.aminmax(tensor)).abs().max().item()


def _largest_weight(model: BlockNetwork) -> float:
    """Return the same of all parameters; running variances may be large and still be right."""
    each = [_largest(parameter.detach()) for parameter in model.parameters()]
    return float(np.max(each))  # Python's own max overlooks a NaN


def _reach(magnitude: float) -> str:
    return f"reach {magnitude:.3g}" if math.isfinite(magnitude) else "are NaN or infinite"
