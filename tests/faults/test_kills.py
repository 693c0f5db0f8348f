"""Kills at random moments: nothing is lost or left running, and continuing ends the same."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests import warm
from tests.faults.amounts import seeds
from tests.faults.whole_files import assert_whole
from tests.images.samples import noise, write_msd, write_volume
from tests.networks import write_checkpoint
from tests.process_trees import assert_all_end, family_of
from tests.trainings import assert_same_weights, losses, run_bare, words

MAX_KILLS = 2
"""How often one command is killed before it may end."""

RUN = Path("run")


def training(*changes):
    return words(RUN, Path("cache"), "training.save_every_seconds=0", *changes)


def make_nothing(folder):
    """Leave the folder empty: phantoms are made by the training."""


def make_thick_slices(folder):
    write_msd(folder / "data", num_cases=8, shape=(48, 48, 24), spacing_mm=(1, 1, 2.5))


def make_scans(folder):
    # In float64: the windows of a last scan are divided among ranks, which changes rounding.
    precision = ("training.precision=float64",)
    write_checkpoint(
        folder / "network.pt", patch_size=(8, 8, 8), dtype=torch.float64, changes=precision
    )
    for number in range(4):
        write_volume(folder / f"scans/scan_{number}.nii.gz", noise((40, 36, 33), seed=number))


FINE = ("data.spacing_mm=0.8,0.8,0.8", "data.num_workers=2")
DATA = ("parallel.mode=data", "parallel.devices=cpu,cpu", "training.batch_size=3")
SPATIAL = ("parallel.mode=spatial", "parallel.devices=cpu,cpu")
PREDICT = ["predict", "scans", "-o", "out", "--checkpoint", "network.pt", "--devices"]
SHARDS = ["cpu,cpu", "--overlap", "0.6", "--parallel", "spatial"]

WORKS = {
    "train": (make_nothing, training("training.epochs=6")),
    "prepare": (make_thick_slices, [*training("training.epochs=1", *FINE), "data"]),
    "predict": (make_scans, [*PREDICT, "cpu"]),
    "ranks": (make_nothing, training(*DATA)),
    "shards": (make_nothing, training(*SPATIAL)),
    "predicting ranks": (make_scans, [*PREDICT, *SHARDS]),
    "dealt scans": (make_scans, [*PREDICT, "cpu,cpu", "--overlap", "0.6"]),
}
"""For each command: a function that writes its inputs into a folder, and its arguments there."""


def assert_same(folder, other):
    """Check that the results of a training or a prediction in two folders are the same."""
    if (other / RUN).exists():
        assert_same_weights(folder / RUN, other / RUN)
        assert losses(folder / RUN) == losses(other / RUN)
        return
    names = sorted(path.name for path in (other / "out").iterdir())
    assert sorted(path.name for path in (folder / "out").iterdir()) == names
    for name in names:
        one, two = (nib.load(root / "out" / name) for root in (folder, other))
        assert np.array_equal(np.asanyarray(one.dataobj), np.asanyarray(two.dataobj)), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that runs a command once for all tests; it returns folder and seconds."""

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp(name)
        WORKS[name][0](folder)
        begun = time.monotonic()
        assert_succeeds(start(name, folder))
        return folder, time.monotonic() - begun

    return run


def start(name, folder):
    """Start a command in its own session, or continue it."""
    _, arguments = WORKS[name]
    if (folder / RUN / "checkpoint-latest.pt").exists():
        arguments = [*arguments, "--resume"]
    return warm.call(run_bare, arguments, cwd=folder)


def assert_succeeds(process):
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors


def kill(process, choices):
    """Kill the whole session, the first process or one of its children; check that all end."""
    family = family_of(process.pid)
    victim = choices.choice(["session", "first", *(["child"] if family else [])])
    if victim == "session":
        os.killpg(process.pid, signal.SIGKILL)
    elif victim == "first":
        process.send_signal(choices.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]))
    else:
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(choices.choice(family), signal.SIGKILL)
    errors = process.communicate(timeout=60)[1]
    assert "Traceback" not in errors, errors
    assert_all_end(family, within_seconds=20)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.nightly
def test_a_kill_at_any_moment_loses_nothing(seed, tmp_path, undisturbed):
    choices = random.Random(seed)
    name = list(WORKS)[seed % len(WORKS)]
    expected, seconds = undisturbed(name)
    WORKS[name][0](tmp_path)
    for _ in range(choices.randint(1, MAX_KILLS)):
        process = start(name, tmp_path)
        try:
            process.wait(timeout=choices.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            kill(process, choices)
        else:  # it ended before the kill
            assert_succeeds(process)
            break
        assert_whole(tmp_path)
        if (tmp_path / RUN / "summary.json").exists():
            break  # it was killed after writing its last file
    else:
        assert_succeeds(start(name, tmp_path))
    assert_whole(tmp_path)
    assert_same(tmp_path, expected)
