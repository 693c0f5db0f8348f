"""The choice of components, compared with a simple implementation of nnU-Net's procedure."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import ndimage

from unet3d.datasets.labels import ScoredLabels
from unet3d.training.component_choice import choose_components

SHAPE = (14, 13, 12)
PLAIN = ScoredLabels(names={1: "a", 2: "b", 3: "c"})


def without_small(array, label):
    mask = np.isin(array, label)
    components, number = ndimage.label(mask, np.ones((3, 3, 3)))
    sizes = np.bincount(components.ravel(), minlength=number + 1)[1:]
    kept = [index + 1 for index in range(number) if sizes[index] == sizes.max()]
    return np.where(mask & ~np.isin(components, kept), 0, array)


def mean_dice(pairs, labels, ignore):
    means = []
    for label in labels:
        dice = []
        for prediction, truth in pairs:
            counted = np.ones(truth.shape, bool) if ignore is None else truth != ignore
            p, t = np.isin(prediction, label) & counted, np.isin(truth, label) & counted
            if (p | t).any():
                dice.append(2 * (p & t).sum() / (p.sum() + t.sum()))
        means.append(np.mean(dice) if dice else np.nan)
    return [float(mean) for mean in means]


def plain_choice(pairs, labels, ignore=None):
    values = {v for label in labels for v in (label if isinstance(label, tuple) else (label,))}
    everything = tuple(sorted(values))
    rules = []
    before = mean_dice(pairs, labels, ignore)
    tried = [(without_small(p, everything), t) for p, t in pairs]
    after = mean_dice(tried, labels, ignore)
    if np.mean(after) > np.mean(before) and not any(np.less(after, before)):
        pairs, before = tried, after
        rules.append(everything)
    for index, label in enumerate(labels if len(labels) > 1 else ()):
        tried = [(without_small(p, label), t) for p, t in pairs]
        after = mean_dice(tried, labels, ignore)
        if after[index] > before[index] and not any(np.less(after, before)):
            pairs, before = tried, after
            rules.append(label if isinstance(label, tuple) else (label,))
    return rules


def noisy_pairs(seed, num_cases=4):
    """Return cases: labels have one component or several, and predictions have specks."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_cases):
        truth = np.zeros(SHAPE, np.uint8)
        for value in (1, 2, 3):
            for _ in range(1 + (rng.random() < 0.3)):
                corner = [int(rng.integers(0, size - 5)) for size in SHAPE]
                truth[tuple(slice(start, start + 5) for start in corner)] = value
        prediction = truth.copy()
        prediction[rng.random(SHAPE) < 0.03] = 0
        for value in (1, 2, 3):
            if rng.random() < 0.6:
                corner = [int(rng.integers(0, size - 2)) for size in SHAPE]
                prediction[tuple(slice(start, start + 2) for start in corner)] = value
        pairs.append((prediction, truth))
    return pairs


def choose(pairs, scored):
    """Return the chosen rules."""

    def over_cases(work, what):
        return [work(*(SimpleNamespace(array=one.copy()) for one in pair)) for pair in pairs]

    choices = choose_components(over_cases, scored)
    assert all(choice.dice_after > choice.dice_before for choice in choices)
    return [choice.rule for choice in choices]


REGIONS = {(1, 2, 3): "whole", (2, 3): "core", 3: "enhancing"}


@pytest.mark.parametrize(
    ("names", "seeds", "num_different"),
    [(PLAIN.names, 12, 4), ({1: "a"}, 4, 1), (REGIONS, 8, 3)],
    ids=["labels", "one label", "regions"],
)
def test_the_choice_is_that_of_the_plain_procedure(names, seeds, num_different):
    """A single label is tried once; overlapping regions are judged one after the other."""
    seen = set()
    for seed in range(seeds):
        pairs = noisy_pairs(seed)
        if names == {1: "a"}:
            pairs = [(np.where(p == 1, p, 0), np.where(t == 1, t, 0)) for p, t in pairs]
        rules = choose(pairs, ScoredLabels(names=names))
        assert rules == plain_choice(pairs, list(names)), seed
        seen.add(tuple(rules))
    assert len(seen) >= num_different  # otherwise the test would prove little
    right = [(truth, truth) for _, truth in noisy_pairs(0)]
    assert choose(right, PLAIN) == []


def test_ignored_voxels_judge_nothing():
    changed = 0
    for seed in range(8):
        pairs = noisy_pairs(seed)
        start = int(np.random.default_rng(seed).integers(3, 9))
        marked = [(prediction, truth.copy()) for prediction, truth in pairs]
        for _, truth in marked:
            truth[:, :start] = 7
        expected = plain_choice(marked, [1, 2, 3], ignore=7)
        assert choose(marked, ScoredLabels(names=PLAIN.names, ignore=7)) == expected, seed
        changed += expected != plain_choice(pairs, [1, 2, 3])
    assert changed


def test_what_lowers_a_label_is_not_done_though_the_mean_rises():
    truth = np.zeros(SHAPE, np.uint8)
    truth[:5, :5, :5] = 1
    truth[10:12, 10:12, 8:10] = 2  # apart from label 1, and predicted correctly
    prediction = truth.copy()
    prediction[0:4, 9:13, 6:8] = 1  # a false component
    # With all labels together, the correct label 2 would go, too: the mean would change from (.8 +
    # 1) / 2 to (1 + 0) / 2.
    assert choose([(prediction, truth)], PLAIN) == [(1,)]


def test_labels_that_nobody_predicts_or_draws_change_nothing():
    pairs = noisy_pairs(1)
    rules = choose(pairs, ScoredLabels(names={**PLAIN.names, 9: "absent"}))
    alike = [rule if len(rule) == 1 else (1, 2, 3) for rule in rules]
    assert alike == choose(pairs, PLAIN) != []
