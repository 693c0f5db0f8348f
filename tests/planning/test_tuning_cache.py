"""The measured best choice is found again by equal trainings, and by no others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import trainings
from tests.command_line import run
from unet3d.config import Config, load_config
from unet3d.model import UNet3d
from unet3d.parallel import ParallelDims
from unet3d.planning.memory_estimate import Step
from unet3d.planning.network_plan import plan_without_data
from unet3d.planning.tuning_cache import (
    TunedConfig,
    recall_tuned,
    remember_tuned,
    resolve_auto,
)
from unet3d.records import remember

CPU = torch.device("cpu")
CHOICE = TunedConfig(
    cuts=(3,), num_micro_batches=2, step_seconds=0.25, measured="2026-11-21 at 14:48"
)
SPREAD = ("parallel.mode=model", "parallel.devices=cpu,cpu")
SMALL = (
    "data.phantom_shape=16,16,16",
    "data.num_folds=20",
    "data.num_workers=0",
    "training.steps_per_epoch=1",
    "model.base_channels=2",
    "model.num_levels=2",
    "training.epochs=1",
    "training.batch_size=2",
    "training.precision=float32",
)


def settings(cache: Path, *overrides: str) -> Config:
    return load_config(None, [*SMALL, *SPREAD, f"data.cache={cache}", *overrides])


def step(cache: Path, *overrides: str) -> Step:
    """Return the step of a training on phantoms with these settings."""
    config = settings(cache, *overrides)
    network = plan_without_data(config)
    return network.step(network.settled(config), ParallelDims.resolve(config.parallel), "float32")


def on(step: Step, **layout: object) -> Step:
    """Return a step with another layout."""
    return replace(step, layout=replace(step.layout, **layout))


def test_a_choice_is_found_again(tmp_path, caplog):
    config, here = settings(tmp_path), step(tmp_path)
    assert recall_tuned(config, here) is None
    path = remember_tuned(config, here, CHOICE)
    assert path.is_relative_to(tmp_path)
    # Settings that do not change the time of a step do not matter.
    for other in (
        "training.epochs=7",
        "data.fold=1",
        "parallel.cuts=3",
        "training.micro_batches=2",
    ):
        assert recall_tuned(config, step(tmp_path, other)) == CHOICE
    assert not caplog.records


def test_in_other_circumstances_it_is_not(tmp_path, monkeypatch):
    config, here = settings(tmp_path), step(tmp_path)
    remember_tuned(config, here, CHOICE)
    x, y, z = here.size
    for changed in (
        replace(here, topology=replace(here.topology, channels=(2, 5))),
        replace(here, size=(x, y, z + 2)),
        replace(here, batch_size=3),
        replace(here, precision="float64"),
        replace(here, regions=((1,),)),
        on(here, devices=(CPU, CPU, CPU)),
        on(here, num_replicas=2),
        on(here, num_shards=2),
        on(here, captures=False),
        on(here, offload="skips"),
        on(here, recompute="level"),
        step(tmp_path, "training.batch_dice=true"),
        step(tmp_path, "training.optimizer=adamw"),
    ):
        assert recall_tuned(config, changed) is None, changed
    for name, other in (
        ("torch.get_num_threads", lambda: 1000),
        ("torch.__version__", "9.9.9"),
        ("torch.version.cuda", "99.9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, other)
            assert recall_tuned(config, here) is None, name
    assert recall_tuned(config, here) == CHOICE
    # Two stages on one GPU differ from two GPUs.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    first, second, third = (torch.device("cuda", index) for index in range(3))
    remember_tuned(config, on(here, devices=(first, second)), CHOICE)
    assert recall_tuned(config, on(here, devices=(second, third))) == CHOICE
    assert recall_tuned(config, on(here, devices=(first, first))) is None


DAMAGES: tuple[dict[str, Any], ...] = ({}, {"choice": 1}, {"choice": {"cuts": []}})
"""Records that mean nothing here.

Files that are no records at all are tested in tests/inputs/test_reading.py.
"""


def test_a_damaged_file_is_named_and_not_used(tmp_path, caplog):
    config, here = settings(tmp_path), step(tmp_path)
    path = remember_tuned(config, here, CHOICE)
    for damage in DAMAGES:
        remember(path, damage)
        assert resolve_auto(config, here).training.micro_batches == 1, damage
        (record,) = caplog.records
        assert str(path) in record.getMessage()
        caplog.clear()


def found_by(config: Config, here: Step) -> tuple[object, ...]:
    found = resolve_auto(config, here)
    return found.training.micro_batches, found.parallel.cuts


def test_what_is_measured_is_taken_and_said(tmp_path, caplog):
    config, here = settings(tmp_path), step(tmp_path)
    assert found_by(config, here) == (1, "encoder-decoder")  # as if nothing was measured
    remember_tuned(config, here, CHOICE)
    with caplog.at_level("INFO"):
        taken = resolve_auto(config, here)
    assert found_by(config, here) == (2, (3,))
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("using 2 micro-batches and parallel.cuts=3, the fastest")
    assert "2026-11-21 at 14:48" in message and "250.0 ms" in message
    # A settled choice stays, whatever is measured later.
    remember_tuned(config, here, replace(CHOICE, cuts=(1,)))
    assert resolve_auto(taken, here) == taken
    # On one device micro-batches are chosen, but no cut.
    alone = ("parallel.mode=none", "parallel.devices=cpu")
    config, here = settings(tmp_path, *alone), step(tmp_path, *alone)
    remember_tuned(config, here, replace(CHOICE, cuts=()))
    assert found_by(config, here) == (2, "encoder-decoder")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("training.micro_batches=1", (1, "encoder-decoder")),
        ("parallel.cuts=time", (1, "time")),
        ("parallel.cuts=encoder-decoder", (1, "encoder-decoder")),
        ("parallel.cuts=5", (1, (5,))),
    ],
)
def test_what_is_set_wins(setting, expected, tmp_path, caplog):
    remember_tuned(settings(tmp_path), step(tmp_path), CHOICE)
    with caplog.at_level("INFO"):
        assert found_by(settings(tmp_path, setting), step(tmp_path, setting)) == expected
    assert not caplog.records


def stages_of(folder: Path) -> list[list[str]]:
    """Return the blocks of each stage in which a run was trained."""
    record = json.loads((folder / "memory.json").read_text())
    return [slot["blocks"] for slot in record["slots"]]


@pytest.mark.nightly
def test_training_takes_the_choice_and_records_it(tmp_path, caplog):
    cache, folder = tmp_path / "cache", tmp_path / "run"
    config, here = settings(cache), step(cache)
    remember_tuned(config, here, CHOICE)
    with caplog.at_level("INFO"):
        trainings.run(config, folder)
    stages = stages_of(folder)
    assert [len(blocks) for blocks in stages] == [3, len(UNet3d(here.topology).blocks()) - 3]
    assert caplog.text.count("that plan --measure found") == 1
    recorded = load_config(folder / "config.yaml")
    assert (recorded.training.micro_batches, recorded.parallel.cuts) == (2, (3,))
    # A later measurement does not change a run that is resumed.
    remember_tuned(config, here, replace(CHOICE, cuts=(1,)))
    again = ("train", "--quiet", "--resume", "--output", folder, "--epochs", 2)
    with trainings.bare():
        assert run(*again, "--devices", "cpu,cpu") == 0
    assert stages_of(folder) == stages
    assert load_config(folder / "config.yaml").parallel.cuts == (3,)
