"""What both ways of sampling know of a cell: its corners, and when shares are equal."""

import itertools

Matrix = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]
Offset = tuple[float, float, float]
Voxel = tuple[int, int, int]

CORNERS = tuple(itertools.product((0, 1), repeat=3))
"""The voxels of a cell, along X, Y and Z from its first."""
EQUAL_SHARES = 1e-6
"""Classes whose shares of a position differ by less have the same: the rest is rounding."""
