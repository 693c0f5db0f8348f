"""How well predictions agree with labels: Dice, HD95 and volume of each label in each case.

Only the files are needed, so predictions of any other tool can be evaluated as well.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from monai.metrics import compute_dice, compute_hausdorff_distance
from scipy import ndimage
from scipy.spatial import cKDTree
from torch import Tensor

from unet3d.errors import DatasetError, VolumeError
from unet3d.inference.pairing import Pair, Pairs, find_pairs
from unet3d.volumes.files import volume_stem
from unet3d.volumes.grids import Affine, is_sheared, voxel_mm3
from unet3d.volumes.header import VolumeHeader, same_grid
from unet3d.volumes.memory_limits import explaining_memory
from unet3d.volumes.nifti import on_grid_of, read_label

BACKGROUND = 0
CUBIC_MM_PER_ML = 1000.0

MAX_VALUES_OF_ONE_SIDE = 100
"""Values that only one of two label maps may have; more are the grey values of an image."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """One label in one case, or its mean over cases."""

    dice: float | None
    """From 0 to 1; None where neither the prediction nor the label map has the label."""
    hd95_mm: float | None
    """95th percentile of the distances between the two surfaces; None where either has no voxel of
    the label, because there is then no distance (the Dice of 0 tells)."""
    prediction_ml: float
    """Volume of the label in the prediction."""
    label_ml: float
    """Volume of the label in the label map."""


NOWHERE = LabelScore(dice=None, hd95_mm=None, prediction_ml=0.0, label_ml=0.0)


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """The scores of one case."""

    name: str
    prediction: Path
    label: Path
    scores: dict[int, LabelScore]
    """The score of each label by its value."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of every case; each has one for every label value that is in any of them."""

    cases: tuple[CaseScores, ...]
    label_values: tuple[int, ...]
    without_prediction: tuple[str, ...] = ()
    """Names of the label maps in the folder that nobody has predicted; they count nowhere."""

    def mean(self, value: int) -> LabelScore:
        """Return a label's means over the cases in which each number is defined.

        Args:
            value: The label's.
        """
        scores = [case.scores[value] for case in self.cases]
        return LabelScore(
            dice=_mean([score.dice for score in scores]),
            hd95_mm=_mean([score.hd95_mm for score in scores]),
            prediction_ml=float(np.mean([score.prediction_ml for score in scores])),
            label_ml=float(np.mean([score.label_ml for score in scores])),
        )

    def num_cases(self, value: int) -> tuple[int, int]:
        """Return how many cases are in a label's mean Dice and in its mean HD95.

        Args:
            value: The label's.
        """
        scores = [case.scores[value] for case in self.cases]
        num_dice = sum(score.dice is not None for score in scores)
        return num_dice, sum(score.hd95_mm is not None for score in scores)

    @property
    def mean_dice(self) -> float:
        """Mean over the labels of their mean Dice."""
        return float(np.mean([self.mean(value).dice for value in self.label_values]))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists and numbers, for JSON."""
        means = {}
        for value in self.label_values:
            num_dice, num_hd95 = self.num_cases(value)
            counts = {"num_cases_dice": num_dice, "num_cases_hd95": num_hd95}
            means[str(value)] = asdict(self.mean(value)) | counts
        return {
            "cases": [
                {
                    "case": case.name,
                    "prediction": str(case.prediction),
                    "label": str(case.label),
                    "labels": {str(value): asdict(score) for value, score in case.scores.items()},
                }
                for case in self.cases
            ],
            "without_prediction": list(self.without_prediction),
            "mean": means,
            "mean_dice": self.mean_dice,
        }


def dice_per_class(
    prediction: Tensor | npt.NDArray[Any], target: Tensor | npt.NDArray[Any], num_classes: int
) -> list[float | None]:
    """Return the Dice of each class.

    Args:
        prediction: Class indices, shape (X, Y, Z), on any device.
        target: Class indices, shape (X, Y, Z), on the same device.
        num_classes: Number of classes, the background included, which is class 0.

    Returns:
        A number for each class, the background first; None for a class that is in neither.
    """
    return [
        _dice(torch.as_tensor(prediction == index), torch.as_tensor(target == index))
        for index in range(num_classes)
    ]


def evaluate(
    predictions: Path, labels: Path, watch: Callable[[Pairs], Iterable[Pair]] = iter
) -> Evaluation:
    """Compare predictions with labels.

    Two files are compared whatever their names. In folders, the prediction of ``case.nii.gz`` is
    ``case.nii.gz``, ``case_seg.nii.gz`` or ``case_0000_seg.nii.gz``. Every value but 0 is a label.
    Label maps in a folder need not all be predicted, but every prediction needs its label map: one
    that has none is more likely to be misnamed than meant to be left out.

    Args:
        predictions: A label map, or a folder of them.
        labels: A label map, or a folder of them.
        watch: Passes on the pairs to compare, and may show how many are done.

    Raises:
        DatasetError: A prediction has no partner, or there is nothing to compare.
        VolumeError: A file cannot be read or is an image, two partners do not lie on one grid, or
            they are too large for the memory.
    """
    pairs, without = find_pairs(predictions, labels)
    cases = []
    for prediction, label in watch(pairs):
        with explaining_memory(f"cannot compare {prediction} with {label}"):
            cases.append(_compare(prediction, label))
    values = sorted({value for case in cases for value in case.scores})
    if not values:
        raise DatasetError(
            f"neither {predictions} nor {labels} holds any label but the background 0; "
            "there is nothing to compare"
        )
    return Evaluation(
        cases=tuple(
            CaseScores(
                name=case.name,
                prediction=case.prediction,
                label=case.label,
                scores={value: case.scores.get(value, NOWHERE) for value in values},
            )
            for case in cases
        ),
        label_values=tuple(values),
        without_prediction=tuple(without),
    )


def _compare(prediction_path: Path, label_path: Path) -> CaseScores:
    prediction, label = read_label(prediction_path), read_label(label_path)
    disagreement = same_grid(prediction.header, label.header)
    if disagreement is not None:
        raise VolumeError(
            f"{prediction_path} and {label_path} do not lie on one grid: {disagreement}; "
            "compare a prediction with the label map of its own image"
        )
    prediction = on_grid_of(label.header, prediction)
    predicted_values, label_values = np.unique(prediction.array), np.unique(label.array)
    _refuse_image(prediction_path, predicted_values, label_path, label_values)
    _refuse_image(label_path, label_values, prediction_path, predicted_values)
    scores = {
        int(value): _score(prediction.array == value, label.array == value, label.header)
        for value in np.union1d(predicted_values, label_values)
        if value != BACKGROUND
    }
    return CaseScores(
        name=volume_stem(label_path), prediction=prediction_path, label=label_path, scores=scores
    )


def _refuse_image(
    path: Path, values: npt.NDArray[Any], partner: Path, partner_values: npt.NDArray[Any]
) -> None:
    num_unknown = len(np.setdiff1d(values, partner_values))
    if num_unknown > MAX_VALUES_OF_ONE_SIDE:
        raise VolumeError(
            f"{path} is an image, not a label map: it holds {len(values)} different values, of "
            f"which {partner} lacks {num_unknown}; name label maps"
        )


def _score(prediction: Mask, label: Mask, header: VolumeHeader) -> LabelScore:
    # What follows takes time for each voxel, and a label usually fills a small part of a volume.
    box = _bounding_box(prediction | label)
    prediction, label = prediction[box], label[box]
    voxel_ml = voxel_mm3(header.affine) / CUBIC_MM_PER_ML
    num_predicted, num_labelled = np.count_nonzero(prediction), np.count_nonzero(label)
    tensors = torch.from_numpy(prediction), torch.from_numpy(label)
    return LabelScore(
        dice=_dice(*tensors),
        hd95_mm=_hd95_mm(*tensors, header) if num_predicted and num_labelled else None,
        prediction_ml=num_predicted * voxel_ml,
        label_ml=num_labelled * voxel_ml,
    )


def _dice(prediction: Tensor, target: Tensor) -> float | None:
    if not (prediction.any() or target.any()):
        return None
    return float(compute_dice(_batch(prediction), _batch(target), ignore_empty=False).item())


def _hd95_mm(prediction: Tensor, label: Tensor, header: VolumeHeader) -> float:
    if is_sheared(header.affine):
        return hd95_of_sheared_mm(prediction, label, header.affine)
    with warnings.catch_warnings():
        # MONAI warns about an argument that it passes to itself.
        warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)
        distance = compute_hausdorff_distance(
            _batch(prediction),
            _batch(label),
            include_background=True,
            percentile=95,
            spacing=list(header.spacing_mm),
        )
    return float(distance.item())


def hd95_of_sheared_mm(prediction: Tensor, label: Tensor, affine: Affine) -> float:
    """Return what MONAI's HD95 is where axes are at right angles, for any axes.

    MONAI's distance transform takes a spacing only. Here the same surface voxels are located by the
    affine, and the nearest ones are searched for.

    Args:
        prediction: Mask with at least one voxel, shape (X, Y, Z).
        label: Likewise.
        affine: (4, 4), from voxel indices to mm.
    """
    masks = prediction.numpy(), label.numpy()
    surfaces = [
        np.argwhere(mask & ~ndimage.binary_erosion(mask)) @ affine[:3, :3].T for mask in masks
    ]
    trees = [cKDTree(surface) for surface in surfaces]
    there, back = (
        np.percentile(tree.query(surface)[0], 95)
        for tree, surface in zip(trees, reversed(surfaces), strict=True)
    )
    return float(max(there, back))


def _bounding_box(mask: Mask) -> tuple[slice, ...]:
    box = []
    for axis in range(mask.ndim):
        others = tuple(other for other in range(mask.ndim) if other != axis)
        (filled,) = np.nonzero(mask.any(axis=others))
        box.append(slice(int(filled[0]), int(filled[-1]) + 1))
    return tuple(box)


def _batch(mask: Tensor) -> Tensor:
    """Return (X, Y, Z) as the batch (1, 1, X, Y, Z) that MONAI takes."""
    return mask[None, None]


def _mean(numbers: Sequence[float | None]) -> float | None:
    defined = [number for number in numbers if number is not None]
    return float(np.mean(defined)) if defined else None
