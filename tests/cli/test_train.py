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
from tests.command_line import CONFIGS, SMALL, refusal, run, wait_until
from tests.images.samples import write_msd
from tests.process_trees import assert_all_end, family_of
from tests.ranks import rank_variables
from tests.trainings import (
    assert_same_weights,
    bare,
    contents,
    run_bare,
    weights,
)
from unet3d.atomic import append, write_atomically
from unet3d.config import load_config
from unet3d.training import job

TRAINING = ("train", "data", *SMALL, "--output", "run")


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """Skip drawing and predicting memory, which are tested elsewhere."""
    with bare():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one epoch, in a folder beside its data."""
    top = tmp_path_factory.mktemp("finished")
    assert run("train", write_msd(top / "data"), *SMALL, "--output", top / "run", "--quiet") == 0
    return top / "run"


@pytest.fixture
def own_run(finished):
    """A copy of the finished run in the current folder."""
    return shutil.copytree(finished, Path("run"))


@pytest.fixture
def data(folder):
    """A data set in the current folder."""
    return write_msd(folder / "data")


# Settings


def test_settings_that_cannot_be_are_explained(capsys):
    Path("bad.yaml").write_text("training:\n  epohcs: 3\n  batch_size: many\n")
    line = refusal(capsys, "train", "--config", "bad.yaml")
    assert "bad.yaml: " in line
    assert "epohcs" in line and "batch_size" in line  # all faults at once
    assert not Path("runs").exists()


def test_options_override_the_file_and_change_their_settings(own_run, data, monkeypatch):
    asked = []
    monkeypatch.setattr(job, "start_training", lambda request, *_: asked.append(request))
    options = (
        "--parallel model --devices cpu,cpu,cpu,cpu --batch-size 6 --micro-batches 3 --replicas 2 "
        "--max-restarts 4 --epochs 7 --fold 1 --seed 5 --output new --set parallel.cuts=time "
        "--set memory.offload=skips --set training.learning_rate=0.5 "
        "--set training.learning_rate=0.25"
    )
    file = ("--config", CONFIGS / "hippocampus-cpu.yaml")
    assert run("train", data, *options.split(), "--init", own_run, *file) == 0
    (request,) = asked
    assert request.output == Path("new")
    config = load_config(request.config_path, request.changes)
    parallel, training = config.parallel, config.training
    assert (parallel.mode, parallel.devices) == ("model", ("cpu",) * 4)
    assert (parallel.cuts, parallel.replicas, parallel.max_restarts) == ("time", 2, 4)
    assert (training.batch_size, training.micro_batches, training.epochs) == (6, 3, 7)
    assert (training.seed, config.data.fold, config.memory.offload) == (5, 1, "skips")
    assert config.data.dataset == data.absolute()
    assert training.init == (own_run / "checkpoint-latest.pt").absolute()
    assert training.optimizer == "adamw"  # from the file
    assert training.learning_rate == 0.25  # from the last --set


@pytest.mark.usefixtures("data")
@pytest.mark.nightly
def test_the_seed_decides_the_weights(finished):
    for seed in (0, 6):
        assert run(*TRAINING[:-1], f"run {seed}", "--quiet", "--seed", seed) == 0
    assert_same_weights(Path("run 0"), finished)
    name = "encoder.levels.0.0.conv.weight"
    assert not weights(Path("run 6"))[name].equal(weights(finished)[name])


@pytest.mark.usefixtures("own_run")
def test_a_run_begins_with_the_network_of_another_one(capsys, caplog):
    labels = {"0": "background", "1": "near", "2": "far"}
    arguments = ("train", write_msd(Path("second"), labels=labels), *SMALL, "--output", "two")
    assert run(*arguments, "--init", "run") == 0
    heads = "the heads (near, far instead of left, right)"
    assert f"{Path('run/checkpoint-latest.pt').absolute()}; new layers: {heads}" in caplog.text
    line = refusal(capsys, "train", "--resume", "--output", "two", "--init", "run")
    assert "begins a new run, and --resume continues one" in line


# What it says


def test_without_a_terminal_there_is_a_line_for_each_epoch_unless_it_is_quiet():
    write_msd(Path("data"), num_cases=5)
    done = warm.run_call(run_bare, [*TRAINING, "--epochs", "3"])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "\x1b" not in done.stdout + done.stderr  # no colours in a log
    assert done.stdout.splitlines()[-1].endswith("unet3d report run")
    going_on = ["train", "--resume", "--output", "run", "--epochs", "4", "--quiet"]
    quiet = warm.run_call(run_bare, going_on)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert json.loads(Path("run/summary.json").read_text())["epochs"] == 4


def test_the_last_lines_are_the_dice_and_what_to_do_next(own_run, capsys):
    summary = json.loads((own_run / "summary.json").read_text())
    summary["final"] |= {"mean_dice": 0.5, "dice": {"left": 0.5, "right one": None}}
    (own_run / "summary.json").write_text(json.dumps(summary))
    assert run("train", "--resume", "--output", "run") == 0  # the run is finished
    title, _, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "Dice of 1 validation case, as from unet3d predict"
    assert [line.split("  ")[0] for line in lines if line.strip()] == [
        *("left", "right one", "mean"),
        "The run: run",
        "To segment scans: unet3d predict SCAN -c run",
        "To see its curves and pictures: unet3d report run",
    ]


@pytest.mark.parametrize(
    ("rank", "local_rank", "level"), [(0, 0, "INFO"), (1, 1, "ERROR"), (2, 0, "WARNING")]
)
def test_faults_of_data_are_said_once_on_each_machine(rank, local_rank, level, monkeypatch):
    levels, logger = [], logging.getLogger("unet3d")
    monkeypatch.setattr(job, "start_training", lambda *_: levels.append(logger.level))
    monkeypatch.setattr("unet3d.distributed.ranks.silence_torch", lambda: None)
    place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    run("train")
    assert levels == [getattr(logging, level)]


# Where runs are, and how they go on


def test_a_training_on_every_case_has_no_validation(data, capsys, caplog):
    """Its last checkpoint is the default of predict; it can be extended and reported."""
    assert run("train", data, *SMALL, "--fold", "none", "--output", "run") == 0
    said = capsys.readouterr()
    assert "Trained on every case, without validation." in said.out
    assert "data: data, 3 training cases, no validation (fold none)" in caplog.messages
    folder = Path("run")
    cases = {path.name.partition(".")[0] for path in Path("data/labelsTr").iterdir()}
    record = json.loads((folder / "data.json").read_text())
    assert record["training"].keys() == cases
    assert (record["fold"], record["validation"]) == ("none", {})
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("best_dice", "best_epoch", "final"):
        assert summary[key] is None
    assert not (folder / "checkpoint-best.pt").exists() and not (folder / "validation").exists()
    assert run("train", "--resume", "--output", "run", "--epochs", "3", "--quiet") == 0
    assert json.loads((folder / "summary.json").read_text())["epochs"] == 3
    image = min(Path("data/imagesTr").iterdir())
    assert run("predict", image, "--checkpoint", "run", "--output", "seg.nii.gz") == 0
    assert run("report", "run", "--output", "page.html") == 0
    assert "every case of data" in Path("page.html").read_text()
    line = refusal(capsys, "train", "--resume", "--output", "run", "--fold", "0", "--epochs", "4")
    assert "data.fold changed from none to 0" in line or "--fold changed from none to 0" in line


def test_a_run_has_a_folder_of_its_own_which_resume_finds(data, monkeypatch, capsys):
    assert "no run to resume in runs" in refusal(capsys, "train", "--resume")
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    names = ["data-fold0-20260102-030405", "data-fold0-20260102-030405-2"]
    Path("runs", names[0]).mkdir(parents=True)  # another run that began in this second
    assert run("train", "data", *SMALL, "--quiet") == 0
    assert "not fold 9" in refusal(capsys, "train", "data", *SMALL, "--fold", 9)
    line = refusal(capsys, "train", "data", *SMALL, "--output", f"runs/{names[1]}")
    assert "of a run already; continue it with --resume" in line
    assert run("train", "--resume", "--epochs", 2, "--quiet") == 0
    assert json.loads(Path("runs", names[1], "summary.json").read_text())["epochs"] == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == names


def test_the_only_rank_of_torchrun_goes_on_with_its_run_when_it_is_restarted(
    own_run, data, monkeypatch
):
    for name, value in rank_variables(0, 1, port=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(*TRAINING, "--epochs", 2, "--quiet") == 0
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2


def test_resume_takes_the_run_of_the_data_set_that_is_named(finished, data, capsys):
    shutil.copytree(finished, "runs/a")
    other = write_msd(Path("other"), shape=(12, 14, 13))
    before = contents(Path("runs"))
    line = refusal(capsys, "train", other, "--resume", "--epochs", 2)
    assert "no run to resume in runs that was made with " in line and "--output" in line
    line = refusal(capsys, "train", other, "--resume", "--epochs", 2, "--output", "runs/a")
    assert "3 cases with changed contents (case_0, case_1, case_2)" in line
    assert contents(Path("runs")) == before
    again = ("train", data, "--resume", "--epochs", 2, "--output", "runs/a")
    assert run(*again, "--quiet") == 0  # the same data in another folder
    assert json.loads(Path("runs/a/summary.json").read_text())["epochs"] == 2
    capsys.readouterr()
    assert run("train", data, "--resume") == 0  # the run is finished
    shown = capsys.readouterr()
    assert "Dice of 1 validation case" in shown.out and "runs/a" in shown.out


def test_an_output_folder_with_other_files_is_left_alone(data, capsys):
    Path("mine").mkdir()
    for name in ("config.yaml", ".unfinished-draft"):
        Path("mine", name).write_text("precious")
    before = contents(data.parent)
    for output in ("mine", "data/imagesTr", "."):
        line = refusal(capsys, "train", "data", *SMALL, "--output", output)
        assert f"{output} is not empty and is not a run: it holds " in line
    assert contents(data.parent) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "progress.png", "events.out.tfevents"])
@pytest.mark.usefixtures("data")
def test_a_file_of_a_run_that_cannot_be_written_is_named(monkeypatch, capsys, name):
    def full(path, *arguments):
        if path.name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return actual[path.suffix == ".png"](path, *arguments)

    actual = append, write_atomically
    for module in ("unet3d.runs.run_folder.append", "unet3d.training.recording.append"):
        monkeypatch.setattr(module, full)
    monkeypatch.setattr("unet3d.reports.figures.write_atomically", full)
    line = refusal(capsys, *TRAINING)
    place = "tensorboard" if name.startswith("events") else name
    assert line.startswith(f"Error: cannot write to run/{place}: No space left on device; make it")
    # A picture that cannot be written does not lose the training.
    assert Path("run/checkpoint-latest.pt").exists() == (name == "progress.png")


@pytest.mark.parametrize(
    ("number", "num_workers"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 2),
        (signal.SIGKILL, 2),
    ],
)
@pytest.mark.nightly
def test_a_signal_while_data_are_prepared_stops_at_once(folder, number, num_workers):
    """SIGKILL reaches the first process only; others the whole group, as from a terminal."""
    write_msd(folder / "data", num_cases=60, shape=(40, 40, 40), spacing_mm=(1, 1, 1.5))
    changes = (f"data.num_workers={num_workers}", "data.spacing_mm=0.9,0.9,0.9")
    process = warm.start([*TRAINING, *(word for one in changes for word in ("--set", one))])
    prepared = Path(os.environ["XDG_CACHE_HOME"]) / "unet3d" / "prepared"
    wait_until(lambda: any(prepared.glob("[0-9a-f]*")), process)
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
