"""Training from Python: the same run as the command's, in a program that stays as it was."""

import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

import unet3d
from tests.command_line import process_environment, run, settings_of
from tests.trainings import (
    SMALL,
    assert_same_validation,
    assert_same_weights,
    losses,
    weights,
    without_pictures,
)
from tests.volumes.samples import write_msd
from unet3d import trainer
from unet3d.errors import CheckpointError, ConfigError, DatasetError, DeviceError, Unet3dError
from unet3d.interruption import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with without_pictures():
        yield tmp_path


def small(cache: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a small training on phantoms."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return {**dict(one.split("=") for one in SMALL), "data.cache": cache, **named}


def train(output: str | None, cache: Path, **options: Any) -> unet3d.TrainedRun:
    settings = small(cache, **options.pop("settings", {}))
    return unet3d.train(output=output, settings=settings, devices="cpu", **options)


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory):
    """The run of the command that the others are compared with."""
    folder = tmp_path_factory.mktemp("command") / "run"
    changes = (*SMALL, f"data.cache={cache}")
    words = [word for change in changes for word in ("--set", change)]
    assert run("train", "--output", folder, "--devices", "cpu", "--quiet", *words) == 0
    return folder


def test_a_run_is_that_of_the_command(folder):
    write_msd(folder / "first")
    write_msd(folder / "data", num_cases=5)
    values: dict[str, Any] = {
        "patches.size": (8, 8, 8),
        "model.base_channels": 4,
        "model.num_levels": 2,
        "training.learning_rate": 0.05,
        "training.optimizer": "adamw",
        "patches.augmentation.enabled": False,
        "data.num_workers": 0,
        "data.cache": folder / "cache",
    }
    tiny = {**values, "training.steps_per_epoch": np.int64(2)}
    start = unet3d.train("first", output="first run", settings=tiny, devices="cpu", epochs=1)
    found = unet3d.train(
        "data",
        output="run",
        preset=["full", "quick"],
        settings={key: tiny[key] for key in tiny if not key.startswith("model")},
        devices=torch.device("cpu"),
        epochs=2,
        fold=3,
        init=start.folder,
    )
    assert (
        run(
            *("train", "data", "--output", "of the command", "--preset", "full"),
            *("--preset", "quick", "--set", "training.steps_per_epoch=2"),
            *("--set", "patches.size=8,8,8", "--set", "training.learning_rate=0.05"),
            *("--set", "training.optimizer=adamw", "--set", "patches.augmentation.enabled=false"),
            *("--set", "data.num_workers=0", "--set", f"data.cache={folder / 'cache'}"),
            *("--devices", "cpu", "--epochs", 2, "--fold", 3, "--init", "first run", "--quiet"),
        )
        == 0
    )
    other = folder / "of the command"
    assert settings_of(found.folder) == settings_of(other)
    assert settings_of(other)["data"]["dataset"] == str(folder / "data")
    assert settings_of(other)["training"]["epochs"] == 2
    assert_same_weights(found.folder, other)
    assert_same_validation(found.folder, other)
    assert not torch.equal(*(next(iter(weights(one).values())) for one in (other, start.folder)))

    assert found.folder == folder / "run"
    assert found.checkpoint == folder / "run/checkpoint-latest.pt"
    cases = json.loads((other / "validation/cases.json").read_text())
    assert found.mean_dice == pytest.approx(cases["mean_dice"])
    assert found.dice == {label["name"]: label["dice"] for label in cases["mean"].values()}
    assert found.dice.keys() == {"left", "right"}
    (case,) = cases["validation"]
    labels = found.load("cpu").segment(folder / f"data/imagesTr/{case}.nii.gz")
    expected = nib.load(other / f"validation/{case}_seg.nii.gz")
    assert np.array_equal(np.asarray(labels.dataobj), np.asarray(expected.dataobj))


@pytest.mark.parametrize("has_log", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_program_stays_as_it_was(folder, has_log, monkeypatch, caplog):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("TERM", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    caplog.set_level(logging.INFO if has_log else logging.WARNING, logger="unet3d")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        before = _state()
        changes: dict[str, Any] = {"training__epochs": 2, "patches__size": "8,8,8"}
        changes["data__phantom__shape"] = "16,16,16"
        found = train("run", folder / "cache", settings=changes)  # a new one, of new phantoms
        assert _state() == before
    finally:
        torch.set_num_threads(num_threads)
    assert terminal.getvalue() == ""
    assert found.folder == folder / "run"
    lines = [record.getMessage() for record in caplog.records]
    epochs = [line.partition(":")[0] for line in lines if line.startswith("epoch ")]
    assert epochs == (["epoch 1/2", "epoch 2/2"] if has_log else [])


def _state() -> dict[str, Any]:
    main = sys.modules["__main__"]
    loggers = [logging.getLogger(name) for name in (None, "unet3d", "unet3d.training")]
    return {
        "handlers": [signal.getsignal(number) for number in SIGNALS],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "random": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "threads": torch.get_num_threads(),
        "loggers": [(one.level, tuple(one.handlers)) for one in loggers],
        "hooks": (sys.excepthook, sys.unraisablehook, tuple(sys.warnoptions)),
        "main": {name: vars(main).get(name) for name in ("__file__", "__name__", "__spec__")},
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


class Raising(logging.Handler):
    """Sends this process a signal when the first epoch is logged."""

    def __init__(self, number: int) -> None:
        super().__init__(logging.INFO)
        self._number = number

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("epoch 1/3"):
            signal.raise_signal(self._number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on(number, cache, undisturbed, caplog):
    caplog.set_level(logging.INFO, logger="unet3d")
    before = [signal.getsignal(one) for one in SIGNALS]
    handler = Raising(number)
    logging.getLogger("unet3d").addHandler(handler)
    try:
        with pytest.raises(BaseException) as stopped:
            train("run", cache)
    finally:
        logging.getLogger("unet3d").removeHandler(handler)
    if number == signal.SIGINT:
        assert stopped.type is KeyboardInterrupt
        assert str(stopped.value) == "stopped; resume=True continues run"
    else:
        assert isinstance(stopped.value, Interrupted) and stopped.value.can_resume
        assert stopped.value.signal_number == number
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert not Path("run/summary.json").exists()
    assert [epoch for epoch, _ in losses(Path("run"))] == [1]

    found = unet3d.train(output="run", resume=True)
    assert_same_weights(found.folder, undisturbed)
    assert_same_validation(found.folder, undisturbed)
    again = unet3d.train(output="run", resume=True)  # nothing is left to do
    assert again == found and found.mean_dice is not None


def test_threads_train_one_after_another(folder, cache, undisturbed, monkeypatch):
    events: list[str] = []
    train_run = trainer.train_run

    def watched(*values, **options):
        events.append("begins")
        result = train_run(*values, **options)
        events.append("ends")
        return result

    monkeypatch.setattr(trainer, "train_run", watched)
    options: list[dict[str, Any]] = [
        {"output": "a"},
        {"output": None, "settings": {"training__epochs": 1}},
    ]
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda own: train(cache=cache, **own), options))
    assert events == ["begins", "ends"] * 2
    assert_same_weights(runs[0].folder, undisturbed)
    # Without a folder, a run is put where the command puts it.
    assert runs[1].folder.parent == folder / "runs"
    assert runs[1].folder.name.startswith("phantom-fold0-")


@pytest.mark.nightly
def test_ranks_are_started_and_heard_but_not_seen(cache, undisturbed, caplog, capfd):
    caplog.set_level(logging.INFO, logger="unet3d")
    settings = small(cache, parallel__mode="data")
    capfd.readouterr()
    found = unet3d.train(output="run", settings=settings, devices=["cpu", "cpu"])
    assert capfd.readouterr() == ("", "")
    for (_, loss), (_, expected) in zip(losses(found.folder), losses(undisturbed), strict=True):
        assert loss == pytest.approx(expected, rel=1e-2)
    assert len(json.loads((found.folder / "memory.json").read_text())["slots"]) == 2
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("epoch 3/3: ") for line in lines) == 1
    assert 0 <= (found.mean_dice or 0) <= 1 and found.dice.keys() == {
        "brain",
        "ventricles",
        "lesion",
    }


@pytest.mark.nightly
def test_a_script_need_not_ask_for_its_name(folder, cache, undisturbed):
    """Processes that prepare cases and cut patches must not run it again."""
    settings = {key: str(value) for key, value in small(folder / "new cache").items()}
    settings["data.num_workers"] = "2"
    (folder / "training_script.py").write_text(
        "import unet3d\n"
        "print('began', flush=True)\n"
        f"found = unet3d.train(output='run', settings={settings}, devices='cpu')\n"
        "print(found.folder.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "training_script.py"],
        capture_output=True,
        text=True,
        env=process_environment(),
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "began\nrun\n"), done.stderr
    assert_same_weights(folder / "run", undisturbed)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"preset": "slow"}, ConfigError, "there is no preset 'slow'; take one of quick, full"),
        ({"settings": {"training.epoch": 3}}, ConfigError, "did you mean training.epochs?"),
        ({"settings": {"model.norm": object()}}, ConfigError, "model.norm is"),
        ({"settings": {"training": {"epochs": -1}}}, ConfigError, "training.epochs is -1"),
        ({"epochs": 0}, ConfigError, "training.epochs is 0"),
        ({"fold": 7}, DatasetError, "has folds 0 to 4, not fold 7"),
        ({"config": "absent.yaml"}, ConfigError, "absent.yaml: No such file"),
        ({"devices": "cuda:97"}, DeviceError, "cuda:97"),
        ({"dataset": "nowhere"}, DatasetError, "there is no data set at "),
        ({"init": "nowhere.pt"}, CheckpointError, "nowhere.pt"),
        ({"resume": True}, ConfigError, "there is no run to resume in runs"),
        ({"output": "taken"}, ConfigError, "is not empty and is no run"),
    ],
)
def test_what_cannot_be_is_refused_in_words(folder, options, kind, words):
    (folder / "taken").mkdir()
    (folder / "taken/file").touch()
    before = _files_of_runs(folder)
    with pytest.raises(kind) as refused:
        unet3d.train(**{"devices": "cpu", **options})
    assert words in str(refused.value)
    assert _files_of_runs(folder) == before


def _files_of_runs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts]


def test_what_only_the_command_does_is_named(folder, monkeypatch):
    (folder / "runs/all").mkdir(parents=True)
    (folder / "runs/all/folds.json").write_text('{"folds": [0, 1]}')
    with pytest.raises(ConfigError, match="several folds; continue it with unet3d train --resume"):
        unet3d.train(output="runs/all", resume=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it with torchrun -m unet3d train"):
        unet3d.train()


def test_a_full_disk_is_explained(monkeypatch):
    def fill(*_, **__):
        raise OSError(28, "No space left on device", "run/metrics.jsonl")

    monkeypatch.setattr(trainer, "train_run", fill)
    with pytest.raises(Unet3dError, match=r"^run/metrics\.jsonl: No space left on device$"):
        unet3d.train(output="run", devices="cpu")


def test_the_interface_is_found():
    assert {"train", "TrainedRun"} <= set(dir(unet3d))
    assert unet3d.train is trainer.train and unet3d.TrainedRun is trainer.TrainedRun
