"""Label maps, and distances between surfaces computed the simple way."""

import numpy as np
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation


def cube(start, stop, shape=(20, 20, 20), value=1):
    array = np.zeros(shape, dtype=np.uint8)
    array[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = value
    return array


def tilted(degrees, spacing_mm):
    """Return the affine of a CT whose table moves along Z while the gantry is tilted about X."""
    affine = np.diag([*spacing_mm, 1.0])
    affine[:3, 1] = Rotation.from_euler("x", degrees, degrees=True).apply(affine[:3, 1])
    return affine


def nearest_mm(one, other, affine):
    """Return the distance of each surface voxel to the other mask's surface, for both masks.

    A surface voxel has one of its six neighbours outside of the mask.
    """
    places = []
    for mask in (one, other):
        padded = np.pad(mask, 1)
        inner = np.ones_like(mask)
        for axis in range(3):
            for step in (-1, 1):
                inner &= np.roll(padded, step, axis)[1:-1, 1:-1, 1:-1]
        places.append(np.argwhere(mask & ~inner) @ affine[:3, :3].T)
    apart = cdist(*places)
    return [apart.min(axis=1), apart.min(axis=0)]


def hd95_by_hand(one, other, affine):
    """Return the larger of the 95th percentiles of both directions."""
    return float(max(np.percentile(mm, 95) for mm in nearest_mm(one, other, affine)))
