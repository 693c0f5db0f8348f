"""Validation with a network whose answers are known."""

import numpy as np
import pytest

from tests import warm
from tests.rank_threads import in_threads
from tests.training import rank_validation
from tests.training.known_answers import (
    NAMES,
    Case,
    assert_right,
    expected_loss,
    made_cases,
    validator,
)
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DeviceError
from unet3d.interruption import InterruptionRequest
from unet3d.training.validation import Validation


@pytest.fixture(scope="module")
def cases():
    return made_cases()


def test_the_dice_of_each_label_is_the_mean_over_the_cases(cases):
    found = validator(cases, Group(Ranks())).validate(1, 10, InterruptionRequest())
    assert_right(found, cases)


def test_ignored_voxels_are_in_no_score(cases):
    """Whatever the network says where nobody has labelled, the Dice is that of the other voxels."""
    generator = np.random.default_rng(1)
    partly = []
    for case in made_cases():
        is_ignored = generator.random(case.truth.shape) < 0.3
        case.answer[is_ignored] = generator.integers(0, len(NAMES), is_ignored.sum())
        case.truth[is_ignored] = len(NAMES)
        partly.append(case)
    assert any((case.answer[case.truth == len(NAMES)] == 3).any() for case in partly)
    found = validator(partly, Group(Ranks()), ignore_value=9).validate(1, 10, InterruptionRequest())
    losses = [expected_loss(case) for case in partly]
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    for case in partly:  # as if these voxels had never been
        case.answer[case.truth == len(NAMES)] = 0
    assert_right(found, partly)


def test_the_loss_of_a_volume_is_that_of_its_slabs(cases, monkeypatch):
    monkeypatch.setattr("unet3d.training.validation.MAX_LOGITS", 1000)
    wide = [Case(case.name, case.answer, case.truth.astype(np.uint16)) for case in cases]
    found = validator(wide, Group(Ranks())).validate(1, 10, InterruptionRequest())
    losses = [expected_loss(case) for case in cases]
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_every_case_and_window_is_told_of(cases):
    told: list[tuple[int, int, int, int]] = []
    found = validator(cases, Group(Ranks())).validate(
        1, 10, InterruptionRequest(), lambda *numbers: told.append(numbers)
    )
    assert found.seconds > 0
    assert [numbers[:2] for numbers in told if numbers[2] == 0] == [(n, 5) for n in range(6)]
    assert told[-1] == (5, 5, 0, 1)
    parts = [case + window / of_case for case, _, window, of_case in told]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] == 5
    for number in range(5):
        windows = [window for case, _, window, _ in told if case == number]
        (num_windows,) = {of_case for case, _, _, of_case in told if case == number}
        assert windows[0] == 0 and windows[-1] == num_windows > 1


@pytest.mark.parametrize(("window", "planes"), [("3,8,8", 4), ("whole", 6)])
def test_windows_with_too_few_planes_are_refused_before_the_first_epoch(
    cases, window, planes, monkeypatch
):
    monkeypatch.setattr("unet3d.training.validation.ShardSignals", lambda *_: None)
    validator(cases, Group(Ranks()), planes, window=window)
    with pytest.raises(DeviceError, match=f"has {planes} planes .* use at most {planes}$"):
        validator(cases, Group(Ranks()), planes + 1, window=window)


def both_ranks(cases: list[Case], requests: list[InterruptionRequest]) -> list[Validation]:
    return in_threads(
        2,
        lambda group: validator(cases, group).validate(1, 10, requests[group.ranks.rank]),
    )


def test_ranks_divide_the_cases_and_agree(cases):
    first, second = both_ranks(cases, [InterruptionRequest(), InterruptionRequest()])
    assert first == second
    assert_right(first, cases)


def test_a_signal_to_one_rank_stops_all(cases):
    told = InterruptionRequest()
    told.signal_number = 15
    found = both_ranks(cases, [InterruptionRequest(), told])
    assert [one.stop for one in found] == [15, 15]


def test_shards_validate_the_cases_of_their_replica_together():
    """Also where each is asked to stop at another moment; see ``rank_validation``."""
    done = warm.run_call(rank_validation.main)
    assert done.returncode == 0, done.stderr
