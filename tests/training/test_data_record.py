import json
from pathlib import Path
from types import SimpleNamespace

from tests.networks import random_checkpoint
from unet3d.config import load_config
from unet3d.inputs.plain_data import validated
from unet3d.runs.case_split import CaseSplit
from unet3d.training.data_record import data_lines, data_record


def experiment(training, validation, *changes):
    return SimpleNamespace(
        config=load_config(None, changes),
        preprocessing=random_checkpoint(label_values=(0, 7)).preprocessing,
        split=CaseSplit(
            training=dict.fromkeys(training, "0" * 32),
            validation=dict.fromkeys(validation, "1" * 32),
        ),
    )


def test_the_record_says_all_that_a_run_is_made_with():
    made = experiment(["a", "b"], ["c"], "data.dataset=some/where", "data.fold=2")
    record = data_record(made)
    assert json.loads(json.dumps(record)) == record
    assert record["dataset"] == str(Path("some/where").absolute())
    assert (record["fold"], record["seed"]) == (2, 0)
    assert record["preprocessing"]["label_values"] == [0, 7]
    assert record["validation"] == {"c": "1" * 32}
    assert validated(CaseSplit, record) == made.split
    assert record["fingerprint"] == made.split.fingerprint
    other = experiment(["a", "c"], ["b"])
    assert data_record(other)["fingerprint"] != record["fingerprint"]


def test_who_trains_and_who_validates_is_said():
    made = experiment(["b", "a"], ["c"])
    assert data_lines(made) == ["data: phantom, 2 cases train, 1 validate (fold 0)"]
    made.split = CaseSplit(training={"a": "1", "b": "2"}, validation={"c": "3", "d": "2"})
    *_, last = data_lines(made)
    assert last == "1 of these are trained on too, under other names: d"
