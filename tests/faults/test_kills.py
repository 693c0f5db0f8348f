"""Kills at random moments: nothing is lost or left running, and going on ends the same."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests import warm
from tests.faults.amounts import chance, seeds
from tests.networks import write_checkpoint
from tests.process_trees import assert_all_end, family_of
from tests.trainings import SMALL, assert_same_weights, losses, without_drawing
from tests.volumes.samples import noise, write_msd, write_volume
from unet3d.runs.checkpoint import load_checkpoint

MAX_KILLS = 2
"""How often one command is killed before it may end."""

RUN = Path("run")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A command whose result is in files."""

    make_inputs: Callable[[Path], object]
    """Writes what the command reads into a folder."""
    words: tuple[str, ...]
    """Arguments of ``unet3d``, run in that folder."""
    assert_same: Callable[[Path, Path], None]
    """Fails where the results in two folders differ."""


def training(*changes: str) -> tuple[str, ...]:
    settings = (*SMALL, "data.cache=cache", "training.save_every_seconds=0", *changes)
    return ("train", "--output", str(RUN), *(word for one in settings for word in ("--set", one)))


def make_nothing(folder: Path) -> None:
    """Leave the folder empty: phantoms are made by the training."""


def make_thick_slices(folder: Path) -> None:
    write_msd(folder / "data", num_cases=8, shape=(48, 48, 24), spacing_mm=(1, 1, 2.5))


def make_scans(folder: Path) -> None:
    # In float64: a last scan has its windows dealt, and rounding depends on how many there are.
    precision = ("training.precision=float64",)
    write_checkpoint(
        folder / "network.pt", patch_size=(8, 8, 8), dtype=torch.float64, changes=precision
    )
    for number in range(4):
        write_volume(folder / f"scans/scan_{number}.nii.gz", noise((40, 36, 33), seed=number))


def assert_same_training(folder: Path, other: Path) -> None:
    assert_same_weights(folder / RUN, other / RUN)
    assert losses(folder / RUN) == losses(other / RUN)


def assert_same_segmentations(folder: Path, other: Path) -> None:
    names = sorted(path.name for path in (other / "out").iterdir())
    assert sorted(path.name for path in (folder / "out").iterdir()) == names
    for name in names:
        one, two = (nib.load(root / "out" / name) for root in (folder, other))
        assert np.array_equal(np.asanyarray(one.dataobj), np.asanyarray(two.dataobj)), name


WORKS = {
    "train": Work(
        make_inputs=make_nothing,
        words=training("training.epochs=6"),
        assert_same=assert_same_training,
    ),
    "prepare": Work(
        make_inputs=make_thick_slices,
        words=(
            *training("training.epochs=1", "data.spacing_mm=0.8,0.8,0.8", "data.num_workers=2"),
            "data",
        ),
        assert_same=assert_same_training,
    ),
    "predict": Work(
        make_inputs=make_scans,
        words=("predict", "scans", "-o", "out", "--checkpoint", "network.pt", "--devices", "cpu"),
        assert_same=assert_same_segmentations,
    ),
    "ranks": Work(
        make_inputs=make_nothing,
        words=training("parallel.mode=data", "parallel.devices=cpu,cpu", "training.batch_size=3"),
        assert_same=assert_same_training,
    ),
    "shards": Work(
        make_inputs=make_nothing,
        words=training("parallel.mode=spatial", "parallel.devices=cpu,cpu"),
        assert_same=assert_same_training,
    ),
    "predicting ranks": Work(
        make_inputs=make_scans,
        words=(
            *("predict", "scans", "-o", "out", "--checkpoint", "network.pt"),
            *("--parallel", "spatial", "--devices", "cpu,cpu", "--overlap", "0.6"),
        ),
        assert_same=assert_same_segmentations,
    ),
    "dealt scans": Work(
        make_inputs=make_scans,
        words=(
            *("predict", "scans", "-o", "out", "--checkpoint", "network.pt"),
            *("--devices", "cpu,cpu", "--overlap", "0.6"),
        ),
        assert_same=assert_same_segmentations,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """What a command does when nothing happens."""

    folder: Path
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Run each command once for all tests that compare with it."""

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp(name)
        WORKS[name].make_inputs(folder)
        begun = time.monotonic()
        process = start(WORKS[name], folder)
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == 0, errors
        return Undisturbed(folder=folder, seconds=time.monotonic() - begun)

    return run


def start(work: Work, folder: Path) -> warm.Warm:
    """Start a command in a session of its own, or go on with what it has begun."""
    words = list(work.words)
    if work.words[0] == "train" and (folder / RUN / "checkpoint-latest.pt").exists():
        words.append("--resume")
    return warm.call(without_drawing, words, cwd=folder)


def kill(process: warm.Warm, choices: random.Random) -> None:
    """Kill the whole session, the first process, or one of its children; see the rest end."""
    family = family_of(process.pid)
    victims = ["session", "first", *(["child"] if family else [])]
    victim = choices.choice(victims)
    if victim == "session":
        os.killpg(process.pid, signal.SIGKILL)
    elif victim == "first":
        process.send_signal(choices.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]))
    else:
        try:
            os.kill(choices.choice(family), signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            pass
    errors = process.communicate(timeout=60)[1]
    assert "Traceback" not in errors, errors
    assert_all_end(family, within_seconds=20)


def assert_whole(folder: Path) -> None:
    """See that every file with a final name is whole."""
    for path in folder.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue  # of a writer that was killed
        if path.suffix == ".pt":
            load_checkpoint(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.name == "metrics.jsonl":
            for line in path.read_text().split("\n")[:-1]:
                json.loads(line)
        elif path.suffix == ".npy":
            np.load(path)
        elif path.name.endswith(".nii.gz"):
            np.asanyarray(nib.load(path).dataobj)


@pytest.mark.parametrize("seed", seeds())
def test_a_kill_at_any_moment_loses_nothing(seed, tmp_path, undisturbed):
    choices = chance(seed)
    name = list(WORKS)[seed % len(WORKS)]
    work, expected = WORKS[name], undisturbed(name)
    work.make_inputs(tmp_path)
    for _ in range(choices.randint(1, MAX_KILLS)):
        process = start(work, tmp_path)
        try:
            process.wait(timeout=choices.uniform(0, expected.seconds))
        except subprocess.TimeoutExpired:
            kill(process, choices)
        else:  # it was faster than the undisturbed one
            errors = process.communicate()[1]
            assert process.returncode == 0, errors
            break
        assert_whole(tmp_path)
        if (tmp_path / RUN / "summary.json").exists():
            break  # it was killed after its last file
    else:
        process = start(work, tmp_path)
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == 0, errors
    assert_whole(tmp_path)
    work.assert_same(tmp_path, expected.folder)
