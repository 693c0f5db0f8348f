"""Validation with a network with known answers."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import warm
from tests.ranks import in_ranks
from tests.training.known_answers import (
    NAMES,
    Case,
    Reader,
    assert_right,
    expected_loss,
    made_cases,
    validator,
    watcher,
)
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import ConfigError
from unet3d.interruption import InterruptionRequest
from unet3d.training.cases import Stopped


@pytest.fixture(scope="module")
def cases():
    return made_cases()


def test_ignored_voxels_are_in_no_score(cases):
    """Whatever the network predicts for ignored voxels, the Dice is that of the other voxels."""
    generator = np.random.default_rng(1)
    partly = []
    for case in made_cases():
        is_ignored = generator.random(case.truth.shape) < 0.3
        case.answer[is_ignored] = generator.integers(0, len(NAMES), is_ignored.sum())
        case.truth[is_ignored] = len(NAMES)
        partly.append(case)
    assert any((case.answer[case.truth == len(NAMES)] == 3).any() for case in partly)
    found = validator(partly, Group(Ranks()), ignore_value=9).validate(1, watcher())
    assert found.loss == pytest.approx(expected_loss(partly), rel=1e-5)
    for case in partly:  # as if ignored voxels did not exist
        case.answer[case.truth == len(NAMES)] = 0
    assert_right(found, partly)


def test_the_loss_of_a_volume_is_that_of_its_slabs(cases, monkeypatch):
    monkeypatch.setattr("unet3d.training.validation.MAX_LOGITS", 1000)
    wide = [Case(case.name, case.answer, case.truth.astype(np.uint16)) for case in cases]
    found = validator(wide, Group(Ranks())).validate(1, watcher())
    assert found.loss == pytest.approx(expected_loss(cases), rel=1e-5)


def test_the_dice_of_each_label_is_the_mean_over_the_cases_and_every_window_is_told_of(cases):
    told = []
    found = validator(cases, Group(Ranks())).validate(
        1, watcher(progress=lambda *numbers: told.append(numbers))
    )
    assert_right(found, cases)
    assert found.seconds > 0
    assert [numbers[:2] for numbers in told if numbers[2] == 0] == [(n, 5) for n in range(6)]
    assert told[-1] == (5, 5, 0, 1)
    parts = [case + window / of_case for case, _, window, of_case in told]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] == 5
    for number in range(5):
        windows = [window for case, _, window, _ in told if case == number]
        (num_windows,) = {of_case for case, _, _, of_case in told if case == number}
        assert windows[0] == 0 and windows[-1] == num_windows > 1


def test_a_network_that_is_not_finite_any_more_is_said_with_the_case(cases, monkeypatch):
    answer = Reader.predict
    monkeypatch.setattr(Reader, "predict", lambda *arguments: math.nan * answer(*arguments))
    with pytest.raises(ConfigError, match="case case_0 is not finite; use a smaller training.lea"):
        validator(cases, Group(Ranks())).validate(1, watcher())


NUM_SHARDS = 2


class SharedReader(Reader):
    """Answers after all shards have asked for the same window."""

    def __init__(self, group):
        super().__init__()
        self._shards = group.new_group(torch.device("cpu"), NUM_SHARDS)

    def predict(self, image):
        total = image.clone()
        dist.all_reduce(total, group=self._shards)
        assert torch.equal(total, NUM_SHARDS * image)
        return super().predict(image)


class LateRequest(InterruptionRequest):
    """A request to stop that arrives after some moments."""

    def __init__(self, num_asked):
        self._num_left = num_asked

    @property
    def signal_number(self):
        self._num_left -= 1
        return 15 if self._num_left < 0 else None


def check_scores(group):
    """Check scores: the first replica has three cases, the second two."""
    cases, executor = made_cases(), SharedReader(group)
    told = []
    found = validator(cases, group, NUM_SHARDS, executor).validate(
        1, watcher(progress=lambda *progress: told.append(progress))
    )
    assert_right(found, cases)
    assert group.exchange(any(num_done for _, _, num_done, _ in told)) == [True] * 4
    counts = group.exchange(executor.num_windows)
    assert counts[0] == counts[1] > counts[2] == counts[3] > 0


def check_stops(group):
    """Check that each rank may be asked to stop before any case, or not at all."""
    for moments in ((0, 1, 2, 9), (9, 1, 9, 9), (9, 9, 0, 9), (2, 9, 9, 1)):
        executor = SharedReader(group)
        request = LateRequest(moments[group.ranks.rank])
        with pytest.raises(Stopped) as stopped:
            validator(made_cases(), group, NUM_SHARDS, executor).validate(1, watcher(request))
        assert stopped.value.signal_number == 15
        counts = group.exchange(executor.num_windows)
        assert counts[0] == counts[1] and counts[2] == counts[3]


def validate_in_rank():
    with joined(Ranks.from_environment()) as group:
        group.open(20)
        check_scores(group)
        check_stops(group)


def validate_in_ranks():
    sys.exit(any(in_ranks(4, validate_in_rank)))


def test_shards_validate_the_cases_of_their_replica_together():
    done = warm.run_call(validate_in_ranks)
    assert done.returncode == 0, done.stderr
