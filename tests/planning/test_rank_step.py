"""A step in one rank: its time and its memory; several ranks are in test_sweep.py."""

import json

import pytest
import torch

from tests.command_line import run
from tests.steps import make_step
from unet3d.config import load_config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError
from unet3d.parallel.pipeline import PipelineExecutor
from unet3d.planning import rank_step
from unet3d.planning.network_plan import plan_without_data
from unet3d.planning.placements import make_option, placed
from unet3d.planning.rank_step import measure_rank

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path):
    few = ["patches.size=16,16,16", "model.base_channels=4", "model.num_levels=2"]
    here = ["parallel.mode=none", "parallel.devices=cpu", f"data.cache={tmp_path}"]
    return load_config(None, [*few, *here, "training.precision=float32"])


def test_a_step_takes_time_and_what_was_predicted(config, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command sets it for good
    network, path = plan_without_data(config), tmp_path / "step.json"
    settings = tmp_path / "settings.yaml"
    settings.write_text(config.to_yaml())
    assert run("plan", "--config", settings, "--step-record", path) == 0
    record = json.loads(path.read_text())
    assert 0 < record["seconds"] < 60
    dims, memory = placed(config.parallel, "none", (CPU,)), {CPU: 2**30}
    option = make_option(
        network.settled(config),
        network,
        dims,
        precision="float32",
        num_micro_batches=1,
        memory=memory,
    )
    assert record["peak_bytes"] == [option.prediction.memory[0].peak_bytes]


def test_a_rank_without_memory_says_so(config, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rank_step, "parallelize", fail)
    path = tmp_path / "step.json"
    with pytest.raises(DoesNotFitError, match="rank 0 ran out of memory"):
        measure_rank(config, plan_without_data(config), path)
    assert json.loads(path.read_text()) == {"seconds": None, "peak_bytes": []}


def test_a_time_is_that_of_steps_that_do_all_the_work_and_change_nothing(monkeypatch):
    calls: list[str] = []
    models = []
    forward_backward, take = PipelineExecutor.forward_backward, rank_step.Optimization.step

    def forward(self, image, target, *more, **others):
        assert image.shape == (2, 2, 16, 16, 16) and target.shape == (2, 16, 16, 16)
        if not models:
            before = {name: value.clone() for name, value in self.module.state_dict().items()}
            models.append((self.module, before))
        calls.append("forward and backward")
        return forward_backward(self, image, target, *more, **others)

    def step(self, learning_rate):
        calls.append("step")
        take(self, learning_rate)

    monkeypatch.setattr(PipelineExecutor, "forward_backward", forward)
    monkeypatch.setattr(rank_step.Optimization, "step", step)
    found = rank_step.time_step(make_step((CPU,)), Group(Ranks()))
    num_steps = 2 + rank_step.NUM_TIMED_STEPS  # one makes the state, one counts memory
    assert calls == ["forward and backward", "step"] * num_steps
    assert 0 < found.seconds < 60
    ((model, before),) = models
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
