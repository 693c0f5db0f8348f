"""The choice of components to keep, from the segmentations of the validation cases.

nnU-Net's rules, with one addition for regions. First: keep only the largest component of all labels
together, if that raises the mean Dice and lowers no label's Dice. Then the same is tried for each
label or region: it must raise its own mean Dice and, unlike in nnU-Net, lower no other region's.
Labels do not overlap, so each is judged separately. Regions overlap, so each is judged after the
earlier decisions.

Means are taken as in evaluation: over the cases that have a label in segmentation or label map,
then over the labels. Each step reads the segmentations from their files again, because together
they may be too large for the memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.datasets.labels import Label, ScoredLabels, mask_of, values_of
from unet3d.images.labels import LabelMap
from unet3d.inference.postprocessing import Rule, keep_largest, small_components

Dice = list[float | None]
"""Dice by label; None if neither side has the label."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A rule that raises the mean Dice."""

    rule: Rule
    dice_before: float
    """Mean Dice without the rule: of the label or region that it is for, or over all labels."""
    dice_after: float
    """Mean Dice with the rule, of the same labels."""


Work = Callable[[LabelMap, LabelMap], list[Dice]]
"""Scores a segmentation against its label map, once for each set of rules."""


def choose_components(
    over_cases: Callable[[Work, str], list[list[Dice]]], scored: ScoredLabels
) -> tuple[Choice, ...]:
    """Return the rules that raise the mean Dice.

    ``over_cases`` takes work and its title, and returns the result of the work for each case.
    """
    labels = list(scored.names)
    chosen: list[Choice] = []
    for step, candidates in enumerate(_steps(labels), start=1):
        rules = [choice.rule for choice in chosen]
        found = over_cases(
            partial(_tried, rules=rules, candidates=candidates, scored=scored),
            f"the components of the validation, step {step}",
        )
        means = [_means([case[number] for case in found]) for number in range(len(candidates) + 1)]
        for rule, after in zip(candidates, means[1:], strict=True):
            judged = [index for index, label in enumerate(labels) if values_of(label) == rule]
            choice = _judged(rule, means[0], after, judged or range(len(labels)))
            if choice is not None:
                chosen.append(choice)
    return tuple(chosen)


def _steps(labels: Sequence[Label]) -> list[list[Rule]]:
    """Return the rules to try, in steps; the rules of one step have no label in common."""
    values = [value for label in labels for value in values_of(label)]
    steps: list[list[Rule]] = [[tuple(sorted(set(values)))]]
    alone = [values_of(label) for label in labels]
    if len(labels) > 1:
        have_overlap = len(set(values)) < len(values)
        steps += [[rule] for rule in alone if [rule] not in steps] if have_overlap else [alone]
    return steps


def _tried(
    predicted: LabelMap,
    labelled: LabelMap,
    rules: Sequence[Rule],
    candidates: Sequence[Rule],
    scored: ScoredLabels,
) -> list[Dice]:
    """Return the Dice of each label: with ``rules`` alone, then with each candidate in addition."""
    prediction, label, labels = predicted.array, labelled.array, list(scored.names)
    keep_largest(prediction, rules)
    counted = None if scored.ignore is None else label != scored.ignore
    counts = [_counts(prediction, label, counted, one) for one in labels]
    found = [[_dice(one) for one in counts]]
    for candidate in candidates:
        left = list(counts)
        for box, mask in small_components(prediction, candidate):
            if counted is not None:
                mask = mask & counted[box]
            lost = prediction[box][mask], label[box][mask], None
            for index, one in enumerate(labels):
                if not set(candidate).isdisjoint(values_of(one)):
                    both, predicted, _ = _counts(*lost, one)
                    left[index] = left[index] - np.array([both, predicted, 0])
        dice = [_dice(one) for one in left]
        found.append(dice)
    return found


def _counts(
    prediction: npt.NDArray[np.integer[Any]],
    label: npt.NDArray[np.integer[Any]],
    counted: npt.NDArray[np.bool_] | None,
    one: Label,
) -> npt.NDArray[np.int64]:
    """Count the voxels of a label: in both arrays, in the segmentation, and in the label map."""
    predicted, labelled = mask_of(prediction, one), mask_of(label, one)
    if counted is not None:
        predicted, labelled = predicted & counted, labelled & counted
    return np.array([np.count_nonzero(m) for m in (predicted & labelled, predicted, labelled)])


def _dice(counts: npt.NDArray[np.int64]) -> float | None:
    both, predicted, labelled = counts.tolist()
    return 2 * both / (predicted + labelled) if predicted + labelled else None


def _means(cases: Sequence[Dice]) -> Dice:
    """Return the mean of each label over the cases that have it."""
    by_label = zip(*cases, strict=True)
    known = [[dice for dice in one if dice is not None] for one in by_label]
    return [sum(dice) / len(dice) if dice else None for dice in known]


def _judged(rule: Rule, before: Dice, after: Dice, judged: Sequence[int]) -> Choice | None:
    """Return a rule if it raises the mean Dice of the ``judged`` labels and lowers no label's."""
    for old, new in zip(before, after, strict=True):
        if (new is None and old is not None) or (new or 0.0) < (old or 0.0):
            return None
    means = []
    for dice in (before, after):
        known = [value for value in (dice[index] for index in judged) if value is not None]
        means.append(sum(known) / len(known) if known else 0.0)
    if not means[1] > means[0]:
        return None
    return Choice(rule=rule, dice_before=means[0], dice_after=means[1])
