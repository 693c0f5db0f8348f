"""A training with infinite numbers: its error, and the files that stay."""

import math
import shutil

import pytest
import torch

from tests.products import by_night
from tests.trainings import contents, is_real, losses, run, settings
from unet3d.errors import CheckpointError, ConfigError
from unet3d.model.optimizer import Optimization
from unet3d.runs.checkpoint import load_checkpoint

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
    """After some steps, make weights infinite in a way that the step's loss does not show."""
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


@pytest.mark.parametrize(
    ("after", "what", "seconds"), [(2, "weights", 1000), *by_night((1, "momentum", 0))]
)
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
