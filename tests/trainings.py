"""Short trainings on phantoms, in this process or in new ones, and checks of their files."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from rich.console import Console
from torch._subclasses import FakeTensor

from tests import warm
from unet3d.config import load_config
from unet3d.distributed.commands import import_variables
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.images.labels import read_label
from unet3d.model.optimizer import Optimization
from unet3d.parallel import ParallelDims
from unet3d.reports import figures
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training import final_validation, recording
from unet3d.training.initialising import network_to_begin_with
from unet3d.training.job import train_run
from unet3d.training.plan import Plan, Run

SMALL = (
    "data.phantom_shape=24,24,24",
    "data.num_folds=20",  # one of 20 cases is for validation
    "data.num_workers=0",
    "patches.size=16,16,16",
    "training.batch_size=2",  # planning it takes half a second
    "training.steps_per_epoch=4",
    "patches.augmentation=nnunet",  # also on CPUs, whose default is less
    "model.base_channels=4",
    "model.num_levels=2",
    "training.epochs=3",
    "training.validate_every=2",
    "training.learning_rate=0.05",
)


def settings(cache, *overrides):
    """Return the settings of a small training; the cache keeps its phantoms."""
    return load_config(None, [*SMALL, f"data.cache={cache}", *overrides])


def run(config, folder, resume=False, is_bare=True, console=None):
    """Train in this process, by default as :func:`bare` does."""
    own = RunFolder(folder)
    config, architecture = network_to_begin_with(config, own if resume else None)
    dims = ParallelDims.resolve(config.parallel)
    plan = Plan(config=config, dims=dims, architecture=architecture).placed()
    wanted = Run(plan=plan, folder=own, resume=resume)
    with bare() if is_bare else nullcontext():
        return train_run(wanted, Group(Ranks()), console or Console(quiet=True), console is None)


@contextmanager
def without_pictures():
    """Leave picture files empty, because drawing takes half the time of a small training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save_figure", lambda *_, **__: None)
        patch.setattr(final_validation, "preview_figure", lambda _: None)
        for name in ("memory_figure", "progress_figure"):
            patch.setattr(recording, name, lambda *_: None)
        yield


@contextmanager
def bare():
    """Train without drawing and without predicting memory, which take longest."""
    with without_pictures(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelDims, "predicts_memory", False)
        yield


@contextmanager
def before_steps(work):
    """Call work(0), work(1), ... before the optimizer's steps in a training."""
    step, numbers = Optimization.step, itertools.count()

    def watched(self, learning_rate):
        if is_real(self):
            work(next(numbers))
        step(self, learning_rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimization, "step", watched)
        yield


def is_real(optimization):
    """Return whether a network has real tensors; steps on fake ones only predict memory."""
    return not isinstance(next(optimization.module.parameters()).data, FakeTensor)


class PowerCut(Exception):
    """Ends a training at once: nothing more is written."""


def run_until_power_cut(config, folder, num_steps):
    """Train in this process until a simulated power cut after ``num_steps`` steps."""

    def cut(number):
        if number == num_steps:
            raise PowerCut

    with before_steps(cut), pytest.raises(PowerCut):
        run(config, folder)


def weights(folder):
    """Return the weights that a run saved last."""
    return load_checkpoint(folder / "checkpoint-latest.pt").model


def assert_same_weights(a, b):
    expected = weights(b)
    for name, value in weights(a).items():
        assert torch.equal(value, expected[name]), name


def assert_same_validation(a, b):
    """Check that the final networks of two runs predict the same for the same cases."""
    ours, expected = (
        {path.name: read_label(path).array for path in (run / "validation").rglob("*.nii.gz")}
        for run in (a, b)
    )
    assert ours.keys() == expected.keys() and ours
    for name, array in expected.items():
        assert array.any() and np.array_equal(ours[name], array), name
    records = [json.loads((run / "validation/cases.json").read_text()) for run in (a, b)]
    assert records[0] == records[1]


def contents(folder):
    """Return the content of every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(folder):
    """Return the epochs that a run has finished, and the mean loss of each."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["epoch"], line["loss"]) for line in map(json.loads, lines)]


def words(folder, cache, *overrides):
    """Return arguments of ``unet3d`` that train a small network in a folder."""
    changes = (*SMALL, f"data.cache={cache}", *overrides)
    return ["train", "--output", str(folder), *(w for one in changes for w in ("--set", one))]


def without_drawing(arguments):
    """Run ``unet3d ARGUMENTS`` in a warm process, and leave picture files empty."""
    with without_pictures():
        warm.run_command(arguments)


def run_bare(arguments):
    """Run ``unet3d ARGUMENTS`` in a warm process, as :func:`bare` does."""
    with bare():
        warm.run_command(arguments)


def start_warm(folder, cache, *overrides):
    """Like :func:`start`, in a forked process that does nothing else; see :func:`bare`."""
    resume = ["--resume"] if (folder / "checkpoint-latest.pt").exists() else []
    changes = ("training.save_every_seconds=0", *overrides)
    return warm.call(run_bare, [*words(folder, cache, *changes), *resume])


def start(folder, cache, *overrides):
    """Start a training in a new process, or continue the one in the folder."""
    command = [
        *(sys.executable, "-m", "unet3d"),
        *words(folder, cache, "training.save_every_seconds=0", *overrides),
    ]
    if (folder / "checkpoint-latest.pt").exists():
        command.append("--resume")
    environment = {**os.environ, **import_variables(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
