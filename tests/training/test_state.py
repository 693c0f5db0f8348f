import math
from dataclasses import asdict

import pytest
import torch

from tests.rank_threads import in_threads
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inputs.plain_data import is_printable
from unet3d.model import LossTerms
from unet3d.training.state import TrainingState


def terms(total, dice):
    values = (torch.tensor(value, dtype=torch.float64) for value in (total, dice, total - dice))
    return LossTerms(**dict(zip(("total", "dice", "cross_entropy"), values, strict=True)))


def test_losses_are_weighted_by_their_samples():
    state, group = TrainingState(), Group(Ranks())
    state.add_steps([(3, terms(2.0, 0.5)), (1, terms(6.0, 1.0))], 0.5, group)
    state.add_steps([(4, terms(1.0, 0.25))], 0.25, group)
    assert state.num_samples == 8
    assert state.waited_seconds == 0.75
    assert state.mean_loss == {
        "total": pytest.approx((3 * 2 + 6 + 4 * 1) / 8),
        "dice": pytest.approx((3 * 0.5 + 1.0 + 4 * 0.25) / 8),
        "cross_entropy": pytest.approx((3 * 1.5 + 5.0 + 4 * 0.75) / 8),
    }


def test_the_ranks_have_waited_as_long_as_on_average():
    def waited(group):
        state = TrainingState()
        state.add_steps([(1, terms(1.0, 0.5))], 0.5 + group.ranks.rank, group)
        return state.waited_seconds

    assert in_threads(3, waited) == [1.5, 1.5, 1.5]


def test_a_loss_that_is_no_number_is_noticed_unless_it_is_of_no_sample():
    state = TrainingState()
    state.add_steps([(0, terms(math.nan, math.nan))], 0.0, Group(Ranks()))
    assert state.is_finite
    assert state.mean_loss == {"total": 0.0, "dice": 0.0, "cross_entropy": 0.0}
    for value in (math.nan, math.inf):
        state = TrainingState()
        state.add_steps([(2, terms(value, 0.5)), (2, terms(1.0, 0.5))], 0.0, Group(Ranks()))
        assert not state.is_finite


def test_the_best_validation_is_remembered_over_epochs():
    state = TrainingState().next_epoch(1.5)
    assert state.note_dice({"a": 0.0}, 0.0)
    state = state.next_epoch(2.5)
    assert state.note_dice({"a": 0.75, "b": 0.25}, 0.5)
    state.seconds, state.waited_seconds = 2.0, 0.5
    state = state.next_epoch(0.5)
    assert not state.note_dice({"a": 0.5, "b": None}, 0.5)
    assert not state.note_dice({"a": None}, None)
    state.seconds, state.waited_seconds = 3.0, 1.0
    state = state.next_epoch(None)
    assert state == TrainingState(
        epoch=4,
        total_seconds=5.0,
        total_waited_seconds=1.5,
        validation_seconds=4.5,
        last_validation_seconds=0.5,
        best_dice=0.5,
        best_epoch=2,
        best_labels={"a": 0.75, "b": 0.25},
    )


def test_a_state_is_read_back_and_one_of_an_earlier_version_too():
    state = TrainingState(epoch=3, step=2, num_samples=4, seconds=1.5, waited_seconds=0.5)
    assert TrainingState.from_plain(asdict(state)) == state
    assert TrainingState.from_plain({"epoch": 3, "best_dice": 1}) == TrainingState(
        epoch=3, best_dice=1.0
    )


@pytest.mark.parametrize(
    "values",
    [
        None,
        {3: 4},
        {"epochs": 3},
        {"epoch": True},
        {"step": "2"},
        {"loss": {}},
        {"loss": {"\x1b[2J" * 1000: 1.0}},
        {"loss": {"total": 1.0, "dice": 1.0, "cross_entropy": math.inf}},
    ],
)
def test_what_is_no_state_is_refused(values):
    with pytest.raises(ValueError) as caught:
        TrainingState.from_plain(values)
    assert is_printable(str(caught.value))
    assert len(str(caught.value)) < 500
