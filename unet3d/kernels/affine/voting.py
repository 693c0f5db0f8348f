"""The class of positions between several classes: the one with the largest share of weights."""

import itertools

import torch
from torch import Tensor

from unet3d.kernels.affine.geometry import CORNERS, EQUAL_SHARES

MAX_VOTES = 2**16
"""Positions for which it is voted at a time."""


class Votes:
    """Positions between several classes, which wait until they are many."""

    def __init__(self, label_out: Tensor) -> None:
        """Begin without any.

        Args:
            label_out: (X, Y, Z), to which winners are written.
        """
        self._label_out = label_out
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._count = 0

    def add(self, places: Tensor, corners: Tensor, weights: Tensor) -> None:
        """Add positions.

        Args:
            places: Their indices in the flattened output (V).
            corners: The classes of their cells' voxels (8, V).
            weights: How much they take of the second voxel along X, Y and Z (3, V).
        """
        self._waiting.append((places, corners, weights))
        self._count += len(places)
        if self._count >= MAX_VOTES:
            self.count()

    def count(self) -> None:
        """Write the class of every position that waits."""
        if self._waiting:
            waiting = zip(*self._waiting, strict=True)
            places, corners, seconds = (torch.cat(some, -1) for some in waiting)
            x, y, z = ((1 - second, second) for second in seconds)
            weights = torch.stack([x[i] * y[j] * z[k] for i, j, k in CORNERS])
            self._label_out.view(-1)[places] = largest_share(corners, weights)
        self._waiting, self._count = [], 0


def largest_share(classes: Tensor, weights: Tensor) -> Tensor:
    """Return the class with the largest sum of weights, of equal ones the smallest.

    Args:
        classes: (8, V), not negative.
        weights: (8, V).
    """
    shares = weights.clone()
    for i, j in itertools.combinations(range(len(classes)), 2):
        is_equal = (classes[i] == classes[j]).to(shares.dtype)
        shares[i].addcmul_(is_equal, weights[j])
        shares[j].addcmul_(is_equal, weights[i])
    is_beaten = (shares < shares.amax(0) - EQUAL_SHARES).to(classes.dtype)
    # masked_fill is not vectorised; this is: nothing is larger than all bits but the sign's.
    return (classes | is_beaten * torch.iinfo(classes.dtype).max).amin(0)
