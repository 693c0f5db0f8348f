"""Scores of segmentations against label maps: each label in each case.

Only the files are needed, so segmentations of other tools can be evaluated, too.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.datasets.labels import EVERY_VALUE, Label, ScoredLabels, key_of, values_of
from unet3d.datasets.naming import description_of, read_scored_labels
from unet3d.errors import ConfigError, DatasetError, VolumeError
from unet3d.images.files import volume_stem
from unet3d.images.image import open_source
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.source import AS_STATED, Reading
from unet3d.images.units import MILLIMETRES, Units, default_tolerance_mm
from unet3d.inference.label_scores import (
    LABEL,
    NOWHERE,
    PREDICTION,
    TOLERANCE_MM,
    LabelScore,
    open_pair,
    overlaps_in,
    score_labels,
)
from unet3d.inference.pairing import find_pairs
from unet3d.nnunet.loading import load_network
from unet3d.runs.finding import checkpoint_in
from unet3d.terminal import counting

logger = logging.getLogger(__name__)

MAX_VALUES_OF_ONE_SIDE = 100
"""Most values that only one of two label maps may have; more must be grey values of an image."""


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """The scores of one case."""

    name: str
    prediction: Path
    label: Path
    scores: dict[Label, LabelScore]

    @property
    def mean_dice(self) -> float | None:
        """Mean Dice over the labels of the case; None if it has none."""
        return _mean([score.dice for score in self.scores.values()])


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of all cases; each case has a score for every label that any case has."""

    cases: tuple[CaseScores, ...]
    labels: tuple[Label, ...]
    """Values of labels and regions, in the order in which they are shown."""
    scored: ScoredLabels = EVERY_VALUE
    """Names of the labels, and the value of voxels that are not scored."""
    tolerance_mm: float = TOLERANCE_MM
    """Tolerance of the surface Dice (NSD)."""
    units: Units = MILLIMETRES
    """Units in which distances and volumes are shown."""
    without_prediction: tuple[str, ...] = ()
    """Names of label maps without a segmentation; they do not count."""
    without_label: tuple[str, ...] = ()
    """Names of segmentations without a label map; they do not count."""

    @classmethod
    def of(cls, cases: Sequence[CaseScores], scored: ScoredLabels, **more: Any) -> "Evaluation":
        """Return the evaluation of cases, and give each an empty score for labels that it lacks."""
        there = {label for case in cases for label in case.scores}
        order = scored.among({value for label in there for value in values_of(label)})
        labels = tuple(label for label in order if label in there)
        return cls(
            cases=tuple(
                replace(case, scores={label: case.scores.get(label, NOWHERE) for label in labels})
                for case in cases
            ),
            labels=labels,
            scored=scored,
            **more,
        )

    def mean(self, label: Label) -> LabelScore:
        """Return a label's means over the cases in which each number is defined."""
        scores = [asdict(case.scores[label]) for case in self.cases]
        means: dict[str, Any] = {
            name: _mean([score[name] for score in scores]) for name in asdict(NOWHERE)
        }
        return LabelScore(**means)

    def num_cases(self, label: Label) -> tuple[int, int]:
        """Return the numbers of cases in a label's mean Dice and in its mean HD95.

        The mean surface Dice has the same cases as the mean Dice, except those whose distances
        were left out.
        """
        scores = [case.scores[label] for case in self.cases]
        num_dice = sum(score.dice is not None for score in scores)
        return num_dice, sum(score.hd95_mm is not None for score in scores)

    @property
    def mean_dice(self) -> float | None:
        """Mean over labels of each label's mean Dice; None if there is no label."""
        return _mean([self.mean(label).dice for label in self.labels])

    def name_of(self, label: Label) -> str:
        """Return the name of a label, or else its value."""
        return self.scored.name_of(label)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists and numbers, for JSON.

        The key of a label is its value; the key of a region is its values, separated by commas.
        """
        means = {}
        for label in self.labels:
            num_dice, num_hd95 = self.num_cases(label)
            counts = {"num_cases_dice": num_dice, "num_cases_hd95": num_hd95}
            means[key_of(label)] = self._named(label, self.mean(label)) | counts
        return {
            "cases": [
                {
                    "case": case.name,
                    "prediction": str(case.prediction),
                    "label": str(case.label),
                    "labels": {
                        key_of(label): self._named(label, score)
                        for label, score in case.scores.items()
                    },
                }
                for case in self.cases
            ],
            "without_prediction": list(self.without_prediction),
            "without_label": list(self.without_label),
            "ignore": self.scored.ignore,
            "tolerance_mm": self.tolerance_mm,
            "mean": means,
            "mean_dice": self.mean_dice,
        }

    def _named(self, label: Label, score: LabelScore) -> dict[str, Any]:
        return {"name": self.scored.names.get(label), **asdict(score)}


def evaluate(
    predictions: Path,
    labels: Path,
    *,
    scored: ScoredLabels = EVERY_VALUE,
    tolerance_mm: float | None = None,
    leave_out: bool = False,
    reading: Reading = AS_STATED,
) -> Evaluation:
    """Compare segmentations with label maps.

    Two files may have any names. In folders, the segmentation of ``case.nii.gz`` is
    ``case.nii.gz``, ``case_seg.nii.gz`` or ``case_0000_seg.nii.gz``. If no labels are named, every
    value but 0 is a label. Label maps in a folder may lack a segmentation, but every segmentation
    needs its label map unless ``leave_out``, because a segmentation without a label map is probably
    misnamed. ``reading`` is what the user states about all files; a label map with several levels
    is read at the one of its segmentation.
    """
    found = find_pairs(predictions, labels, leave_out, reading)
    spacing_mm = open_source(found.pairs[0][0], reading).geometry.spacing_mm
    if tolerance_mm is None:
        tolerance_mm = default_tolerance_mm(spacing_mm)
    cases = []
    with counting("evaluating", len(found.pairs)) as show:
        for prediction, label in found.pairs:
            with explaining_memory(f"cannot compare {prediction} with {label}"):
                cases.append(_compare(prediction, label, scored, tolerance_mm, reading))
            show(len(cases))
    evaluation = Evaluation.of(
        cases,
        scored,
        tolerance_mm=tolerance_mm,
        units=Units.of(spacing_mm),
        without_prediction=found.without_prediction,
        without_label=found.without_label,
    )
    if not evaluation.labels:
        raise DatasetError(
            f"neither {predictions} nor {labels} holds any label but the background 0"
            f"{'' if scored.ignore is None else f' outside of the ignore label {scored.ignore}'}; "
            "there is nothing to compare"
        )
    return evaluation


def scored_labels(
    labels: Path, dataset: Path | None, checkpoint: Path | None, ignore: int | None
) -> ScoredLabels:
    """Return the labels to score, from a named data set or checkpoint, or from the label maps.

    Voxels of the value ``ignore`` are not scored; ConfigError if the value is a label.
    """
    scored, found = EVERY_VALUE, None
    if checkpoint is not None:
        file = checkpoint_in(checkpoint)
        scored = ScoredLabels.of(load_network(file, "description").preprocessing)
    elif dataset is not None:
        scored = read_scored_labels(dataset)
    elif (found := description_of(labels)) is not None:
        try:
            scored = read_scored_labels(found)
        except DatasetError as error:  # no error, because the user did not name this file
            logger.warning("label values are shown without names: %s", error)
        else:
            logger.info("the names of labels are from %s", found)
    if ignore is None:
        return scored
    if ignore in {value for label in scored.names for value in values_of(label)}:
        raise ConfigError(
            f"--ignore {ignore} is a label of {dataset or checkpoint or found}; give a value "
            "that is not a label"
        )
    return replace(scored, ignore=ignore)


def _compare(
    prediction: Path,
    label: Path,
    scored: ScoredLabels,
    tolerance_mm: float,
    reading: Reading,
) -> CaseScores:
    pair = open_pair(prediction, label, reading, reading)
    overlaps = overlaps_in(pair, scored)
    _refuse_image(prediction, overlaps.values[PREDICTION], label, overlaps.values[LABEL])
    _refuse_image(label, overlaps.values[LABEL], prediction, overlaps.values[PREDICTION])
    return CaseScores(
        name=volume_stem(label),
        prediction=prediction,
        label=label,
        scores=score_labels(pair, overlaps, scored, tolerance_mm),
    )


def _refuse_image(path: Path, values: set[int], partner: Path, partner_values: set[int]) -> None:
    num_unknown = len(values - partner_values)
    if num_unknown > MAX_VALUES_OF_ONE_SIDE:
        raise VolumeError(
            f"{path} is an image, not a label map: it holds {len(values)} different values, and "
            f"{partner} lacks {num_unknown} of them; name label maps"
        )


def _mean(numbers: Sequence[float | None]) -> float | None:
    defined = [number for number in numbers if number is not None]
    return float(np.mean(defined)) if defined else None
