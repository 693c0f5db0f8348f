"""Scores of a label map against another: Dice, HD95, surface Dice and volume of each label.

The surface of a mask consists of its voxels with at least one of six neighbours outside; beyond the
edge of a volume is outside. Distances are measured in mm, from the centre of a surface voxel to the
centre of the nearest surface voxel of the other mask. This is MONAI's convention; other tools may
measure between faces of voxels, or weight voxels by surface area.

Both maps are read box by box, and may be larger than the memory, as long as their files can be read
in boxes: first to count the voxels of each label, then, for its distances, the box around it.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from unet3d.datasets.labels import Label, Mask, ScoredLabels, box_of, mask_of
from unet3d.errors import VolumeError, some
from unet3d.images.files import times
from unet3d.images.geometry import Affine, same_grid, voxel_mm3
from unet3d.images.image import Box, Image, image_of, open_source
from unet3d.images.labels import LabelMap, integers_of, label_in
from unet3d.images.memory_limits import refuse_beyond_memory
from unet3d.images.source import AS_STATED, Reading
from unet3d.memory.host import shortage

logger = logging.getLogger(__name__)

LABEL, PREDICTION = 0, 1
"""The channels of a pair."""

MAX_VALUES = 10_000
"""Most values of a label map; each is measured alone, in a second for a volume of 512^3."""

MAX_CODES = 2**22
"""Most pairs of values to count in a table, which is faster than sorting."""

Labels = npt.NDArray[np.integer[Any]]

CUBIC_MM_PER_ML = 1000.0

TOLERANCE_MM = 1.0
"""Default tolerance of the surface Dice."""

ROUNDING = 1e-5
"""Share of the tolerance by which a distance may exceed it. Without it, the rounding of spacings to
single precision in headers would decide whether a neighbour at 0.7 mm lies within 0.7 mm."""

BOX_BYTES = 16
"""Memory for the distances of a label, per voxel of its box."""

TOO_LARGE = "use a machine with more, or compare coarser levels of pyramids (--level)"
"""What to do about labels whose distances take too much memory."""


@dataclass(kw_only=True)
class Overlap:
    """Where a label is in a segmentation and in its label map."""

    box: Box
    """The smallest box that holds all of its voxels."""
    predicted: int = 0
    """Voxels in the segmentation."""
    labelled: int = 0
    """Voxels in the label map."""
    both: int = 0
    """Voxels at the same places of both."""


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """What a segmentation and its label map hold."""

    labels: dict[Label, Overlap]
    """Each label that at least one of them has, in the order of :meth:`ScoredLabels.among`."""
    values: tuple[set[int], set[int]]
    """All values of the label map and of the segmentation."""


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """One label in one case, or its mean over cases."""

    dice: float | None
    """From 0 to 1; None if neither segmentation nor label map has the label."""
    hd95_mm: float | None
    """The larger of two 95th percentiles of distances: from the surface of the segmentation to the
    surface of the label map, and in the opposite direction. None if either lacks the label, or if
    its box is too large for the memory."""
    nsd: float | None
    """Normalised surface Dice: the share of both surfaces that lies within a tolerance of the
    other; 0 if one of them lacks the label, None if both do, or if the distances were left out."""
    prediction_ml: float
    """Volume of the label in the segmentation."""
    label_ml: float
    """Volume of the label in the label map."""


NOWHERE = LabelScore(dice=None, hd95_mm=None, nsd=None, prediction_ml=0.0, label_ml=0.0)


def open_pair(
    prediction_path: Path,
    label_path: Path,
    reading: Reading = AS_STATED,
    of_prediction: Reading = AS_STATED,
) -> Image:
    """Open a label map and its segmentation as the two channels of an image.

    It has the axes of the label map. If one of the files states no spacing, it has that of the
    other.
    """
    prediction = integers_of(open_source(prediction_path, of_prediction))
    label = integers_of(open_source(label_path, reading.near(prediction.geometry.spacing_mm)))
    disagreement = same_grid(prediction.geometry, label.geometry)
    if disagreement is not None:
        raise VolumeError(
            f"{prediction_path} and {label_path} do not lie on one grid: {disagreement}; "
            "compare a segmentation with the label map of its own scan"
        )
    pair = image_of([label, prediction])
    refuse_beyond_memory(
        pair.unpacked_bytes,
        f"unpacking {prediction_path} and {label_path}",
        "use a machine with more, or save them as OME-Zarr, of which boxes can be read",
    )
    return pair


def read_pair(
    prediction: Path, label: Path, of_label: Reading = AS_STATED
) -> tuple[LabelMap, LabelMap]:
    """Read a segmentation and its label map, both with the axes of the label map."""
    pair = open_pair(prediction, label, of_label)
    return label_in(pair, PREDICTION), label_in(pair, LABEL)


def overlaps_in(pair: Image, scored: ScoredLabels) -> Overlaps:
    """Count the voxels of each label of a pair; VolumeError if a map has too many values."""
    found: dict[Label, Overlap] = {}
    there: set[int] = set()  # without ignored voxels
    values: tuple[set[int], set[int]] = set(), set()
    for box in pair.pieces():
        maps = _maps(pair, box)
        of_pairs, counts = _pairs(*maps)
        for path, known, row in zip(pair.paths, values, of_pairs, strict=True):
            known.update(row.tolist())
            if len(known) > MAX_VALUES:
                raise VolumeError(
                    f"{path} holds more than {MAX_VALUES} different values; name a label map of "
                    "classes, not of instances"
                )
        if scored.ignore is not None:
            is_counted = of_pairs[LABEL] != scored.ignore
            of_pairs, counts = [one[is_counted] for one in of_pairs], counts[is_counted]
        here = {value for one in of_pairs for value in one.tolist()}
        there |= here
        for label in scored.among(here):
            if label not in found or _joined(found[label].box, box) != found[label].box:
                place = _placed(box, box_of(np.logical_or(*_masks_of(maps, label, scored))))
                overlap = found.setdefault(label, Overlap(box=place))
                overlap.box = _joined(overlap.box, place)
            labelled, predicted = (mask_of(one, label) for one in of_pairs)
            overlap = found[label]
            overlap.labelled += int(counts[labelled].sum())
            overlap.predicted += int(counts[predicted].sum())
            overlap.both += int(counts[labelled & predicted].sum())
    return Overlaps(labels={label: found[label] for label in scored.among(there)}, values=values)


def _pairs(label: Labels, prediction: Labels) -> tuple[list[Labels], npt.NDArray[np.int64]]:
    """Return the values of each pair of values that voxels have, and the voxels of the pair."""
    (values, places), (others, other_places) = _numbered(label), _numbered(prediction)
    codes, num_codes = places * len(others) + other_places, len(values) * len(others)
    if num_codes <= MAX_CODES:
        counts = np.bincount(codes.ravel("K"))
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(codes, return_counts=True)
    return [values[found // len(others)], others[found % len(others)]], counts


def _numbered(array: Labels) -> tuple[Labels, npt.NDArray[np.int64]]:
    """Return values, all that an array holds among them, and where each voxel's value is there."""
    low, high = int(array.min()), int(array.max())
    if low == high:
        return np.array([low]), np.zeros(array.shape, np.int64)
    if low >= 0 and high < 2**16:
        return np.arange(high + 1), array.astype(np.int64)
    values, places = np.unique(array, return_inverse=True)
    return values, places.reshape(array.shape)


def _joined(one: Box, other: Box) -> Box:
    """Return the smallest box that holds two boxes."""
    x, y, z = (
        slice(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return x, y, z


def _placed(box: Box, part: Sequence[slice]) -> Box:
    """Return where a part of a box is in the whole image."""
    x, y, z = (slice(a.start + b.start, a.start + b.stop) for a, b in zip(box, part, strict=True))
    return x, y, z


def score_labels(
    pair: Image, overlaps: Overlaps, scored: ScoredLabels, tolerance_mm: float = TOLERANCE_MM
) -> dict[Label, LabelScore]:
    """Return the score of each label of a pair; a warning names those without distances.

    The distances of a label need its whole box in memory, so large ones may have none.
    """
    affine = pair.geometry.affine
    voxel_ml = voxel_mm3(affine) / CUBIC_MM_PER_ML
    scores, too_large = {}, {}
    for label, overlap in overlaps.labels.items():
        hd95_mm: float | None = None
        nsd: float | None = 0.0
        if overlap.predicted and overlap.labelled:
            part = pair.cut(overlap.box)
            lacking = shortage(BOX_BYTES * math.prod(part.geometry.shape))
            if lacking is not None:
                nsd = None
                too_large[scored.name_of(label)] = f"{times(part.geometry.shape)} voxels {lacking}"
            else:
                labelled, predicted = _masks(part, label, scored)
                distances = surface_distances(predicted, labelled, affine)
                hd95_mm = max(float(np.percentile(one, 95)) for one in distances)
                nsd = surface_dice(distances, tolerance_mm)
        scores[label] = LabelScore(
            dice=_dice(overlap.both, overlap.predicted, overlap.labelled),
            hd95_mm=hd95_mm,
            nsd=nsd,
            prediction_ml=overlap.predicted * voxel_ml,
            label_ml=overlap.labelled * voxel_ml,
        )
    if too_large:
        logger.warning(
            "%s: HD95 and NSD of %s are left out: the first one's box of %s; %s",
            *(pair.geometry.path, some(list(too_large)), next(iter(too_large.values())), TOO_LARGE),
        )
    return scores


def dice_per_class(
    prediction: Tensor | npt.NDArray[Any], target: Tensor | npt.NDArray[Any], num_classes: int
) -> list[float | None]:
    """Return the Dice of each class; None for a class that neither array has."""
    pairs = ((prediction == index, target == index) for index in range(num_classes))
    return [_dice(int((p & t).sum()), int(p.sum()), int(t.sum())) for p, t in pairs]


def _dice(both: int, predicted: int, labelled: int) -> float | None:
    if not predicted + labelled:
        return None
    return float(np.float32(2 * both) / np.float32(predicted + labelled))  # MONAI's, to the bit


def _maps(pair: Image, box: Box) -> list[Labels]:
    """Return a box of a label map and of its segmentation."""
    return [pair.stored(box, channel)[..., 0] for channel in (LABEL, PREDICTION)]


def _masks_of(maps: list[Labels], label: Label, scored: ScoredLabels) -> list[Mask]:
    """Return where a label is in a label map and in its segmentation, if it counts there."""
    masks = [mask_of(one, label) for one in maps]
    if scored.ignore is not None:
        masks = [mask & (maps[LABEL] != scored.ignore) for mask in masks]
    return masks


def _masks(part: Image, label: Label, scored: ScoredLabels) -> list[Mask]:
    """Return where a label is in a part of a label map and of its segmentation."""
    masks = [np.empty(part.geometry.shape, bool) for _ in (LABEL, PREDICTION)]
    for box in part.pieces():
        for mask, found in zip(masks, _masks_of(_maps(part, box), label, scored), strict=True):
            mask[box] = found
    return masks


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
