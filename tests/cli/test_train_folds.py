"""``unet3d train --folds``: runs as those of single folds, their summary, and how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

import pytest

from tests.command_line import process_environment, refusal, run
from tests.process_trees import assert_all_end, children_of, family_of
from tests.trainings import assert_same_weights, contents
from unet3d.runs.finding import recorded_folds
from unet3d.training import cross_validation

SMALL = (
    *("--set", "data.phantom.num_cases=4", "--set", "data.phantom.shape=16,16,16"),
    *(
        "--set",
        "patches.size=8,8,8",
        "--set",
        "model.base_channels=4",
        "--set",
        "data.num_workers=0",
    ),
    *("--set", "model.num_levels=2", "--set", "training.steps_per_epoch=2"),
    *("--set", "data.num_folds=3", "--set", "training.learning_rate=0.05"),
)


def summary_of(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())


@pytest.mark.nightly
def test_folds_one_after_another_are_runs_of_their_own(
    folder: Path,
    scan: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert run("train", *SMALL, "--folds", "0,2", "--epochs", 1, "--devices", "cpu") == 0
    shown = capfd.readouterr()
    (top,) = (folder / "runs").iterdir()
    assert top.name.startswith("phantom-folds-")
    assert "folds 0, 2, one after another" in caplog.messages
    assert shown.err.count("\nepoch 1/1: ") == 2
    names = ["config.yaml", "fold0", "fold2", "folds.json", "summary.json"]
    assert sorted(path.name for path in top.iterdir()) == names
    # The summary is over the folds.
    each = [summary_of(top / name) for name in ("fold0", "fold2")]
    found = summary_of(top)
    for key in ("last_mean_dice", "best_dice"):
        values = [one[key] for one in each]
        expected = {"mean": mean(values), "standard_deviation": stdev(values), "num_folds": 2}
        assert found[key] == pytest.approx(expected)
    final = [one["final"]["mean_dice"] for one in each]
    assert found["final_mean_dice"]["mean"] == pytest.approx(mean(final))
    for label, spread in found["last_dice"].items():
        known = [one["last_dice"][label] for one in each if one["last_dice"][label] is not None]
        assert spread["mean"] == (pytest.approx(mean(known)) if known else None)
        assert spread["num_folds"] == len(known)
    assert f"{mean(final):.3f}" in shown.out
    # What is finished is left as it is; a fold more is added.
    before = contents(top)
    assert run("train", "--resume") == 0
    assert "Validation Dice of 2 folds" in capfd.readouterr().out
    assert contents(top) == before
    assert run("train", "--resume", "--folds", "1") == 0
    assert recorded_folds(top) == (0, 1, 2)
    after = contents(top)
    kept = [path for path in before if path.parent.name in ("fold0", "fold2")]
    assert kept and all(after[path] == before[path] for path in kept)
    assert list(summary_of(top)["folds"]) == ["0", "1", "2"]
    # Their mean predicts by default.
    capfd.readouterr()
    assert run("predict", scan, "--devices", "cpu") == 0
    assert capfd.readouterr().out.startswith("using the mean of 3 networks: runs/phantom-folds-")


@pytest.mark.nightly
def test_folds_on_several_devices_train_at_the_same_time(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = ("train", *SMALL, "--devices", "cpu,cpu", "--output", "folds")
    assert run(*options, "--folds", "0,1", "--epochs", 1) == 0
    shown = capfd.readouterr().err
    assert "folds 0, 1, one at a time on each of cpu, cpu" in caplog.messages
    for name in ("fold0", "fold1"):
        assert f"\n{name}: epoch 1/1: loss" in shown
        summary = summary_of(folder / "folds" / name)
        assert summary["parallel"] == "none" and len(summary["devices"]) == 1
    alone = ("--fold", 1, "--devices", "cpu", "--output", "alone", "--epochs", 1, "--quiet")
    assert run("train", *SMALL, *alone) == 0
    assert_same_weights(folder / "folds" / "fold1", folder / "alone")
    capfd.readouterr()
    assert run(*options, "--folds", "all") == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert "folds holds a run over folds already; continue it with --resume" in line
    # More epochs for all of them.
    assert run("train", "--resume", "--output", "folds", "--epochs", 2, "--quiet") == 0
    assert [one["epochs"] for one in summary_of(folder / "folds")["folds"].values()] == [2, 2]


@pytest.mark.nightly
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_signal_stops_all_folds_and_they_go_on(folder: Path, devices: str) -> None:
    words = (
        *SMALL,
        "--folds",
        "0,1",
        "--devices",
        devices,
        "--epochs",
        100000,
        "--output",
        "folds",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "unet3d", "train", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=process_environment(),
    )
    running = ("fold0", "fold1") if "," in devices else ("fold0",)
    while not all((folder / "folds" / name / "metrics.jsonl").exists() for name in running):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    family = family_of(process.pid)
    assert len(children_of(process.pid)) == len(running)
    for one in (process.pid, *family):  # as systemd does, and the command passes it on
        os.kill(one, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    stopped = [line for line in errors.splitlines() if "Stopped" in line]
    assert stopped == ["Stopped by SIGINT; continue with --resume"]
    assert "Traceback" not in errors
    assert_all_end(family, 10)
    epochs = max(
        len((folder / "folds" / name / "metrics.jsonl").read_text().splitlines())
        for name in running
    )
    assert run("train", "--resume", "--epochs", epochs + 1, "--output", "folds", "--quiet") == 0
    assert set(summary_of(folder / "folds")["folds"]) == {"0", "1"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--folds", "3"), "--folds names fold 3, but there are 3, counted from 0"),
        (("--folds", "0,1,"), "--folds is 0,1,; give all, or numbers such as 0,1,2"),
        (("--folds", "first"), "--folds is first; give all"),
        (("--folds", "all", "--fold", 1), "--fold is given for a run over several folds"),
        (("--folds", "all", "--resume"), "there is no run to resume in runs"),
        (("--folds", "all", "--devices", "cpu,cpu,99"), "99"),
        (("--folds", "all", "--set", "model.num_levels=8"), "the model has 8 levels"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    folder: Path, options: tuple[object, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("train", *SMALL, "--devices", "cpu", *options)
    assert run(*arguments) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_ranks_of_torchrun_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert "--folds starts the processes of each fold itself" in refusal(
        capsys, "train", "--folds", "all"
    )


def test_folds_that_fail_are_named_and_there_is_no_summary(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {}

    def fail(commands: list, slots: object, *, goes_on_after: object, **more: object) -> dict:
        (folder / "folds/fold0").mkdir()
        (folder / "folds/fold0/checkpoint-latest.pt").touch()
        asked.update({command.name: goes_on_after(command) for command in commands})
        return {"fold0": 1, "fold1": -signal.SIGKILL}

    monkeypatch.setattr(cross_validation, "run_commands", fail)
    line = refusal(
        capsys,
        "train",
        *SMALL,
        "--folds",
        "all",
        "--output",
        "folds",
        "--quiet",
        "--devices",
        "cpu",
    )
    assert line == (
        "Error: 2 of 3 folds did not come to their end: fold0 failed, fold1 was killed by SIGKILL, "
        "so fold2 did not begin; to go on, add --resume --output folds"
    )
    assert asked == {"fold0": True, "fold1": False, "fold2": False}
    assert not (folder / "folds/summary.json").exists()
