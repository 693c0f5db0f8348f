"""Scores of a label map against another: Dice, HD95, surface Dice and volume of each label.

The surface of a mask consists of its voxels with at least one of six neighbours outside; beyond the
edge of a volume is outside. A distance is that in mm between the centres of a surface voxel and of
the nearest surface voxel of the other mask. This is MONAI's convention; other tools may measure
between faces of voxels, or weight voxels by surface area.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unet3d.datasets.labels import BACKGROUND, Label, Mask, ScoredLabels, box_of, mask_of
from unet3d.images.geometry import Affine, voxel_mm3

CUBIC_MM_PER_ML = 1000.0

TOLERANCE_MM = 1.0
"""Of the surface Dice, where none is given."""

ROUNDING = 1e-5
"""By which share of the tolerance a distance may be larger: single precision, in which headers
store spacings, decides otherwise whether a neighbour at 0.7 mm lies within 0.7 mm."""

LabelMap = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """One label in one case, or its mean over cases."""

    dice: float | None
    """From 0 to 1; None where neither the prediction nor the label map has the label."""
    hd95_mm: float | None
    """The larger one of two numbers: the 95th percentile of the distances from the surface voxels
    of the prediction to the surface of the label map, and that of the other direction. None where
    either has no voxel of the label, because there is then no distance (the Dice of 0 tells)."""
    nsd: float | None
    """Normalised surface Dice: the share of both surfaces that lies within a tolerance of the
    other; 0 where one of them has no voxel of the label, None where neither has."""
    prediction_ml: float
    """Volume of the label in the prediction."""
    label_ml: float
    """Volume of the label in the label map."""


NOWHERE = LabelScore(dice=None, hd95_mm=None, nsd=None, prediction_ml=0.0, label_ml=0.0)


def score_maps(
    prediction: LabelMap,
    label: LabelMap,
    affine: Affine,
    scored: ScoredLabels,
    tolerance_mm: float = TOLERANCE_MM,
) -> dict[Label, LabelScore]:
    """Return the score of each label that one of two label maps has."""
    if scored.ignore is not None:
        counted = label != scored.ignore
        if not counted.all():
            prediction = np.where(counted, prediction, prediction.dtype.type(BACKGROUND))
            label = np.where(counted, label, label.dtype.type(BACKGROUND))
    there = np.union1d(np.unique(prediction), np.unique(label)).tolist()
    return {
        one: _score(mask_of(prediction, one), mask_of(label, one), affine, tolerance_mm)
        for one in scored.among(there)
    }


def dice_per_class(
    prediction: Tensor | npt.NDArray[Any], target: Tensor | npt.NDArray[Any], num_classes: int
) -> list[float | None]:
    """Return the Dice of each class."""
    return [
        _dice(torch.as_tensor(prediction == index), torch.as_tensor(target == index))
        for index in range(num_classes)
    ]


def _score(prediction: Mask, label: Mask, affine: Affine, tolerance_mm: float) -> LabelScore:
    # What follows takes time for each voxel, and a label usually fills a small part of a volume.
    box = box_of(prediction | label)
    prediction, label = prediction[box], label[box]
    voxel_ml = voxel_mm3(affine) / CUBIC_MM_PER_ML
    num_predicted, num_labelled = np.count_nonzero(prediction), np.count_nonzero(label)
    hd95_mm, nsd = None, 0.0
    if num_predicted and num_labelled:
        distances = surface_distances(prediction, label, affine)
        hd95_mm = max(float(np.percentile(one, 95)) for one in distances)
        nsd = surface_dice(distances, tolerance_mm)
    return LabelScore(
        dice=_dice(torch.from_numpy(prediction), torch.from_numpy(label)),
        hd95_mm=hd95_mm,
        nsd=nsd,
        prediction_ml=num_predicted * voxel_ml,
        label_ml=num_labelled * voxel_ml,
    )


def surface_distances(
    prediction: Mask, label: Mask, affine: Affine
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the distances in mm of each surface voxel of two masks (X, Y, Z) to the other surface.

    The affine places the voxels, also where axes are not at right angles, as in a CT of a tilted
    gantry.
    """
    # Importing it takes 3 s, which every start of a training would wait for.
    from monai.metrics import get_mask_edges
    from scipy.spatial import cKDTree

    edges = get_mask_edges(prediction, label)
    one, other = (np.argwhere(edge) @ affine[:3, :3].T for edge in edges)
    # A place far from the other surface is compared with much of it, so all cores are used.
    there = cKDTree(other).query(one, workers=-1)[0]
    return there, cKDTree(one).query(other, workers=-1)[0]


def surface_dice(
    distances: tuple[npt.NDArray[Any], npt.NDArray[Any]], tolerance_mm: float
) -> float:
    """Return the normalised surface Dice (arXiv 1809.04430): the share within the tolerance."""
    return float(np.mean(np.concatenate(distances) <= tolerance_mm * (1 + ROUNDING)))


def _dice(prediction: Tensor, target: Tensor) -> float | None:
    # Importing it takes 3 s, which every start of a training would wait for.
    from monai.metrics import compute_dice

    if not (prediction.any() or target.any()):
        return None
    # As the batch (1, 1, X, Y, Z) that MONAI takes.
    batches = prediction[None, None], target[None, None]
    return float(compute_dice(*batches, ignore_empty=False).item())
