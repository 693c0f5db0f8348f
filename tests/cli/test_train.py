"""``unet3d train`` as a user meets it."""

import errno
import json
import logging
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
from tests.trainings import contents
from tests.volumes.samples import write_json, write_msd
from unet3d.atomic import append, write_atomically
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
    assert metrics["step"] == 2
    assert settings_of(Path("run"))["data"]["fold"] == 1
    assert load_checkpoint(Path("run/checkpoint-latest.pt")).preprocessing.label_values == (0, 1, 2)


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


def test_quiet_prints_nothing(folder: Path) -> None:
    write_msd(folder / "data set", num_cases=5)
    done = in_a_process("train", "data set", *SMALL, "--quiet", "--output", "my run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert Path("my run/summary.json").is_file()


def test_without_a_terminal_there_is_a_line_for_each_epoch(folder: Path) -> None:
    write_msd(folder / "data")
    done = in_a_process("train", "data", *SMALL, "--epochs", 3, "--output", "run")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "\x1b" not in done.stdout + done.stderr  # no colours in a log
    assert done.stdout.splitlines()[-1].endswith("Checkpoints, metrics and pictures: run")


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


def test_two_runs_of_one_second_have_two_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    write_msd(folder / "data")
    for _ in range(2):
        assert run("train", "data", *SMALL, "--quiet") == 0
    names = ["data-fold0-20260102-030405", "data-fold0-20260102-030405-2"]
    assert sorted(path.name for path in Path("runs").iterdir()) == names
    refusal(capsys, "train", "data", *SMALL, "--fold", 9)
    refusal(capsys, "train", "data", *SMALL, "--devices", "cuda:77")
    assert sorted(path.name for path in Path("runs").iterdir()) == names


def test_resume_takes_the_run_of_the_data_set_that_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("a", "b")):
        write_msd(folder / name, shape=(12, 14, 10 + number))
        assert run("train", name, *SMALL, "--quiet") == 0
    write_msd(folder / "c", shape=(12, 14, 13))
    (folder / "a").rename(folder / "moved")
    made = {path.name[0]: path for path in Path("runs").iterdir()}
    before = contents(Path("runs"))
    line = refusal(capsys, "train", "c", "--resume", "--epochs", 2)
    assert "no run in runs was made with " in line and "--output" in line
    line = refusal(capsys, "train", "moved", "--resume", "--epochs", 2, "--output", made["b"])
    assert "3 case(s) with other contents (case_0, case_1, case_2)" in line
    assert contents(Path("runs")) == before
    assert run("train", "moved", "--resume", "--epochs", 2, "--quiet") == 0
    epochs = {
        name: json.loads((path / "summary.json").read_text())["epochs"]
        for name, path in made.items()
    }
    assert epochs == {"a": 2, "b": 1}
    assert run("train", "--resume", "--epochs", 3, "--quiet", "--output", made["b"]) == 0
    capsys.readouterr()
    assert run("train", "b", "--resume") == 0
    shown = capsys.readouterr()
    assert "Mean Dice" in shown.out and str(made["b"]) in shown.out


def test_a_damaged_configuration_of_a_run_does_not_stop_it(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_msd(folder / "data")
    assert run("train", "data", *SMALL, "--output", "run", "--quiet") == 0
    Path("run/config.yaml").write_bytes(b"\0" * 100)
    assert run("train", "--resume", "--output", "run", "--quiet", "--epochs", 2) == 0
    assert "run/config.yaml is damaged (" in caplog.text
    assert settings_of(Path("run"))["model"]["base_channels"] == 4
    text = Path("run/config.yaml").read_text().replace("epochs: 2", "epochs: many")
    Path("run/config.yaml").write_text(text)
    line = refusal(capsys, "train", "--resume", "--output", "run")
    assert "training.epochs is 'many'" in line  # somebody has changed it


def test_an_output_folder_with_other_files_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_msd(folder / "data")
    (folder / "mine").mkdir()
    for name in ("config.yaml", "summary.json", "metrics.jsonl", ".unfinished-draft"):
        (folder / "mine" / name).write_text("precious")
    before = contents(folder)
    for output in ("mine", "data", "data/imagesTr", "."):
        line = refusal(capsys, "train", "data", *SMALL, "--output", output)
        assert f"{output} is not empty and is no run: it holds " in line
    assert "cannot write to " in refusal(
        capsys, "train", "data", *SMALL, "--output", "mine/config.yaml"
    )
    assert contents(folder) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can fill")
def test_an_output_folder_that_takes_no_files_is_refused_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_msd(folder / "data")
    line = refusal(capsys, "train", "data", *SMALL, "--output", "/proc/self/run")
    assert "cannot write to /proc/self/run: " in line
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()  # before the data are prepared


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


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "memory.png", "progress.png", "events.out.tfevents"]
)
def test_a_file_of_a_run_that_cannot_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def full(path: Path, *arguments: object) -> None:
        if path.name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return actual[path.suffix == ".png"](path, *arguments)

    actual = append, write_atomically
    for module in ("unet3d.runs.run_folder.append", "unet3d.training.metrics.append"):
        monkeypatch.setattr(module, full)
    monkeypatch.setattr("unet3d.reports.format.write_atomically", full)
    write_msd(folder / "data")
    line = refusal(capsys, "train", "data", *SMALL, "--output", "run")
    place = "tensorboard" if name.startswith("events") else name
    assert line.startswith(f"Error: cannot write to run/{place}: No space left on device; make it")
    # What was trained is not lost with a picture of it.
    assert (folder / "run" / "checkpoint-latest.pt").exists() == (name == "progress.png")


@pytest.mark.nightly
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


@pytest.mark.parametrize(
    ("rank", "local_rank", "level"), [(0, 0, "INFO"), (1, 1, "ERROR"), (2, 0, "WARNING")]
)
def test_what_is_wrong_with_the_data_is_said_once_on_each_machine(
    rank: int, local_rank: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []

    def start(*_: object) -> None:
        levels.append(logging.getLogger("unet3d").level)

    monkeypatch.setattr("unet3d.training.start.start_training", start)
    monkeypatch.setattr("unet3d.distributed.ranks.silence_torch", lambda: None)
    for name, value in (
        *(("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_RANK", local_rank)),
        *(("LOCAL_WORLD_SIZE", 2), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 1)),
    ):
        monkeypatch.setenv(name, str(value))
    run("train", "data set")
    assert levels == [getattr(logging, level)]


def test_a_run_begins_with_the_network_of_another_one(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "unet3d")
    write_msd(folder / "first", spacing_mm=(1, 1, 2))
    labels = {"0": "background", "1": "near", "2": "far"}
    write_msd(folder / "second", modality="CT", labels=labels)
    assert run("train", "first", *SMALL, "--output", "one", "--quiet") == 0
    small = ("--devices", "cpu", "--epochs", 1, "--set", "data.num_workers=0")
    patches = ("--set", "patches.size=8,8,8", "--set", "training.steps_per_epoch=2")
    arguments = ("train", "second", *small, *patches, "--output", "two")
    line = refusal(capsys, *arguments, "--init", "one", "--set", "model.norm=group")
    assert "--init" in line and "model.norm group, but the checkpoint has instance" in line
    assert "second has neither" in refusal(capsys, *arguments, "--init", "second")
    caplog.clear()
    assert run(*arguments, "--init", "one") == 0
    path = folder / "one" / "checkpoint-latest.pt"
    assert (
        f"begins with the weights of {path}; new: the heads (near, far instead of left, right)"
    ) in caplog.messages
    settings = settings_of(folder / "two")
    assert settings["training"]["init"] == str(path)
    assert settings["model"]["channels"] == [4, 8] and settings["model"]["strides"] == [[2, 2, 2]]
    assert settings["data"]["spacing_mm"] == [1.0, 1.0, 2.0]  # of the first
    line = refusal(capsys, "train", "--resume", "--output", "two", "--init", "one")
    assert "begins a new run, and --resume continues one" in line
