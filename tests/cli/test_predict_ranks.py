"""``unet3d predict`` in a process for each device: the same files, and what ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.command_line import error_line, in_a_process, process_environment, run
from tests.networks import write_checkpoint
from tests.process_trees import assert_all_end, children_of, family_of
from tests.volumes.samples import noise, write_volume

pytestmark = pytest.mark.nightly

SPATIAL = ("--parallel", "spatial", "--devices", "cpu,cpu")
DEALT = ("--devices", "cpu,cpu")
"""Of a folder, each rank has scans of its own."""

SLOW_WINDOWS = ("--window", "8,8,8", "--overlap", "0.8")
"""So many of them that there is time to end a prediction."""


def labels(path: Path) -> np.ndarray:
    return np.asanyarray(nib.load(path).dataobj)


def assert_same(folder: Path, other: Path, names: str) -> None:
    """Compare the segmentations of scans, which are all that there is."""
    files = [f"{name}_seg.nii.gz" for name in names]
    assert sorted(path.name for path in folder.iterdir()) == files
    for file in files:
        assert len(np.unique(labels(other / file))) == 3
        np.testing.assert_array_equal(labels(folder / file), labels(other / file))


@pytest.fixture
def scans(folder: Path) -> Path:
    """Three scans, of which the second cannot be read."""
    for seed, name in enumerate("abc"):
        write_volume(folder / f"scans/{name}.nii.gz", noise((21, 18, 20), seed=seed))
    (folder / "scans/b.nii.gz").write_bytes(b"nothing")
    return folder / "scans"


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (("--overlap", "0.4", "--window", "12,16,8", "--tta"), "float32"),
        (("--window", "whole", "--statistics", "--preview", "--no-postprocessing"), "float64"),
    ],
)
def test_ranks_write_the_files_of_one_process(
    folder: Path, scans: Path, options: tuple[str, ...], precision: str
) -> None:
    changes = (f"training.precision={precision}",)
    rules = ((1, 2),)
    dtype = getattr(torch, precision)
    write_checkpoint(folder / "network.pt", dtype=dtype, changes=changes, postprocessing=rules)
    arguments = ("predict", scans, "--checkpoint", "network.pt", *options)
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    spatial = ("--parallel", "spatial", "--devices", "cpu,cpu,cpu")
    done = in_a_process(*arguments, *spatial, "-o", "ranks")
    assert done.returncode == 1
    computing, *said, skipped, error = done.stderr.splitlines()
    words = {
        "each window is predicted 4 times, mirrored along Y, Z": "--tta" in options,
        "post-processing: only the largest component is kept of all labels together": (
            "--no-postprocessing" not in options
        ),
    }
    assert said == [line for line, is_said in words.items() if is_said]
    assert computing == f"computing on cpu in {precision}, each window in 3 slabs"
    assert skipped.startswith("Skipped: scans/b.nii.gz ") or "b.nii.gz" in skipped
    assert error.startswith("Error: 1 of 3 scans could not be segmented: ")
    lines = done.stdout.splitlines()
    assert lines[0] == "using network.pt"
    assert [line.split(" -> ")[0][-8:] for line in lines[1:]] == ["a.nii.gz", "c.nii.gz"]
    beside = [path for path in (folder / "alone").iterdir() if path.suffix in (".json", ".png")]
    assert len(beside) == (4 if "--preview" in options else 0)
    for path in beside:
        assert path.read_bytes() == (folder / "ranks" / path.name).read_bytes()
        path.unlink()
        (folder / "ranks" / path.name).unlink()
    assert_same(folder / "ranks", folder / "alone", "ac")


def test_ranks_mirror_only_if_they_are_asked_to(folder: Path, scan: Path) -> None:
    write_checkpoint(folder / "network.pt", changes=("inference.tta=true",))
    arguments = ("predict", scan, "--checkpoint", "network.pt", "--overwrite", *SPATIAL)
    for options, is_mirrored in (((), True), (("--no-tta",), False)):
        done = in_a_process(*arguments, *options)
        assert done.returncode == 0
        assert ("each window is predicted 4 times" in done.stderr) == is_mirrored


def test_ranks_average_the_networks_that_one_process_does(folder: Path, scans: Path) -> None:
    changes = ("training.precision=float64",)
    for number, channels in enumerate([(4, 8), (6, 8)]):
        write_checkpoint(
            folder / f"folds/{number}.pt", dtype=torch.float64, changes=changes, channels=channels
        )
    arguments = ("predict", scans, "--checkpoint", "folds")
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    done = in_a_process(*arguments, *SPATIAL, "-o", "ranks")
    assert done.returncode == 1
    assert done.stdout.startswith("using the mean of 2 networks: folds/0.pt, folds/1.pt\n")
    assert_same(folder / "ranks", folder / "alone", "ac")


def test_what_cannot_begin_is_one_line(folder: Path, scan: Path, checkpoint: Path) -> None:
    arguments = ("predict", "--checkpoint", checkpoint, *SPATIAL)
    (folder / "empty").mkdir()
    assert "empty holds no volumes" in error_line(in_a_process(*arguments, "empty").stderr)
    planes = (*SPATIAL, "--window", "2,8,8", "--devices", "cpu,cpu,cpu,cpu,cpu")
    few = in_a_process("predict", "--checkpoint", checkpoint, *planes, scan)
    assert few.returncode == 1 and few.stdout == f"using {checkpoint}\n"
    _, error = few.stderr.splitlines()
    assert error.startswith("Error: a volume of 2x8x8 voxels has 2 planes along X, too few for 5")


def test_scans_of_a_folder_are_dealt_to_the_devices(folder: Path, scans: Path) -> None:
    for seed, name in enumerate("de"):
        write_volume(scans / f"{name}.nii.gz", noise((14, 16, 15), seed=seed))
    (scans / "f.nii.gz").write_bytes(b"nothing")
    network = folder / "network.pt"
    write_checkpoint(network, dtype=torch.float64, changes=("training.precision=float64",))
    arguments = ("predict", scans, "--checkpoint", network, "--overlap", "0.3")
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    (folder / "dealt").mkdir()
    (folder / "dealt/c_seg.nii.gz").write_bytes((folder / "alone/c_seg.nii.gz").read_bytes())
    done = in_a_process(*arguments, *DEALT, "-o", "dealt", "--continue")
    assert done.returncode == 1
    dealt, computing, *skipped, error = done.stderr.splitlines()
    assert dealt == "5 scans dealt to 2 devices"
    assert computing == "computing on cpu in float64"
    assert [line.partition(".nii.gz ")[0][-8:] for line in sorted(skipped)] == [
        "/scans/b",
        "/scans/f",
    ]
    assert all(line.startswith("Skipped: ") for line in skipped)
    assert error.startswith("Error: 2 of 6 scans could not be segmented: ")
    assert "scans/b.nii.gz" in error and "scans/f.nii.gz" in error
    using, *lines = done.stdout.splitlines()
    assert using == f"using {network}"
    assert sorted(line.split(" -> ")[0][-8:] for line in lines) == [
        f"{name}.nii.gz" for name in "acde"
    ]
    assert sum("(kept;" in line for line in lines) == 1
    assert_same(folder / "dealt", folder / "alone", "acde")


def test_fewer_scans_than_devices_have_their_windows_dealt(folder: Path, scans: Path) -> None:
    network = folder / "network.pt"
    write_checkpoint(network, dtype=torch.float64, changes=("training.precision=float64",))
    arguments = ("predict", scans, "--checkpoint", network)
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    done = in_a_process(*arguments, "--devices", "cpu,cpu,cpu,cpu", "-o", "dealt")
    assert done.returncode == 1
    assert done.stderr.startswith("computing on cpu in float64, windows dealt to 4 replicas\n")
    assert_same(folder / "dealt", folder / "alone", "ac")


def test_a_scan_that_one_rank_warns_of_is_named(folder: Path, checkpoint: Path) -> None:
    """As every rank says what happens to its scans."""
    sheared = np.eye(4)
    sheared[0, 1] = 0.3
    for name in "ab":
        write_volume(folder / f"scans/{name}.nii.gz", noise())
    nib.save(nib.Nifti1Image(noise(), sheared), folder / "scans/b.nii.gz")
    done = in_a_process("predict", "scans", "-o", "out", "--checkpoint", checkpoint, *DEALT)
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "b.nii.gz" in line]
    assert "miss a right angle" in warning


def start(folder: Path, checkpoint: Path, how: tuple[str, ...]) -> subprocess.Popen[str]:
    """Segment many scans, and return when the first is done."""
    for name in "abcdefgh":
        write_volume(folder / f"scans/{name}.nii.gz", noise((40, 36, 33)))
    words = ("predict", "scans", "-o", "out", "--checkpoint", checkpoint, *how, *SLOW_WINDOWS)
    process = subprocess.Popen(
        [sys.executable, "-m", "unet3d", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=process_environment(),
    )
    deadline = time.monotonic() + 100
    while not (folder / "out/a_seg.nii.gz").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def assert_nothing_half(folder: Path) -> None:
    for path in (folder / "out").iterdir():
        assert path.name.endswith("_seg.nii.gz")
        assert labels(path).shape == (40, 36, 33)


@pytest.mark.parametrize("how", [SPATIAL, DEALT], ids=["slabs", "scans"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_is_named(
    folder: Path, checkpoint: Path, rank: int, how: tuple[str, ...]
) -> None:
    process = start(folder, checkpoint, how)
    family = family_of(process.pid)
    killed = children_of(process.pid)[rank]
    began = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 1
    *others, last = errors.splitlines()
    assert last == f"Error: rank {rank} was killed by SIGKILL; give the same command again"
    if rank == 1 or how == DEALT:
        assert others[-1].startswith("Not segmented: scans/")
        assert_nothing_half(folder)
    assert "Traceback" not in errors
    assert_all_end(family, 10)


@pytest.mark.parametrize("how", [SPATIAL, DEALT], ids=["slabs", "scans"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks_and_says_what_is_left(
    folder: Path, checkpoint: Path, number: signal.Signals, how: tuple[str, ...]
) -> None:
    process = start(folder, checkpoint, how)
    family = family_of(process.pid)
    began = time.monotonic()
    if number == signal.SIGINT:  # which a terminal sends to all of a group
        for one in (process.pid, *family):
            os.kill(one, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 128 + number, errors
    *_, left, stopped = errors.splitlines()
    assert errors.count("Not segmented: ") == 1
    assert left.startswith("Not segmented: scans/")
    assert left.endswith("scans/h.nii.gz; to go on, give the same command again")
    assert stopped == f"Stopped by {number.name}"
    assert_nothing_half(folder)
    assert_all_end(family, 10)


def test_killing_the_command_leaves_no_rank(folder: Path, checkpoint: Path) -> None:
    process = start(folder, checkpoint, SPATIAL)
    family = family_of(process.pid)
    assert len(children_of(process.pid)) == 2
    process.kill()
    process.communicate()
    assert_all_end(family, 10)


def test_torchrun_starts_the_ranks_as_well(folder: Path, scans: Path, checkpoint: Path) -> None:
    arguments = ("predict", "scans", "--checkpoint", str(checkpoint), "-o")
    assert run(*arguments, "alone", "--devices", "cpu") == 1

    def torchrun(*more: str) -> subprocess.CompletedProcess[str]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "unet3d", *arguments, "ranks", *more),
        ]
        return subprocess.run(
            command, capture_output=True, text=True, env=process_environment(), timeout=120
        )

    refused = torchrun("--parallel", "none")
    assert "Error: 2 ranks were started, but --parallel none predicts in one" in refused.stderr
    done = torchrun()
    assert "Error: 1 of 3 scans could not be segmented: scans/b.nii.gz" in done.stderr
    assert done.stdout.count(" -> ") == 2
    found = [
        (labels(folder / of / f"{name}_seg.nii.gz")) for name in "ac" for of in ("alone", "ranks")
    ]
    assert (found[0] == found[1]).mean() > 0.99 and (found[2] == found[3]).mean() > 0.99  # bfloat16
    dealt = torchrun("--parallel", "data", "--overwrite")
    errors = [line for line in dealt.stderr.splitlines() if line.startswith("Error: ")]
    assert errors == ["Error: 1 of 3 scans could not be segmented: scans/b.nii.gz"]
    assert dealt.stdout.count(" -> ") == 2
    assert_same(folder / "ranks", folder / "alone", "ac")
