"""Which rank writes a run's records, and when; their content is tested in ``test_job``."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.networks import random_checkpoint
from unet3d.config import Config, load_config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inputs.plain_data import validated
from unet3d.parallel import ParallelDims
from unet3d.runs.case_split import CaseSplit
from unet3d.runs.run_folder import RunFolder
from unet3d.training import recording
from unet3d.training.cases import RunContext
from unet3d.training.recording import (
    RunRecorder,
    ScalarFile,
    data_lines,
    data_record,
    epoch_metrics,
)
from unet3d.training.saving import TrainingState
from unet3d.training.validation import Validation

CPU = torch.device("cpu")
METRICS = epoch_metrics(TrainingState(), num_steps=1, learning_rate=0.01, validation=None)


@pytest.fixture(autouse=True)
def _record_of_no_data(monkeypatch):
    monkeypatch.setattr(recording, "data_record", lambda experiment: {})


def recorder(group, folder, devices=(CPU,)):
    context = RunContext(
        experiment=SimpleNamespace(config=Config()),
        executor=SimpleNamespace(slots=[SimpleNamespace(device=device) for device in devices]),
        folder=RunFolder(folder),
        group=group,
        dims=ParallelDims(mode="data", replicas=((CPU,),) * group.size, num_replicas=group.size),
        precision="float32",
    )
    return RunRecorder(context)


def test_it_begins_once_and_a_run_that_goes_on_is_cut_to_its_complete_epochs(tmp_path):
    first = recorder(Group(Ranks()), tmp_path)
    first.begin()
    (tmp_path / "config.yaml").unlink()
    first.begin()
    assert not (tmp_path / "config.yaml").exists()
    for epoch in (1, 2, 3):
        first.write_epoch(METRICS | {"epoch": epoch})
    again = recorder(Group(Ranks()), tmp_path)
    again.resumed_epoch = 2
    assert len(RunFolder(tmp_path).read_metrics()) == 3  # no further line yet
    again.begin()
    assert [line["epoch"] for line in RunFolder(tmp_path).read_metrics()] == [1, 2]


def test_the_picture_names_the_fold_of_several(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(recording, "progress_figure", lambda *values: drawn.append(values))
    monkeypatch.setattr(recording, "write_figure", lambda *_: None)
    one = recorder(Group(Ranks()), tmp_path / "mine" / "fold0")
    one.draw_progress()
    assert [title for _, title in drawn] == ["mine/fold0: fold 0 of phantom"]


def test_without_tensorboard_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "HAS_TENSORBOARD", False)
    one = recorder(Group(Ranks()), tmp_path)
    one.begin()
    one.write_epoch(METRICS)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml",
        "data.json",
        "metrics.jsonl",
    }


def test_what_captured_steps_reserve_later_is_written_down(tmp_path, monkeypatch):
    reserved = {torch.device("cuda", 0): 500, torch.device("cuda", 1): 100}
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved.get(device, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    one = recorder(Group(Ranks()), tmp_path, (torch.device("cuda", 2), *reserved))
    one.update_reserved()
    assert not (tmp_path / "memory.json").exists()
    one.memory = {"slots": [{"measured": {"reserved_bytes": 300}} for _ in range(3)]}
    one.update_reserved()
    record = json.loads((tmp_path / "memory.json").read_text())
    assert [slot["measured"]["reserved_bytes"] for slot in record["slots"]] == [300, 500, 300]


def made_with(training, validation, *changes):
    return SimpleNamespace(
        config=load_config(None, changes),
        preprocessing=random_checkpoint(label_values=(0, 7)).preprocessing,
        split=CaseSplit(
            training=dict.fromkeys(training, "0" * 32),
            validation=dict.fromkeys(validation, "1" * 32),
        ),
    )


def test_the_record_says_all_that_a_run_is_made_with():
    made = made_with(["a", "b"], ["c"], "data.dataset=some/where", "data.fold=2")
    record = data_record(made)
    assert json.loads(json.dumps(record)) == record
    assert record["dataset"] == str(Path("some/where").absolute())
    assert (record["fold"], record["seed"]) == (2, 0)
    assert record["preprocessing"]["label_values"] == [0, 7]
    assert record["validation"] == {"c": "1" * 32}
    assert validated(CaseSplit, record) == made.split
    assert record["fingerprint"] == made.split.fingerprint
    other = made_with(["a", "c"], ["b"])
    assert data_record(other)["fingerprint"] != record["fingerprint"]


def test_who_trains_and_who_validates_is_said():
    made = made_with(["b", "a"], ["c"])
    assert data_lines(made) == ["data: phantom, 2 training cases, 1 validation case (fold 0)"]
    made.split = CaseSplit(training={"a": "1", "b": "2"}, validation={"c": "3", "d": "2"})
    *_, last = data_lines(made)
    assert last == "validation cases that are also training cases, under other names: d"


STATE = TrainingState(
    epoch=4,
    loss={"total": 12.0, "dice": 4.0, "cross_entropy": 8.0},
    num_samples=8,
    seconds=2.5,
    waited_seconds=0.625,
)


def test_an_epoch_without_validation_has_no_dice():
    assert epoch_metrics(STATE, num_steps=3, learning_rate=0.25, validation=None) == {
        "epoch": 5,
        "step": 15,
        "loss": 1.5,
        "dice_loss": 0.5,
        "cross_entropy": 1.0,
        "seconds": 2.5,
        "waited_seconds": 0.625,
        "learning_rate": 0.25,
    }


def test_tensorboard_gets_what_is_known(tmp_path):
    validation = Validation(
        dice={"mean": 0.25, "absent": None}, mean_dice=0.5, loss=0.75, seconds=1.5
    )
    metrics = epoch_metrics(STATE, num_steps=3, learning_rate=0.25, validation=validation)
    assert metrics["dice"] == {"mean": 0.25, "absent": None} and metrics["mean_dice"] == 0.5
    assert metrics["seconds"] == 2.5 and metrics["validation_seconds"] == 1.5
    ScalarFile(tmp_path).write(metrics)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert found == {
        "loss": [(5, 1.5)],
        "dice_loss": [(5, 0.5)],
        "cross_entropy": [(5, 1.0)],
        "learning_rate": [(5, 0.25)],
        "dice/mean": [(5, 0.25)],
        "mean_dice": [(5, 0.5)],
        "validation_loss": [(5, 0.75)],
        "waited_seconds": [(5, 0.625)],
    }


def test_the_summary_is_of_the_best_validation_and_of_all_seconds(tmp_path):
    one = recorder(Group(Ranks()), tmp_path)
    for epoch, dice, validation_seconds in ((1, {"a": 0.75, "b": 0.25}, 4.0), (2, None, None)):
        more = {} if dice is None else {"dice": dice, "mean_dice": 0.5}
        more |= {} if dice is None else {"validation_seconds": validation_seconds}
        one.write_epoch(METRICS | more | {"epoch": epoch, "seconds": 5.0, "waited_seconds": 2.0})
    last = {"epoch": 3, "dice": {"a": 0.5}, "mean_dice": 0.5, "validation_seconds": 2.0}
    one.write_epoch(METRICS | last)
    one.write_summary(None)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["final"] is None
    assert [summary[key] for key in ("parallel", "replicas", "shards")] == ["data", 1, 1]
    assert (summary["best_dice"], summary["best_epoch"]) == (0.5, 1)
    assert summary["dice"] == {"a": 0.75, "b": 0.25}
    keys = ("seconds", "training_seconds", "validation_seconds", "waited_seconds")
    assert [summary[key] for key in keys] == [16.0, 10.0, 6.0, 4.0]
