"""Training from Python: the same run as the command's, without side effects on the program."""

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

import nibabel as nib
import numpy as np
import pytest
import torch

import unet3d
from tests.command_line import process_environment, run, settings_of
from tests.images.samples import write_msd
from tests.trainings import (
    SMALL,
    assert_same_validation,
    assert_same_weights,
    bare,
    before_steps,
    losses,
    weights,
    words,
)
from unet3d import api
from unet3d.errors import CheckpointError, ConfigError, DatasetError, DeviceError, Unet3dError
from unet3d.interruption import SIGNALS, Interrupted
from unet3d.training import cores, job


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder for the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with bare():
        yield tmp_path


def small(cache):
    """Return the settings of a small training on phantoms."""
    return {**dict(one.split("=") for one in SMALL), "data.cache": cache}


def train(output, cache, settings=(), **more):
    settings = {**small(cache), **dict(settings)}
    return unet3d.train(output=output, settings=settings, devices="cpu", **more)


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory):
    """The run of the command with which other runs are compared."""
    folder = tmp_path_factory.mktemp("command") / "run"
    with bare():
        assert run(*words(folder, cache), "--devices", "cpu", "--quiet") == 0
    return folder


def test_a_run_is_that_of_the_command(folder):
    write_msd(folder / "first")
    write_msd(folder / "data", num_cases=5)
    tiny = {
        "training.steps_per_epoch": np.int64(2),
        "patches.size": (8, 8, 8),
        "model.base_channels": 4,
        "model.num_levels": 2,
        "training.learning_rate": 0.05,
        "training.optimizer": "adamw",
        "patches.augmentation": "none",
        "data.num_workers": 0,
        "data.cache": folder / "cache",
    }
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
    status = run(
        *("train", "data", "--output", "of the command", "--preset", "full"),
        *("--preset", "quick", "--set", "training.steps_per_epoch=2"),
        *("--set", "patches.size=8,8,8", "--set", "training.learning_rate=0.05"),
        *("--set", "training.optimizer=adamw", "--set", "patches.augmentation=none"),
        *("--set", "data.num_workers=0", "--set", f"data.cache={folder / 'cache'}"),
        *("--devices", "cpu", "--epochs", 2, "--fold", 3, "--init", "first run", "--quiet"),
    )
    assert status == 0
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


def test_a_program_stays_as_it_was(folder, monkeypatch, caplog):
    for name in ("TERM", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    caplog.set_level(logging.INFO, logger="unet3d")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(64)
    monkeypatch.setattr(cores, "num_cores", lambda: 1)  # two threads would wait for each other
    try:
        before = _state()
        tiny = {"data.phantom_shape": "16,16,16", "patches.size": "8,8,8"}  # other phantoms
        found = train("run", folder / "cache", settings=tiny, epochs=2)
        assert _state() == before
    finally:
        torch.set_num_threads(num_threads)
    assert terminal.getvalue() == ""
    assert found.folder == folder / "run"
    epochs = [line.partition(":")[0] for line in caplog.messages if line.startswith("epoch ")]
    assert epochs == ["epoch 1/2", "epoch 2/2"]


def _state():
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


def test_a_run_that_is_stopped_goes_on(cache, undisturbed, caplog):
    caplog.set_level(logging.INFO, logger="unet3d")
    before = [signal.getsignal(one) for one in SIGNALS]
    with before_steps(lambda step: signal.raise_signal(signal.SIGTERM) if step == 5 else None):
        with pytest.raises(Interrupted) as stopped:
            train("run", cache)
    assert stopped.value.can_resume and stopped.value.signal_number == signal.SIGTERM
    with before_steps(lambda step: signal.raise_signal(signal.SIGINT)):
        with pytest.raises(KeyboardInterrupt, match="^stopped; resume=True continues run$"):
            unet3d.train(output="run", resume=True)
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert not Path("run/summary.json").exists()
    assert [epoch for epoch, _ in losses(Path("run"))] == [1]

    found = unet3d.train(output="run", resume=True)
    assert_same_weights(found.folder, undisturbed)
    assert_same_validation(found.folder, undisturbed)
    again = unet3d.train(output="run", resume=True)  # the run is finished
    assert again == found and found.mean_dice is not None


@pytest.mark.nightly
def test_threads_train_one_after_another(folder, cache, undisturbed, monkeypatch):
    events = []
    train_run = job.train_run

    def watched(*values, **options):
        events.append("begins")
        result = train_run(*values, **options)
        events.append("ends")
        return result

    monkeypatch.setattr(job, "train_run", watched)
    options = [("a", cache), (None, cache, {"training.epochs": 1})]
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda own: train(*own), options))
    assert events == ["begins", "ends"] * 2
    assert_same_weights(runs[0].folder, undisturbed)
    # By default a run is in the same folder as with the command.
    assert runs[1].folder.parent == folder / "runs"
    assert runs[1].folder.name.startswith("phantom-fold0-")


@pytest.mark.nightly
def test_a_script_hears_its_ranks_and_need_not_ask_for_its_name(folder, undisturbed):
    """Processes that train, prepare cases or cut patches must not run the script again."""
    changes = {"data.num_workers": 1, "parallel.mode": "data"}
    settings = {**small(str(folder / "new cache")), **changes}
    (folder / "training_script.py").write_text(
        "import logging, unet3d\n"
        "logging.basicConfig(level='INFO', format='%(message)s')\n"
        "print('began', flush=True)\n"
        f"found = unet3d.train(output='run', settings={settings}, devices=['cpu', 'cpu'])\n"
        "print(found.folder.name, *found.dice)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "training_script.py"],
        capture_output=True,
        text=True,
        env=process_environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "began\nrun brain ventricles lesion\n"
    assert sum(line.startswith("epoch 3/3: ") for line in done.stderr.splitlines()) == 1
    for (_, loss), (_, expected) in zip(losses(Path("run")), losses(undisturbed), strict=True):
        assert loss == pytest.approx(expected, rel=1e-2)
    assert len(json.loads(Path("run/memory.json").read_text())["slots"]) == 2


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"preset": "slow"}, ConfigError, "there is no preset 'slow'; take one of quick, full"),
        ({"settings": {"training.epoch": 3}}, ConfigError, "did you mean training.epochs?"),
        ({"settings": {"model.norm": object()}}, ConfigError, "model.norm is"),
        ({"fold": 7}, DatasetError, "has folds 0 to 4, not fold 7"),
        ({"devices": "cuda:97"}, DeviceError, "cuda:97"),
        ({"init": "nowhere.pt"}, CheckpointError, "nowhere.pt"),
        ({"resume": True}, ConfigError, "there is no run to resume in runs"),
    ],
)
def test_what_cannot_be_is_refused_in_words(folder, options, kind, words):
    (folder / "taken").mkdir()
    (folder / "taken/file").touch()
    with pytest.raises(kind) as refused:
        unet3d.train(**{"devices": "cpu", **options})
    assert words in str(refused.value)
    files = [path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts]
    assert files == [folder / "taken/file"]


def test_what_only_the_command_does_is_named(folder, monkeypatch):
    (folder / "runs/all").mkdir(parents=True)
    (folder / "runs/all/folds.json").write_text('{"folds": [0, 1]}')
    (folder / "runs/all/config.yaml").touch()
    with pytest.raises(ConfigError, match="several folds; continue it with unet3d train --resume"):
        unet3d.train(output="runs/all", resume=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="run torchrun -m unet3d train"):
        unet3d.train()


def test_a_full_disk_is_explained(monkeypatch):
    def fill(*_, **__):
        raise OSError(28, "No space left on device", "run/metrics.jsonl")

    monkeypatch.setattr(job, "train_run", fill)
    with pytest.raises(Unet3dError, match=r"^run/metrics\.jsonl: No space left on device$"):
        unet3d.train(output="run", devices="cpu")


def test_the_interface_is_found():
    assert {"train", "TrainedRun"} <= set(dir(unet3d))
    assert unet3d.train is api.train and unet3d.TrainedRun is api.TrainedRun
