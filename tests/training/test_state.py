import math
from dataclasses import asdict, fields

import pytest
import torch

from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.model import LossTerms
from unet3d.runs.checkpoint_content import State
from unet3d.training.state import TrainingState


def terms(total: float, dice: float) -> LossTerms:
    values = (torch.tensor(value, dtype=torch.float64) for value in (total, dice, total - dice))
    return LossTerms(**dict(zip(("total", "dice", "cross_entropy"), values, strict=True)))


def test_losses_are_weighted_by_their_samples() -> None:
    state, group = TrainingState(), Group(Ranks())
    state.add_losses([(3, terms(2.0, 0.5)), (1, terms(6.0, 1.0))], group)
    state.add_losses([(4, terms(1.0, 0.25))], group)
    assert state.num_samples == 8
    assert state.mean_loss == {
        "total": pytest.approx((3 * 2 + 6 + 4 * 1) / 8),
        "dice": pytest.approx((3 * 0.5 + 1.0 + 4 * 0.25) / 8),
        "cross_entropy": pytest.approx((3 * 1.5 + 5.0 + 4 * 0.75) / 8),
    }


def test_a_rank_without_samples_adds_nothing() -> None:
    state = TrainingState()
    state.add_losses([(0, terms(math.nan, math.nan))], Group(Ranks()))
    assert state.is_finite
    assert state.mean_loss == {"total": 0.0, "dice": 0.0, "cross_entropy": 0.0}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_noticed(value: float) -> None:
    state = TrainingState()
    state.add_losses([(2, terms(value, 0.5)), (2, terms(1.0, 0.5))], Group(Ranks()))
    assert not state.is_finite


def test_the_best_validation_is_remembered_over_epochs() -> None:
    state = TrainingState().next_epoch({"a": 0.0}, 1.5)
    assert state.note_dice(0.0)
    state = state.next_epoch({"a": 0.75, "b": 0.25}, 2.5)
    assert state.note_dice(0.5)
    state.seconds = 2.0
    state = state.next_epoch({"a": 0.5, "b": None}, 0.5)
    assert not state.note_dice(0.5)
    assert not state.note_dice(None)
    state.seconds = 3.0
    state = state.next_epoch(None)
    assert state == TrainingState(
        epoch=4,
        total_seconds=5.0,
        validation_seconds=4.5,
        last_validation_seconds=0.5,
        best_dice=0.5,
        best_epoch=2,
        best_labels={"a": 0.75, "b": 0.25},
        last_dice={"a": 0.5, "b": None},
    )


def test_checkpoints_know_every_field() -> None:
    assert list(State.model_fields) == [field.name for field in fields(TrainingState)]
    state = TrainingState(epoch=3, step=2, num_samples=4, best_dice=0.5, best_labels={"a": None})
    plain = asdict(state)
    assert TrainingState(**State(**plain).model_dump()) == state
