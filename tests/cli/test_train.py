"""``unet3d train`` as a user meets it."""

import errno
import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import warm
from tests.command_line import CONFIGS, SMALL, refusal, run, settings_of
from tests.process_trees import assert_all_end, family_of
from tests.trainings import (
    assert_same_weights,
    contents,
    weights,
    without_drawing,
    without_pictures,
)
from tests.volumes.samples import write_json, write_msd
from unet3d.atomic import append, write_atomically
from unet3d.config import load_config
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training import start
from unet3d.training.loop import TrainingResult
from unet3d.training.state import TrainingState

TRAINING = ("train", "data", *SMALL, "--output", "run")


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """Save the time of drawing, which is tested elsewhere."""
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one epoch, in a folder beside its data."""
    top = tmp_path_factory.mktemp("finished")
    assert run("train", write_msd(top / "data"), *SMALL, "--output", top / "run", "--quiet") == 0
    return top / "run"


@pytest.fixture
def own_run(finished):
    """A copy of it in the current folder."""
    return shutil.copytree(finished, Path("run"))


@pytest.fixture
def data(folder):
    """A data set in the current folder."""
    return write_msd(folder / "data")


# Settings


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
def test_a_setting_that_cannot_be_is_explained(setting, words, capsys):
    assert words in refusal(capsys, "train", "--set", setting)
    assert not Path("runs").exists()


def test_a_configuration_that_cannot_be_read_is_named(capsys):
    assert "absent.yaml: No such file" in refusal(capsys, "train", "--config", "absent.yaml")
    Path("bad.yaml").write_text("training:\n  epohcs: 3\n  batch_size: many\n")
    line = refusal(capsys, "train", "--config", "bad.yaml")
    assert "bad.yaml: " in line
    assert "epohcs" in line and "batch_size" in line  # every fault at once


def test_files_and_options_override_the_defaults_in_turn(folder):
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


def test_every_option_changes_its_setting(own_run, data, monkeypatch):
    asked: list[start.RunRequest] = []
    monkeypatch.setattr(start, "start_training", lambda request, *_: asked.append(request))
    status = run(
        *("train", data, "--parallel", "model", "--devices", "cpu,cpu,cpu,cpu"),
        *("--batch-size", 6, "--micro-batches", 3, "--balance", "memory", "--replicas", 2),
        *("--offload", "skips", "--max-restarts", 4, "--epochs", 7, "--fold", 1, "--seed", 5),
        *("--init", own_run, "--output", "new"),
    )
    assert status == 0
    (request,) = asked
    assert request.output == Path("new")
    config = load_config(None, request.changes)
    parallel, training = config.parallel, config.training
    assert (parallel.mode, parallel.devices) == ("model", ("cpu",) * 4)
    assert (parallel.balance, parallel.replicas, parallel.max_restarts) == ("memory", 2, 4)
    assert (training.batch_size, training.micro_batches, training.epochs) == (6, 3, 7)
    assert (training.seed, config.data.fold, config.memory.offload) == (5, 1, "skips")
    assert config.data.dataset == data.absolute()
    assert training.init == (own_run / "checkpoint-latest.pt").absolute()


def test_train_on_the_folds_of_a_datalist(data, capsys):
    tree = json.loads((data / "dataset.json").read_text())
    cases = [{**case, "fold": min(number, 1)} for number, case in enumerate(tree["training"])]
    write_json(data / "datalist.json", {"training": cases})
    arguments = ("train", data / "datalist.json", *SMALL, "--output", "run")
    assert "has folds 0 to 1, not fold 2" in refusal(capsys, *arguments, "--fold", 2)
    assert run(*arguments, "--fold", 1, "--quiet") == 0
    # One case trains, and the others validate: one patch of one case is one step.
    (metrics,) = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert metrics["step"] == 2
    assert settings_of(Path("run"))["data"]["fold"] == 1
    assert load_checkpoint(Path("run/checkpoint-latest.pt")).preprocessing.label_values == (0, 1, 2)


@pytest.mark.usefixtures("data")
def test_the_seed_decides_the_weights(finished):
    for seed in (0, 6):
        assert run(*TRAINING[:-1], f"run {seed}", "--quiet", "--seed", seed) == 0
    assert_same_weights(Path("run 0"), finished)
    name = "encoder.levels.0.0.conv.weight"
    assert not weights(Path("run 6"))[name].equal(weights(finished)[name])


def test_a_run_begins_with_the_network_of_another_one(folder, capsys, caplog):
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
    heads = "the heads (near, far instead of left, right)"
    assert f"begins with the weights of {path}; new: {heads}" in caplog.messages
    settings = settings_of(folder / "two")
    assert settings["training"]["init"] == str(path)
    assert settings["model"]["channels"] == [4, 8] and settings["model"]["strides"] == [[2, 2, 2]]
    assert settings["data"]["spacing_mm"] == [1.0, 1.0, 2.0]  # of the first
    line = refusal(capsys, "train", "--resume", "--output", "two", "--init", "one")
    assert "begins a new run, and --resume continues one" in line


# What it says


def test_without_a_terminal_there_is_a_line_for_each_epoch_unless_it_is_quiet():
    write_msd(Path("data"), num_cases=5)
    done = warm.run_call(without_drawing, [*TRAINING, "--epochs", "3"])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "\x1b" not in done.stdout + done.stderr  # no colours in a log
    assert done.stdout.splitlines()[-1].endswith("Checkpoints, metrics and pictures: run")
    going_on = ["train", "--resume", "--output", "run", "--epochs", "4", "--quiet"]
    quiet = warm.run_call(without_drawing, going_on)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert json.loads(Path("run/summary.json").read_text())["epochs"] == 4


@pytest.mark.parametrize(
    ("last", "best", "pictures", "words"),
    [
        (None, -1.0, (), "Mean Dice none yet. The"),
        (0.8, 0.8, ("worst.png",), "Mean Dice 0.800, of the final network. The"),
        (
            *(0.7, 0.9, ("worst.png", "best.png")),
            "network. That after epoch 3 has 0.900: checkpoint-best.pt. The",
        ),
    ],
)
def test_the_last_line_says_what_has_come_out(last, best, pictures, words, monkeypatch, capsys):
    state = TrainingState(last_dice={"a": last}, best_dice=best, best_epoch=3)
    result = TrainingResult(folder=RunFolder(Path("run")), state=state, final_dice=0.5, memory=None)
    Path("run/validation").mkdir(parents=True)
    for name in pictures:
        Path("run/validation", name).touch()
    monkeypatch.setattr(start, "start_training", lambda *_: result)
    assert run("train") == 0
    (line,) = capsys.readouterr().out.splitlines()
    scored = "The validation cases as predict segments them: mean Dice 0.500, run/validation."
    assert words in line and scored in line
    drawn = " and ".join(f"run/validation/{name}" for name in pictures)
    which = "The worst and the best of them" if len(pictures) > 1 else "One of them"
    assert f"{which}, drawn: {drawn}." in line if pictures else "drawn" not in line
    assert line.endswith(" Checkpoints, metrics and pictures: run")


@pytest.mark.parametrize(
    ("rank", "local_rank", "level"), [(0, 0, "INFO"), (1, 1, "ERROR"), (2, 0, "WARNING")]
)
def test_what_is_wrong_with_the_data_is_said_once_on_each_machine(
    rank, local_rank, level, monkeypatch
):
    levels: list[int] = []

    def start(*_):
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


# Where runs are, and how they go on


def test_a_run_has_a_folder_of_its_own_which_resume_finds(data, monkeypatch, capsys):
    assert "no run to resume in runs" in refusal(capsys, "train", "--resume")
    assert "no run to resume in x" in refusal(capsys, "train", "--resume", "--output", "x")
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    names = ["data-fold0-20260102-030405", "data-fold0-20260102-030405-2"]
    Path("runs", names[0]).mkdir(parents=True)  # of another one that began in this second
    assert run("train", "data", *SMALL, "--quiet") == 0
    refusal(capsys, "train", "data", *SMALL, "--fold", 9)
    refusal(capsys, "train", "data", *SMALL, "--devices", "cuda:77")
    line = refusal(capsys, "train", "data", *SMALL, "--output", f"runs/{names[1]}")
    assert "holds a run already; continue it with --resume" in line
    assert run("train", "--resume", "--epochs", 2, "--quiet") == 0
    assert json.loads(Path("runs", names[1], "summary.json").read_text())["epochs"] == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == names


def test_resume_takes_the_run_of_the_data_set_that_is_named(folder, capsys):
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
    summaries = {name: json.loads((made[name] / "summary.json").read_text()) for name in made}
    assert {name: one["epochs"] for name, one in summaries.items()} == {"a": 2, "b": 1}
    capsys.readouterr()
    assert run("train", "b", "--resume") == 0  # which is finished
    shown = capsys.readouterr()
    assert "Mean Dice" in shown.out and str(made["b"]) in shown.out


def test_a_damaged_configuration_of_a_run_does_not_stop_it(own_run, capsys, caplog):
    config = own_run / "config.yaml"
    config.write_bytes(b"\0" * 100)
    assert run("train", "--resume", "--output", "run", "--quiet", "--epochs", 2) == 0
    assert "run/config.yaml is damaged (" in caplog.text
    assert settings_of(own_run)["model"]["base_channels"] == 4
    config.write_text(config.read_text().replace("epochs: 2", "epochs: many"))
    line = refusal(capsys, "train", "--resume", "--output", "run")
    assert "training.epochs is 'many'" in line  # somebody has changed it


def test_an_output_folder_with_other_files_is_left_alone(data, capsys):
    Path("mine").mkdir()
    for name in ("config.yaml", "summary.json", "metrics.jsonl", ".unfinished-draft"):
        Path("mine", name).write_text("precious")
    before = contents(data.parent)
    for output in ("mine", "data", "data/imagesTr", "."):
        line = refusal(capsys, "train", "data", *SMALL, "--output", output)
        assert f"{output} is not empty and is no run: it holds " in line
    line = refusal(capsys, "train", "data", *SMALL, "--output", "mine/config.yaml")
    assert "cannot write to " in line
    assert contents(data.parent) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can fill")
@pytest.mark.usefixtures("data")
def test_an_output_folder_that_takes_no_files_is_refused_at_once(capsys):
    line = refusal(capsys, "train", "data", *SMALL, "--output", "/proc/self/run")
    assert "cannot write to /proc/self/run: " in line
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()  # before the data are prepared


@pytest.mark.usefixtures("data")
def test_a_disk_that_fills_up_is_one_line(monkeypatch, capsys):
    def full(self, line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.metrics))

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    line = refusal(capsys, *TRAINING)
    assert line == "Error: run/metrics.jsonl: No space left on device; --debug shows where"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "memory.png", "progress.png", "events.out.tfevents"]
)
@pytest.mark.usefixtures("data")
def test_a_file_of_a_run_that_cannot_be_written_is_named(monkeypatch, capsys, name):
    def full(path, *arguments):
        if path.name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return actual[path.suffix == ".png"](path, *arguments)

    actual = append, write_atomically
    for module in ("unet3d.runs.run_folder.append", "unet3d.training.metrics.append"):
        monkeypatch.setattr(module, full)
    monkeypatch.setattr("unet3d.reports.format.write_atomically", full)
    line = refusal(capsys, *TRAINING)
    place = "tensorboard" if name.startswith("events") else name
    assert line.startswith(f"Error: cannot write to run/{place}: No space left on device; make it")
    # What was trained is not lost with a picture of it.
    assert Path("run/checkpoint-latest.pt").exists() == (name == "progress.png")


@pytest.mark.parametrize(
    ("number", "num_workers"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_while_data_are_prepared_stops_at_once(folder, number, num_workers):
    """As from a terminal or a launcher, which tell the whole group of processes; or a kill -9."""
    write_msd(folder / "data", num_cases=60, shape=(40, 40, 40), spacing_mm=(1, 1, 1.5))
    changes = (f"data.num_workers={num_workers}", "data.spacing_mm=0.9,0.9,0.9")
    process = warm.start([*TRAINING, *(word for one in changes for word in ("--set", one))])
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
    assert len(list(prepared.glob("[0-9a-f]*"))) < 60
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number, errors
        assert errors.splitlines()[-1] == f"Stopped by {number.name}"
        assert not list(prepared.glob(".unfinished-*"))
