"""A training that is not finite any more: what is blamed, and what stays."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.trainings import contents, is_real, losses, run, settings
from unet3d.errors import CheckpointError, ConfigError, VolumeError
from unet3d.model import LossTerms
from unet3d.model.optimizer import Optimization
from unet3d.preparation.cache import PreparedCase
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.training.divergence import (
    MAX_SUSPECTS,
    StepLoss,
    divergence_error,
    image_fault,
    suspects,
)


def case(name, *values):
    image = np.array(values, np.float32).reshape(1, -1, 1, 1)
    return SimpleNamespace(name=name, image=lambda: image)


def test_the_image_that_is_at_fault_is_named_or_else_the_learning_rate():
    good = case("good", 0.5, -3000.0, 3071.0)
    assert image_fault([good]) is None
    for value in (math.nan, math.inf, -math.inf, 1e30, -1e5):
        fault = image_fault([good, case("bad", 0.0, value)])
        assert fault is not None and "the prepared image of case bad " in fault, value
        error = divergence_error("the loss is not finite in epoch 3", fault, 0.01)
        assert isinstance(error, VolumeError)
        assert "case bad" in str(error) and "learning_rate" not in str(error)
    error = divergence_error("the loss is not finite in epoch 3", None, 0.01)
    assert isinstance(error, ConfigError)
    assert "a smaller training.learning_rate than 0.01" in str(error)


def step(total, *cases):
    zero = torch.zeros(())
    terms = LossTerms(total=torch.tensor(total), dice=zero, cross_entropy=zero)
    return StepLoss(num_samples=len(cases), terms=terms, cases=cases)


def test_the_last_cases_before_the_loss_was_lost_are_suspected_first():
    steps = [step(1.0, "a", "b"), step(1.0, "c", "a"), step(math.nan, "d"), step(math.nan, "e")]
    assert suspects(steps) == ["d", "c", "a", "b"]
    assert suspects(steps[:2]) == ["c", "a", "b"]  # another rank has lost its own
    assert suspects([]) == []
    assert len(suspects([step(1.0, str(number)) for number in range(99)])) == MAX_SUSPECTS


QUICK = ("patches.size=8,8,8", "training.steps_per_epoch=2", "training.epochs=2")


@pytest.fixture(scope="module")
def begun(cache, tmp_path_factory):
    """A run of one epoch."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    run(settings(cache, *QUICK, "training.epochs=1"), folder)
    return folder


@pytest.fixture
def folder(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


def spoil(monkeypatch, after, what):
    """Make numbers infinite after some steps, without a trace of it in the loss of the step."""
    take, done = Optimization.step, []

    def spoiled(self, learning_rate):
        take(self, learning_rate)
        if is_real(self):
            done.append(learning_rate)
        if len(done) == after:
            parameter = next(iter(self.module.parameters()))
            if what == "weights":
                parameter.data.flatten()[0] = math.nan
            else:
                self.optimizer.state[parameter]["momentum_buffer"][0] = math.inf

    monkeypatch.setattr(Optimization, "step", spoiled)


@pytest.mark.parametrize(("after", "what", "seconds"), [(1, "momentum", 0), (2, "weights", 1000)])
def test_what_is_not_finite_is_never_saved_and_the_run_goes_on_from_before(
    cache, folder, monkeypatch, after, what, seconds
):
    save = (*QUICK, f"training.save_every_seconds={seconds}", "training.validate_every=1")
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"weights are not finite in epoch 2; use a smaller"),
    ):
        spoil(patch, after, what)
        run(settings(cache, *save), folder, resume=True)
    state = load_checkpoint(folder / "checkpoint-latest.pt").training["state"]
    assert (state["epoch"], state["step"]) == (1, 0)
    run(settings(cache, "training.learning_rate=0.001", *save), folder, resume=True)
    assert [epoch for epoch, _ in losses(folder)] == [1, 2]


def test_a_learning_rate_that_is_too_large_stops_the_training(cache, tmp_path):
    config = settings(cache, *QUICK, "training.learning_rate=1e30")
    with pytest.raises(ConfigError, match=r"not finite in epoch 1; use a smaller .* than 1e\+30"):
        run(config, tmp_path / "run")


def test_a_checkpoint_that_is_not_finite_is_not_resumed_from(cache, folder):
    path = folder / "checkpoint-latest.pt"
    content = torch.load(path, weights_only=True)
    next(iter(content["model"].values())).flatten()[0] = math.nan
    torch.save(content, path)
    before = contents(folder)
    with pytest.raises(CheckpointError, match="not finite"):
        run(settings(cache, *QUICK), folder, resume=True)
    assert contents(folder) == before


def spoil_image(monkeypatch, folder, part, value):
    """Fill the prepared image of the first case of a part with a value; return its name."""
    name = next(iter(json.loads((folder / "data.json").read_text())[part]))
    whole = PreparedCase.image

    def image(self):
        array = np.array(whole(self), np.float32)
        return np.full_like(array, value) if self.name == name else array

    monkeypatch.setattr(PreparedCase, "image", image)
    return name


def test_a_bad_image_in_training_is_blamed_not_the_learning_rate(cache, folder, monkeypatch):
    name = spoil_image(monkeypatch, folder, "training", 1e38)
    with pytest.raises(VolumeError, match=f"prepared image of case {name} ") as refused:
        more = ("training.steps_per_epoch=20", "patches.augmentation=none")
        run(settings(cache, *QUICK, *more), folder, resume=True)
    assert "learning_rate" not in str(refused.value)


def test_a_bad_image_in_validation_is_blamed(cache, begun, tmp_path, monkeypatch):
    name = spoil_image(monkeypatch, begun, "validation", math.nan)
    with pytest.raises(VolumeError, match=f"validation case .*case {name} holds NaN or infinite"):
        run(settings(cache, *QUICK, "training.epochs=1"), tmp_path / "run")
    assert not (tmp_path / "run/checkpoint-latest.pt").exists()
