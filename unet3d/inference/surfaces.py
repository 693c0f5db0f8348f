"""Distances between the surfaces of two masks, and the two scores that are made of them.

The surface of a mask is those of its voxels with one of their six neighbours outside; beyond the
edge of a volume is outside. Each has a distance, in mm, from its centre to that of the nearest
surface voxel of the other mask. This is the convention of MONAI, by which other tools' numbers may
differ: some measure between the faces of voxels, or weigh a voxel by the area of its surface.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from nibabel.affines import voxel_sizes
from scipy.spatial import cKDTree

from unet3d.datasets.labels import Mask
from unet3d.images.geometry import Affine, is_sheared

ROUNDING = 1e-5
"""By which share of the tolerance a distance may be larger: single precision, in which headers
store spacings, decides otherwise whether a neighbour at 0.7 mm lies within 0.7 mm."""


@dataclass(frozen=True, kw_only=True)
class SurfaceDistances:
    """How far two surfaces are from each other, in both directions."""

    of_prediction_mm: npt.NDArray[np.floating[Any]]
    """For each surface voxel of the prediction, the distance to the surface of the label."""
    of_label_mm: npt.NDArray[np.floating[Any]]
    """For each surface voxel of the label, the distance to the surface of the prediction."""

    @property
    def hd95_mm(self) -> float:
        """The larger of the 95th percentiles of the two directions (not that of both together)."""
        both = (self.of_prediction_mm, self.of_label_mm)
        return float(max(np.percentile(distances, 95) for distances in both))

    def surface_dice(self, tolerance_mm: float) -> float:
        """Return the normalised surface Dice (arXiv 1809.04430): the share within the tolerance.

        It counts surface voxels of both masks, from 0 to 1.
        """
        within = tolerance_mm * (1 + ROUNDING)
        both = np.concatenate([self.of_prediction_mm, self.of_label_mm])
        return float(np.mean(both <= within))


def surface_distances(prediction: Mask, label: Mask, affine: Affine) -> SurfaceDistances:
    """Return the distances between two surfaces.

    MONAI's distances take a spacing only. Where axes are not at right angles, as in a CT of a
    tilted gantry, the same surface voxels are placed by the affine.
    """
    # Importing it takes 3 s, which every start of a training would wait for.
    from monai.metrics import get_mask_edges, get_surface_distance

    edges = get_mask_edges(prediction, label)
    if is_sheared(affine):
        places = [np.argwhere(edge) @ affine[:3, :3].T for edge in edges]
        there, back = (
            cKDTree(target).query(source)[0] for source, target in (places, reversed(places))
        )
    else:
        spacing = voxel_sizes(affine).tolist()
        there, back = (
            np.asarray(get_surface_distance(source, target, spacing=spacing))
            for source, target in (edges, reversed(edges))
        )
    return SurfaceDistances(of_prediction_mm=there, of_label_mm=back)
