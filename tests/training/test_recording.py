"""Who writes what a run tells of itself, and when; what is in it, ``test_job`` sees."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.networks import random_checkpoint
from tests.rank_threads import in_threads
from unet3d.config import Config, load_config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inputs.plain_data import validated
from unet3d.parallel import ParallelDims
from unet3d.runs.case_split import CaseSplit
from unet3d.runs.run_folder import RunFolder
from unet3d.training import recording
from unet3d.training.context import RunContext
from unet3d.training.metrics import epoch_metrics
from unet3d.training.recording import RunRecorder, data_lines, data_record
from unet3d.training.state import TrainingState

CPU = torch.device("cpu")
METRICS = epoch_metrics(TrainingState(), num_steps=1, learning_rate=0.01, validation=None)
FILES = {"config.yaml", "data.json", "metrics.jsonl", "progress.png", "summary.json", "tensorboard"}


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


def test_only_the_first_rank_writes(tmp_path):
    def record(group):
        folder = tmp_path / str(group.ranks.rank)
        folder.mkdir()
        one = recorder(group, folder)
        one.begin()
        one.write_epoch(METRICS)
        one.draw_progress()
        one.write_summary(TrainingState(), None)

    in_threads(2, record)
    assert {path.name for path in (tmp_path / "0").iterdir()} == FILES
    assert list((tmp_path / "1").iterdir()) == []


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
    assert len(RunFolder(tmp_path).read_metrics()) == 3  # nothing was written yet
    again.begin()
    assert [line["epoch"] for line in RunFolder(tmp_path).read_metrics()] == [1, 2]


def test_the_picture_names_the_fold_of_several(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(recording, "write_progress_picture", lambda *values: drawn.append(values))
    one = recorder(Group(Ranks()), tmp_path / "mine" / "fold0")
    one.draw_progress()
    assert [title for _, title, _ in drawn] == ["mine/fold0: fold 0 of phantom"]


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
    assert data_lines(made) == ["data: phantom, 2 cases train, 1 validate (fold 0)"]
    made.split = CaseSplit(training={"a": "1", "b": "2"}, validation={"c": "3", "d": "2"})
    *_, last = data_lines(made)
    assert last == "1 of these are trained on too, under other names: d"
