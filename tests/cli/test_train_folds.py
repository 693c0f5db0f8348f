"""``unet3d train --folds``: the same runs as for single folds, their summary, and how they end."""

import json
import os
import signal
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest

from tests import warm
from tests.command_line import names_in, refusal, wait_until
from tests.process_trees import assert_all_end, children_of, family_of
from tests.trainings import assert_same_weights, contents, run_bare
from unet3d.config import load_config
from unet3d.runs.finding import recorded_folds
from unet3d.training import folds

CHANGES = (
    *("data.phantom_shape=16,16,16", "data.num_workers=0"),
    *("patches.size=8,8,8", "model.base_channels=4", "model.num_levels=2", "data.num_folds=3"),
    *("training.steps_per_epoch=2", "training.learning_rate=0.05"),
    "training.batch_size=2",
    "training.precision=float32",  # the default is measured, and load can change it
)
SMALL = tuple(word for one in CHANGES for word in ("--set", one))


def start(*words):
    return warm.call(run_bare, [*map(str, words)])


def train(*words):
    """Run ``unet3d train`` to its end; return status, output and errors."""
    process = start("train", *words)
    output, errors = process.communicate(timeout=120)
    return process.wait(), output, errors


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def test_folds_one_after_another_are_runs_of_their_own(scan):
    few = ("--set", "data.num_folds=10", "--epochs", 1, "--devices", "cpu")  # cases to score
    status, output, errors = train(*SMALL, *few, "--folds", "0,2")
    assert status == 0, errors
    (top,) = Path("runs").iterdir()
    assert top.name.startswith("phantom-folds-")
    assert "training folds 0, 2, one after another" in errors.splitlines()
    assert errors.count("\nepoch 1/1: ") == 2
    assert names_in(top) == ["config.yaml", "fold0", "fold2", "folds.json", "summary.json"]
    # The summary has mean and deviation over the folds.
    each = [summary_of(top / name) for name in ("fold0", "fold2")]
    found = summary_of(top)
    values = [one["best_dice"] for one in each]
    expected = {"mean": mean(values), "standard_deviation": stdev(values), "num_folds": 2}
    assert found["best_dice"] == pytest.approx(expected)
    final = [one["final"]["mean_dice"] for one in each]
    assert found["final_mean_dice"]["mean"] == pytest.approx(mean(final))
    dice = [one["final"]["dice"] for one in each]
    assert found["final_dice"].keys() == dice[0].keys() != set()
    for label, spread in found["final_dice"].items():
        known = [one[label] for one in dice if one[label] is not None]
        assert spread["mean"] == (pytest.approx(mean(known)) if known else None)
        assert spread["num_folds"] == len(known)
    assert f"{mean(final):.3f}" in output
    # Finished folds stay as they are; a further fold is added.
    before = contents(top)
    assert "Validation Dice of 2 folds" in train("--resume")[1]
    assert contents(top) == before
    status, _, errors = train("--resume", "--folds", "1")
    assert (
        status == 0 and "training folds 1, one after another; finished: 0, 2" in errors.splitlines()
    )
    assert recorded_folds(top) == (0, 1, 2)
    after = contents(top)
    kept = [path for path in before if path.parent.name in ("fold0", "fold2")]
    assert kept and all(after[path] == before[path] for path in kept)
    assert list(summary_of(top)["folds"]) == ["0", "1", "2"]
    # By default predict averages the networks of all folds.
    predicted = warm.run(["predict", scan, "--devices", "cpu"])
    assert predicted.stdout.startswith("using the mean of 3 networks: runs/phantom-folds-")


@pytest.mark.nightly
def test_folds_on_several_devices_train_at_the_same_time():
    options = (*SMALL, "--devices", "cpu,cpu", "--output", "folds")
    status, _, errors = train(*options, "--folds", "0,1", "--epochs", 1)
    assert status == 0, errors
    assert "training folds 0, 1, one at a time on each of cpu, cpu" in errors.splitlines()
    asked = load_config(Path("folds/config.yaml")).parallel  # also for a resumed run
    assert (asked.mode, asked.devices) == ("auto", ("cpu", "cpu"))
    for name in ("fold0", "fold1"):
        assert f"\n{name}: epoch 1/1: loss" in errors
        summary = summary_of(Path("folds", name))
        assert summary["parallel"] == "none" and len(summary["devices"]) == 1
    alone = ("--fold", 1, "--devices", "cpu", "--output", "alone", "--epochs", 1, "--quiet")
    assert train(*SMALL, *alone)[0] == 0
    assert_same_weights(Path("folds/fold1"), Path("alone"))
    line = train(*options, "--folds", "all")[2].splitlines()[-1]
    assert "folds holds a run over folds already; continue it with --resume" in line
    # A damaged record is written again.
    Path("folds/folds.json").write_text('{"fol')
    assert train("--resume", "--output", "folds", "--quiet")[0] == 0
    assert json.loads(Path("folds/folds.json").read_text()) == {"folds": [0, 1]}


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
@pytest.mark.nightly
def test_a_signal_stops_all_folds_and_they_go_on(devices):
    words = (*SMALL, "--folds", "0,1", "--devices", devices, "--epochs", 100000)
    process = start("train", *words, "--output", "folds")
    running = [Path("folds", name) for name in ("fold0", "fold1")[: devices.count("cpu")]]
    wait_until(lambda: all((one / "metrics.jsonl").exists() for one in running), process)
    family = family_of(process.pid)
    assert len(children_of(process.pid)) == len(running)
    for one in (process.pid, *family):  # as systemd does; the command passes the signal on, too
        os.kill(one, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    stopped = [line for line in errors.splitlines() if "Stopped" in line]
    assert stopped == ["Stopped by SIGINT; continue with --resume"]
    assert "Traceback" not in errors
    assert_all_end(family, 10)
    assert len(list(Path("folds").glob("fold[01]"))) == len(running)
    epochs = 1 + max(len((one / "metrics.jsonl").read_text().splitlines()) for one in running)
    assert train("--resume", "--epochs", epochs, "--output", "folds", "--quiet")[0] == 0
    folds = summary_of(Path("folds"))["folds"]
    assert {name: one["epochs"] for name, one in folds.items()} == {"0": epochs, "1": epochs}


def test_what_cannot_be_is_one_line_and_leaves_nothing(monkeypatch, capsys):
    command = ("train", *SMALL, "--devices", "cpu", "--folds")
    for options, words in (
        (("3",), "--folds names fold 3, but there are 3, counted from 0"),
        (("0,1,",), "--folds '0,1,' names no folds; give numbers such as 0,2, or all"),
        (("all", "--fold", 1), "--fold and a run over several folds exclude each other"),
        (("all", "--devices", "cpu,cpu,99"), "99"),
    ):
        assert words in refusal(capsys, *command, *options)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(os, "_exit", sys.exit)
    line = refusal(capsys, *command, "all")
    assert "--folds starts the processes of each fold itself" in line
    assert not list(Path().glob("runs/*"))


def test_folds_are_found_without_their_record(capsys):
    for fold in (0, 2):
        Path(f"folds/fold{fold}").mkdir(parents=True)
    for content in (None, "{", "[]", '{"folds": []}', '{"folds": [-1]}', '{"folds": ["0"]}'):
        if content is not None:
            Path("folds/folds.json").write_text(content)
        assert recorded_folds(Path("folds")) == (0, 2)
    line = refusal(capsys, "train", *SMALL, "--folds", "0,1", "--output", "folds")
    assert "folds holds a run over folds already; continue it with --resume" in line
    assert recorded_folds(Path("folds/fold0")) is None


def test_folds_that_fail_are_named_and_there_is_no_summary(monkeypatch, capsys):
    asked = {}

    def fail(commands, slots, *, goes_on_after, **more):
        Path("folds/fold0").mkdir(exist_ok=True)
        Path("folds/fold0/checkpoint-latest.pt").touch()
        asked.update({name: goes_on_after(name) for name in commands})
        return {"fold0": 1, "fold1": -signal.SIGKILL}

    monkeypatch.setattr(folds, "run_commands", fail)
    options = ("--folds", "all", "--output", "folds", "--quiet", "--devices", "cpu")
    assert refusal(capsys, "train", *SMALL, *options) == (
        "Error: 2 of 3 folds did not finish: fold0 failed, fold1 was killed by SIGKILL, "
        "so fold2 did not begin; their errors are above. Fix them, or remove the folder of a fold "
        "to start it over, and add --resume --output folds"
    )
    assert asked == {"fold0": True, "fold1": False, "fold2": False}
    assert not Path("folds/summary.json").exists()
