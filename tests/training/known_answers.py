"""Validation cases, and a network with known answers."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.networks import random_checkpoint
from unet3d.config import load_config
from unet3d.interruption import InterruptionRequest
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.training.cases import RunContext, Watcher
from unet3d.training.validation import Validator

NAMES = ("background", "liver", "tumour", "absent")


def checkpoint():
    """Return a checkpoint for these labels whose images are not normalised."""
    found = random_checkpoint(label_values=tuple(range(len(NAMES))), patch_size=(4, 4, 4))
    channels = (ChannelNormalization(kind="none"),)
    preprocessing = replace(found.preprocessing, channels=channels, label_names=NAMES)
    return replace(found, preprocessing=preprocessing)


class Case:
    """A case whose image holds the network's answer."""

    def __init__(self, name, answer, label):
        self.name = name
        self.answer, self.truth, self.shape = answer, label, label.shape

    def image(self):
        return self.answer[None].astype(np.float32)

    def label(self):
        return self.truth


class Reader:
    """An executor that reads the labels from the image, and counts windows."""

    input_device = output_device = torch.device("cpu")
    slots = ()

    def __init__(self):
        self.module = torch.nn.Conv3d(1, 1, 1)
        self.num_windows = 0
        self.precisions = set()

    def predict(self, image, precision=None):
        self.num_windows += 1
        self.precisions.add(precision)
        classes = F.one_hot(image[:, 0].round().long(), len(NAMES))
        return classes.movedim(-1, 1).float()


def made_cases():
    """Return five cases; the third has no tumour."""
    generator = np.random.default_rng(0)
    made = []
    for number in range(5):
        answer, label = generator.integers(0, 3, (2, 6, 8, 10 + 2 * number))
        if number == 2:
            answer[answer == 2] = label[label == 2] = 0  # the case has no tumour
        made.append(Case(f"case_{number}", answer, label))
    return made


def validator(cases, group, num_shards=1, executor=None, ignore_value=None):
    known = checkpoint()
    experiment = SimpleNamespace(
        config=load_config(None, ["inference.window=4,4,4"]),
        preprocessing=replace(known.preprocessing, ignore_value=ignore_value),
        topology=known.topology,
        patch_size=known.patch_size,
        validation=tuple(cases),
    )
    context = RunContext(
        experiment=experiment,
        executor=executor or Reader(),
        folder=None,
        group=group,
        dims=SimpleNamespace(num_shards=num_shards),
        precision="float32",
        slabs=group.new_group(torch.device("cpu"), num_shards) if num_shards > 1 else None,
    )
    return Validator(context)


def watcher(interruption=None, progress=lambda *_: None):
    request = interruption or InterruptionRequest()
    return Watcher(num_steps=10, interruption=request, progress=progress)


def expected(cases):
    means = {"absent": None}
    for value, name in ((1, "liver"), (2, "tumour")):
        scores = []
        for case in cases:
            answer, label = case.answer == value, case.truth == value
            if label.any():
                scores.append(2 * (answer & label).sum() / (answer.sum() + label.sum()))
        means[name] = float(np.mean(scores))
    return means


def expected_loss(cases):
    """Return the mean of :func:`loss_of` over the cases."""
    return sum(map(loss_of, cases)) / len(cases)


def loss_of(case):
    """Return cross-entropy plus soft Dice loss over the counted voxels, by PyTorch and by hand."""
    logits = F.one_hot(torch.from_numpy(case.answer).long(), len(NAMES)).double().flatten(0, 2)
    truth = torch.from_numpy(case.truth).long().flatten()
    logits, truth = logits[truth < len(NAMES)], truth[truth < len(NAMES)]
    chance, is_truth = logits.softmax(1)[:, 1:], F.one_hot(truth, len(NAMES))[:, 1:]
    overlap = (2 * (chance * is_truth).sum(0) + 1e-5) / (chance + is_truth).sum(0).add(1e-5)
    return float(F.cross_entropy(logits, truth) + 1 - overlap.mean())


def assert_right(found, cases):
    wanted = expected(cases)
    assert set(found.dice) == set(NAMES[1:])
    for name, value in wanted.items():
        assert found.dice[name] == (None if value is None else pytest.approx(value, rel=1e-6))
    known = [value for value in wanted.values() if value is not None]
    assert found.mean_dice == pytest.approx(sum(known) / 2, rel=1e-6)
    assert found.loss == pytest.approx(expected_loss(cases), rel=1e-5)
