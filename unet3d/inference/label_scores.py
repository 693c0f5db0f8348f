"""Scores of a label map against another: Dice, HD95, surface Dice and volume of each label.

The surface of a mask consists of its voxels with at least one of six neighbours outside; beyond the
edge of a volume is outside. Distances are measured in mm, from the centre of a surface voxel to the
centre of the nearest surface voxel of the other mask. This is MONAI's convention; other tools may
measure between faces of voxels, or weight voxels by surface area.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unet3d.datasets.labels import BACKGROUND, Label, Mask, ScoredLabels, box_of, mask_of
from unet3d.images.files import times
from unet3d.images.geometry import Affine, voxel_mm3
from unet3d.images.memory_limits import refuse_beyond_memory

CUBIC_MM_PER_ML = 1000.0

TOLERANCE_MM = 1.0
"""Default tolerance of the surface Dice."""

ROUNDING = 1e-5
"""Share of the tolerance by which a distance may exceed it. Without it, the rounding of spacings to
single precision in headers would decide whether a neighbour at 0.7 mm lies within 0.7 mm."""

MASK_BYTES, BOX_BYTES = 3, 16
"""Memory per voxel for the masks of a label, and for its scores, per voxel of its box."""

TOO_LARGE = "use a machine with more, or compare coarser levels of pyramids (--level)"
"""What to do about label maps that are too large to compare."""

LabelMap = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """One label in one case, or its mean over cases."""

    dice: float | None
    """From 0 to 1; None if neither segmentation nor label map has the label."""
    hd95_mm: float | None
    """The larger of two 95th percentiles of distances: from the surface of the segmentation to the
    surface of the label map, and in the opposite direction. None if either lacks the label."""
    nsd: float | None
    """Normalised surface Dice: the share of both surfaces that lies within a tolerance of the
    other; 0 if one of them lacks the label, None if both do."""
    prediction_ml: float
    """Volume of the label in the segmentation."""
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
    """Return the score of each label that at least one of two label maps has."""
    what = f"comparing label maps of {times(label.shape)} voxels"
    refuse_beyond_memory(MASK_BYTES * label.size, what, TOO_LARGE)
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
    """Return the Dice of each class; None for a class that neither array has."""
    return [
        _dice(torch.as_tensor(prediction == index), torch.as_tensor(target == index))
        for index in range(num_classes)
    ]


def _score(prediction: Mask, label: Mask, affine: Affine, tolerance_mm: float) -> LabelScore:
    # Cropped to the label, because the time below grows with the number of voxels.
    box = box_of(prediction | label)
    prediction, label = prediction[box], label[box]
    what = f"scoring a label in {times(label.shape)} voxels"
    refuse_beyond_memory(BOX_BYTES * label.size, what, TOO_LARGE)
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

    The affine gives the positions of voxels, also for axes that are not at right angles, as in a CT
    with a tilted gantry.
    """
    # Imported here, because it takes 3 s, which would delay every start of training.
    from monai.metrics import get_mask_edges
    from scipy.spatial import cKDTree

    edges = get_mask_edges(prediction, label)
    one, other = (np.argwhere(edge) @ affine[:3, :3].T for edge in edges)
    # A voxel far from the other surface is compared with much of it, so all cores are used.
    there = cKDTree(other).query(one, workers=-1)[0]
    return there, cKDTree(one).query(other, workers=-1)[0]


def surface_dice(
    distances: tuple[npt.NDArray[Any], npt.NDArray[Any]], tolerance_mm: float
) -> float:
    """Return the normalised surface Dice (arXiv 1809.04430): the share within the tolerance."""
    return float(np.mean(np.concatenate(distances) <= tolerance_mm * (1 + ROUNDING)))


def _dice(prediction: Tensor, target: Tensor) -> float | None:
    # Imported here, because it takes 3 s, which would delay every start of training.
    from monai.metrics import compute_dice

    if not (prediction.any() or target.any()):
        return None
    # As the batch (1, 1, X, Y, Z) that MONAI takes.
    batches = prediction[None, None], target[None, None]
    return float(compute_dice(*batches, ignore_empty=False).item())
