"""The state of a training, and when it is saved."""

import math
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from tests.rank_threads import in_threads
from unet3d.config import load_config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inputs.plain_data import is_printable
from unet3d.model import LossTerms
from unet3d.runs.run_folder import RunFolder
from unet3d.training.cases import RunContext
from unet3d.training.saving import CheckpointSaver, TrainingState, all_finite


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
    state = TrainingState(cpu_precision="float32", step=3, num_samples=2, seconds=1.0)
    assert state.note_dice(0.0)
    state = state.next_epoch()
    assert state.note_dice(0.5) and not state.note_dice(0.5) and not state.note_dice(None)
    assert state.next_epoch() == TrainingState(cpu_precision="float32", epoch=2, best_dice=0.5)


def test_a_state_is_read_back_and_one_of_an_earlier_version_too():
    state = TrainingState(epoch=3, step=2, num_samples=4, seconds=1.5, waited_seconds=0.5)
    assert TrainingState.from_plain(asdict(state)) == state
    other = {"epoch": 3, "best_dice": 1, "best_epoch": 2}
    assert TrainingState.from_plain(other) == TrainingState(epoch=3, best_dice=1.0)


@pytest.mark.parametrize(
    "values",
    [
        None,
        {3: 4},
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


def saver_of(rank, folder):
    experiment = SimpleNamespace(config=load_config(None, ["training.save_every_seconds=5"]))
    context = RunContext(
        experiment=experiment,
        executor=SimpleNamespace(module=None),
        folder=RunFolder(folder),
        group=Group(Ranks(rank=rank, world_size=2, local_rank=rank, local_world_size=2)),
        dims=None,
        precision="float32",
    )
    return CheckpointSaver(context, None)


def test_only_the_rank_that_writes_knows_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    first, second = (saver_of(rank, tmp_path) for rank in range(2))
    assert not first.is_due()
    clock[0] += 5
    assert first.is_due()
    # If a rank that does not write kept its own clock, it would ask for a checkpoint after every
    # step.
    second.save(TrainingState())
    assert not second.is_due()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_numbers_are_looked_at_in_every_type(dtype):
    good = torch.full((3, 4), 2, dtype=dtype)
    assert all_finite([good, torch.empty(0), torch.tensor(5, dtype=torch.int64)])
    assert all_finite([])
    if dtype.is_floating_point:
        for value in (math.nan, math.inf, -math.inf):
            bad = good.clone()
            bad[1, 2] = value
            assert not all_finite([good, bad])
