"""Disks that fill up or cannot be written: one line, nothing half-written, and space helps."""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import matplotlib.image
import nibabel as nib
import numpy as np
import pytest

from tests import warm
from tests.faults import small_disk
from tests.faults.amounts import chance, seeds
from tests.networks import write_checkpoint
from tests.trainings import SMALL
from tests.volumes.samples import noise, write_msd, write_volume
from unet3d.runs.checkpoint import load_checkpoint

COMMANDS = {
    "train": (
        "train",
        "data",
        *("--output", "run"),
        *(
            word
            for one in (*SMALL, "data.cache=cache", "training.epochs=2")
            for word in ("--set", one)
        ),
    ),
    "predict": (
        *("predict", "scans", "-o", "out", "--checkpoint", "network.pt"),
        *("--devices", "cpu", "--statistics", "--preview", "--probabilities"),
    ),
    "evaluate": ("evaluate", "data/labelsTr", "data/labelsTr", "--json", "scores.json"),
    "plan": (
        *("plan", "--shape", "16,16,16", "--devices", "cpu", "--json", "plan.json"),
        *("--set", "model.base_channels=4", "--set", "model.num_levels=2"),
    ),
}
NEEDED_KIB = {"train": 900, "predict": 720, "evaluate": 16, "plan": 16}
"""About how much each writes."""


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces(tmp_path_factory):
    """Skip where a process may not mount file systems of its own."""
    trial = warm.run_call(small_disk.mount, tmp_path_factory.mktemp("trial"), "size=4k")
    if trial.returncode:
        pytest.skip(f"a small disk needs user and mount namespaces: {trial.stderr}")


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "disk"
    write_msd(folder / "data", num_cases=5, shape=(24, 24, 24))
    write_checkpoint(folder / "network.pt", patch_size=(16, 16, 16))
    for number in range(3):
        write_volume(folder / f"scans/scan_{number}.nii.gz", noise((20, 19, 18), seed=number))
    return folder


Ended = subprocess.CompletedProcess[str]


def run(
    words: tuple[str, ...], disk: Path, *, size_kib: int, read_only: bool = False
) -> tuple[Ended, Path]:
    """Run ``unet3d`` in a disk of some size; return how it ended, and what the disk then held."""
    after = disk.with_name(f"after {disk.name}")
    ended = warm.run_call(small_disk.run, list(words), disk, size_kib, read_only, after)
    shutil.rmtree(disk.with_name("before"))
    return ended, after


def size_in_kib(folder: Path) -> int:
    """Return what a folder takes of a file system with pages of 4 KiB."""
    return sum(4 + (path.lstat().st_size + 4095) // 4096 * 4 for path in folder.rglob("*")) + 8


def assert_whole(folder: Path) -> None:
    """See that all files are whole, and none is left of what could not be written."""
    for path in folder.rglob("*"):
        assert not path.name.startswith(".unfinished"), path
        if path.suffix == ".pt":
            load_checkpoint(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".npy":
            np.load(path)
        elif path.suffix == ".png":
            matplotlib.image.imread(path)
        elif path.name.endswith(".nii.gz"):
            np.asanyarray(nib.load(path).dataobj)


def assert_all_or_none(out: Path) -> None:
    """See that a scan has all of its results, so that the same command does it again, or none."""
    made = [path for path in out.glob("*_seg.*") if not path.name.endswith(".nii.gz")]
    of_scan = Counter(path.stem for path in made)
    assert of_scan == {path.name[:-7]: 3 for path in out.glob("*.nii.gz")}


@pytest.mark.parametrize("seed", seeds(share=0.5))
@pytest.mark.parametrize(
    "command", ["train", "predict", "evaluate", pytest.param("plan", marks=pytest.mark.nightly)]
)
def test_a_full_disk_is_one_line_and_leaves_nothing_half(command, seed, inputs):
    words = COMMANDS[command]
    free_kib = 4 * chance(seed).randint(0, NEEDED_KIB[command] // 4)
    ended, after = run(words, inputs, size_kib=size_in_kib(inputs) + free_kib)
    assert_whole(after)
    assert_all_or_none(after / "out")
    assert "Traceback" not in ended.stderr, ended.stderr
    if ended.returncode == 0:
        return
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, ended.stderr
    assert "No space left" in ended.stderr
    if (after / "run/checkpoint-latest.pt").exists():
        words = (*words, "--resume")
    elif (after / "run/checkpoint-best.pt").exists():  # written first; it is never replaced
        words = (*words, "--output", "elsewhere")
    again, _ = run(words, after, size_kib=100_000)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_cannot_be_written_is_one_line(command, inputs):
    ended, after = run(COMMANDS[command], inputs, size_kib=100_000, read_only=True)
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, ended.stderr
    assert any(words in ended.stderr for words in ("Read-only file system", "that you can write"))
    assert {path.relative_to(after) for path in after.rglob("*")} == {
        path.relative_to(inputs) for path in inputs.rglob("*")
    }
