"""The class of positions between several classes: the one with the largest share of weights."""

import itertools

import torch
from torch import Tensor

from unet3d.kernels.affine.geometry import CORNERS, EQUAL_SHARES


def corner_weights(second: Tensor) -> Tensor:
    """Return how much positions take of each corner of their cells (8, V).

    Args:
        second: How much they take of the second voxel along X, Y and Z (3, V).
    """
    x, y, z = torch.stack([1 - second, second], 1)
    return torch.stack([x[i] * y[j] * z[k] for i, j, k in CORNERS])


def largest_share(classes: Tensor, weights: Tensor) -> Tensor:
    """Return the class with the largest sum of weights, of equal ones the smallest.

    Args:
        classes: (8, V), not negative.
        weights: (8, V).
    """
    shares, parts, corners = list(weights.clone()), list(weights), list(classes)
    for i, j in itertools.combinations(range(len(corners)), 2):
        is_equal = (corners[i] == corners[j]).view(torch.uint8).to(weights.dtype)
        shares[i].addcmul_(is_equal, parts[j])
        shares[j].addcmul_(is_equal, parts[i])
    summed = torch.stack(shares)
    is_beaten = (summed < summed.amax(0) - EQUAL_SHARES).view(torch.uint8).to(classes.dtype)
    # masked_fill is not vectorised; this is: nothing is larger than all bits but the sign's.
    return (classes | is_beaten * torch.iinfo(classes.dtype).max).amin(0)
