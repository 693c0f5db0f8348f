"""Disks that are full or read-only: one line of error, no half-written file, and space helps."""

import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests import trainings, warm
from tests.faults import small_disk
from tests.faults.amounts import seeds
from tests.faults.whole_files import assert_whole
from tests.images.samples import noise, write_msd, write_volume
from tests.networks import write_checkpoint
from tests.products import by_night

COMMANDS = {
    "train": (*trainings.words(Path("run"), Path("cache"), "training.epochs=2"), "data"),
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
"""About how many KiB each command writes."""


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces(tmp_path_factory):
    """Skip if a process may not mount its own file systems."""
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


def run(words, disk, *, size_kib, read_only=False):
    """Run ``unet3d`` in a disk of this size; return its result and a copy of the disk after it."""
    after = disk.with_name(f"after {disk.name}")
    ended = warm.run_call(small_disk.run, list(words), disk, size_kib, read_only, after)
    shutil.rmtree(disk.with_name("before"))
    return ended, after


def size_in_kib(folder):
    """Return the KiB that a folder takes in a file system with pages of 4 KiB."""
    return sum(4 + (path.lstat().st_size + 4095) // 4096 * 4 for path in folder.rglob("*")) + 8


def assert_all_or_none(out):
    """Check that each scan has all results or none: else the same command would be refused."""
    made = [path for path in out.glob("scan_*") if not path.name.endswith(".nii.gz")]
    of_scan = Counter(path.stem for path in made)
    assert of_scan == {path.name[:-7]: 3 for path in out.glob("*.nii.gz")}


def assert_told(ended, words):
    """Check that a command has ended with one line of error, which has these words."""
    assert ended.returncode == 1
    assert len(re.findall("^Error: ", ended.stderr, re.MULTILINE)) == 1, ended.stderr
    assert re.search(words, ended.stderr)


@pytest.mark.parametrize("seed", seeds(share=0.5))
@pytest.mark.parametrize("command", ["train", "evaluate", *by_night("predict", "plan")])
def test_a_full_disk_is_one_line_and_leaves_nothing_half(command, seed, inputs):
    words = COMMANDS[command]
    free_kib = 4 * random.Random(seed).randint(0, NEEDED_KIB[command] // 4)
    ended, after = run(words, inputs, size_kib=size_in_kib(inputs) + free_kib)
    assert_whole(after)
    assert not list(after.rglob(".unfinished*"))
    assert all(path.stat().st_size for path in after.rglob("*.png"))
    assert_all_or_none(after / "out")
    assert "Traceback" not in ended.stderr, ended.stderr
    if ended.returncode == 0:
        return
    assert_told(ended, "No space left")
    if (after / "run/checkpoint-latest.pt").exists():
        words = (*words, "--resume")
    elif (after / "run/checkpoint-best.pt").exists():  # it is written first; it is never replaced
        words = (*words, "--output", "elsewhere")
    again, _ = run(words, after, size_kib=100_000)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_cannot_be_written_is_one_line(command, inputs):
    ended, after = run(COMMANDS[command], inputs, size_kib=100_000, read_only=True)
    assert_told(ended, "Read-only file system|not a writable")
    assert {path.relative_to(after) for path in after.rglob("*")} == {
        path.relative_to(inputs) for path in inputs.rglob("*")
    }
