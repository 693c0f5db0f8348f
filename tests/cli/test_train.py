"""``unet3d train`` as a user meets it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.command_line import (
    CONFIGS,
    SMALL,
    in_a_process,
    process_environment,
    refusal,
    run,
    settings_of,
)
from tests.process_trees import assert_all_end, family_of
from tests.volumes.samples import write_json, write_msd
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.epoch=3", "unknown setting training.epoch, did you mean training.epochs?"),
        ("epochs=3", "did you mean training.epochs?"),
        ("trainin.epochs=3", "did you mean training?"),
        ("training.epochs=0", "training.epochs is 0; give a whole number above 0"),
        ("training.epochs", "write section.key=value"),
        ("training=3", "training is 3"),
        ("model.norm=[", "not valid YAML"),
    ],
)
def test_a_setting_that_cannot_be_is_explained(
    setting: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, "train", "--set", setting)
    assert not Path("runs").exists()


def test_a_configuration_that_cannot_be_read_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent.yaml: No such file" in refusal(capsys, "train", "--config", "absent.yaml")
    (folder / "bad.yaml").write_text("training:\n  epohcs: 3\n  batch_size: many\n")
    line = refusal(capsys, "train", "--config", "bad.yaml")
    assert "bad.yaml: " in line
    assert "epohcs" in line and "batch_size" in line  # every fault at once


@pytest.mark.trains
def test_files_and_options_override_the_defaults_in_turn(folder: Path) -> None:
    write_msd(folder / "data set", num_cases=5)
    status = run(
        *("train", "data set", "--config", CONFIGS / "hippocampus-cpu.yaml", *SMALL, "--quiet"),
        *("--set", "training.learning_rate=0.5", "--set", "training.learning_rate=0.25"),
        *("--fold", 3, "--seed", 11, "--output", "run"),
    )
    assert status == 0
    settings = settings_of(folder / "run")
    assert settings["training"]["optimizer"] == "adamw"  # of the file
    assert settings["training"]["epochs"] == 1  # of an option
    assert settings["training"]["learning_rate"] == 0.25  # of the last --set
    assert settings["training"]["momentum"] == 0.99  # a default
    assert settings["data"]["fold"] == 3
    assert settings["training"]["seed"] == 11
    assert settings["data"]["dataset"] == str(folder / "data set")


@pytest.mark.trains
def test_train_on_the_folds_of_a_datalist(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_msd(folder / "data")
    tree = json.loads((root / "dataset.json").read_text())
    cases = [{**case, "fold": min(number, 1)} for number, case in enumerate(tree["training"])]
    write_json(root / "datalist.json", {"training": cases})
    arguments = ("train", root / "datalist.json", *SMALL)
    line = refusal(capsys, *arguments, "--fold", 2, "--output", "run")
    assert "has folds 0 to 1, not fold 2" in line
    assert run(*arguments, "--fold", 1, "--output", "run", "--quiet") == 0
    # One case trains, and the others validate: one patch of one case is one step.
    (metrics,) = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert metrics["step"] == 1
    assert settings_of(Path("run"))["data"]["fold"] == 1
    assert load_checkpoint(Path("run/checkpoint-latest.pt")).preprocessing.label_values == (0, 1, 2)


@pytest.mark.trains
def test_the_seed_decides_the_weights(folder: Path) -> None:
    write_msd(folder / "data")
    weights = []
    for number, seed in enumerate((5, 5, 6)):
        options = ("--quiet", "--seed", seed, "--output", f"run {number}")
        assert run("train", "data", *SMALL, *options) == 0
        model = load_checkpoint(Path(f"run {number}/checkpoint-latest.pt")).model
        weights.append(torch.cat([value.flatten() for value in model.values()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.trains
def test_quiet_prints_nothing(folder: Path) -> None:
    write_msd(folder / "data set", num_cases=5)
    done = in_a_process("train", "data set", *SMALL, "--quiet", "--output", "my run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert Path("my run/summary.json").is_file()


@pytest.mark.trains
def test_without_a_terminal_there_is_a_line_for_each_epoch(folder: Path) -> None:
    write_msd(folder / "data")
    done = in_a_process("train", "data", *SMALL, "--epochs", 3, "--output", "run")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "\x1b" not in done.stdout + done.stderr  # no colours in a log
    assert done.stdout.splitlines()[-1].endswith("Checkpoints, metrics and pictures: run")


@pytest.mark.trains
def test_resume_continues_the_newest_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run to resume in runs" in refusal(capsys, "train", "--resume")
    assert "no run to resume in x" in refusal(capsys, "train", "--resume", "--output", "x")
    write_msd(folder / "data")
    assert run("train", "data", *SMALL, "--quiet") == 0
    (run_folder,) = Path("runs").iterdir()
    line = refusal(capsys, "train", "data", *SMALL, "--output", run_folder)
    assert "holds a run already; continue it with --resume" in line
    assert run("train", "--resume", "--epochs", 2, "--quiet") == 0
    assert json.loads((run_folder / "summary.json").read_text())["epochs"] == 2
    assert list(Path("runs").iterdir()) == [run_folder]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can fill")
def test_an_output_folder_that_takes_no_files_is_refused_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_msd(folder / "data")
    line = refusal(capsys, "train", "data", *SMALL, "--output", "/proc/self")
    assert "cannot write to /proc/self: " in line
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()  # before the data are prepared


@pytest.mark.trains
def test_a_disk_that_fills_up_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: RunFolder, line: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.metrics))

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    write_msd(folder / "data")
    arguments = ("train", "data", *SMALL, "--output", "run")
    line = refusal(capsys, *arguments)
    assert line == "Error: run/metrics.jsonl: No space left on device; --debug shows where"
    with pytest.raises(OSError, match="No space left"):
        run("--debug", *arguments)


@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "num_workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 0), (signal.SIGKILL, 2)]
)
def test_a_signal_while_data_are_prepared_stops_at_once(
    folder: Path, number: signal.Signals, num_workers: int
) -> None:
    """As from a terminal or a launcher, which tell the whole group of processes; or a kill -9."""
    write_msd(folder / "data", num_cases=40, shape=(56, 56, 56), spacing_mm=(1, 1, 1.5))
    command = [sys.executable, "-m", "unet3d", "train", "data", *SMALL]
    command += ["--set", f"data.num_workers={num_workers}", "--set", "data.spacing_mm=0.9,0.9,0.9"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=process_environment(),
        start_new_session=True,
    )
    prepared = Path(os.environ["XDG_CACHE_HOME"]) / "unet3d" / "prepared"
    while not any(prepared.glob("[0-9a-f]*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    family = family_of(process.pid)
    assert len(family) >= num_workers
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert_all_end(family, 5)
    assert "Traceback" not in errors
    assert len(list(prepared.glob("[0-9a-f]*"))) < 20
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + number, errors
    assert errors.splitlines()[-1] == f"Stopped by {number.name}"
    assert not list(prepared.glob(".unfinished-*"))
