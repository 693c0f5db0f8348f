"""``unet3d predict`` in a process for each device: the same files, and what ends it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests import warm
from tests.command_line import error_line, process_environment, run
from tests.networks import write_checkpoint
from tests.process_trees import assert_all_end, children_of, family_of
from tests.volumes.samples import noise, write_volume

SPATIAL = ("--parallel", "spatial", "--devices", "cpu,cpu")
DEALT = ("--devices", "cpu,cpu")
"""Of a folder, each rank has scans of its own."""

EXACT = ("training.precision=float64",)


def labels(path: Path) -> np.ndarray:
    return np.asanyarray(nib.load(path).dataobj)


def assert_same(folder: str, other: str, names: str) -> None:
    """Compare the segmentations of scans, which are all that there is."""
    files = [f"{name}_seg.nii.gz" for name in names]
    assert sorted(path.name for path in Path(folder).iterdir()) == files
    for file in files:
        assert len(np.unique(labels(Path(other, file)))) == 3
        np.testing.assert_array_equal(labels(Path(folder, file)), labels(Path(other, file)))


@pytest.fixture
def scans(folder):
    """Three scans, of which the second cannot be read."""
    for seed, name in enumerate("abc"):
        write_volume(folder / f"scans/{name}.nii.gz", noise((13, 16, 12), seed=seed))
    (folder / "scans/b.nii.gz").write_bytes(b"nothing")
    return folder / "scans"


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (("--overlap", "0.4", "--window", "12,16,8", "--tta"), "float32"),
        (("--window", "whole", "--statistics", "--preview", "--no-postprocessing"), "float64"),
    ],
)
def test_ranks_write_the_files_of_one_process(scans, options, precision):
    network = write_checkpoint(
        Path("network.pt"),
        dtype=getattr(torch, precision),
        changes=(f"training.precision={precision}",),
        postprocessing=((1, 2),),
    )
    arguments = ("predict", scans, "--checkpoint", network, *options)
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    spatial = ("--parallel", "spatial", "--devices", "cpu,cpu,cpu")
    done = warm.run([*arguments, *spatial, "-o", "ranks"])
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
    assert skipped.startswith("Skipped: ") and "b.nii.gz" in skipped
    assert error.startswith("Error: 1 of 3 scans could not be segmented: ")
    using, *lines = done.stdout.splitlines()
    assert using == "using network.pt"
    assert [line.split(" -> ")[0][-8:] for line in lines] == ["a.nii.gz", "c.nii.gz"]
    beside = [path for path in Path("alone").iterdir() if path.suffix in (".json", ".png")]
    assert len(beside) == (4 if "--preview" in options else 0)
    for path in beside:
        assert path.read_bytes() == Path("ranks", path.name).read_bytes()
        Path("ranks", path.name).unlink()
    assert_same("ranks", "alone", "ac")


def test_ranks_average_the_networks_that_one_process_does(scans):
    for number, channels in enumerate([(4, 8), (6, 8)]):
        network = Path(f"folds/{number}.pt")
        write_checkpoint(network, dtype=torch.float64, changes=EXACT, channels=channels)
    arguments = ("predict", scans, "--checkpoint", "folds")
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    done = warm.run([*arguments, *SPATIAL, "-o", "ranks"])
    assert done.returncode == 1
    assert done.stdout.startswith("using the mean of 2 networks: folds/0.pt, folds/1.pt\n")
    assert_same("ranks", "alone", "ac")


def test_what_cannot_begin_is_one_line(scan, checkpoint):
    arguments = ("predict", "--checkpoint", checkpoint, *SPATIAL)
    Path("empty").mkdir()
    assert "empty holds no volumes" in error_line(warm.run([*arguments, "empty"]).stderr)
    few = warm.run([*arguments, scan, "--window", "2,8,8", "--devices", "cpu,cpu,cpu"])
    assert few.returncode == 1 and few.stdout == f"using {checkpoint}\n"
    _, error = few.stderr.splitlines()
    assert error.startswith("Error: a volume of 2x8x8 voxels has 2 planes along X, too few for 3")


def test_scans_of_a_folder_are_dealt_to_the_devices(scans):
    """Each rank says what happens to its own: that it is skipped, or what is odd about it."""
    write_volume(scans / "d.nii.gz", noise((14, 16, 15), seed=3))
    sheared = np.eye(4)
    sheared[0, 1] = 0.3
    nib.save(nib.Nifti1Image(noise((9, 12, 10)), sheared), scans / "e.nii.gz")
    (scans / "f.nii.gz").write_bytes(b"nothing")
    network = write_checkpoint(Path("network.pt"), dtype=torch.float64, changes=EXACT)
    arguments = ("predict", scans, "--checkpoint", network, "--overlap", "0.3")
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    Path("dealt").mkdir()
    shutil.copy("alone/c_seg.nii.gz", "dealt")
    done = warm.run([*arguments, *DEALT, "-o", "dealt", "--continue"])
    assert done.returncode == 1
    dealt, computing, *said, error = done.stderr.splitlines()
    assert dealt == "5 scans dealt to 2 devices"
    assert computing == "computing on cpu in float64"
    *skipped, warning = sorted(said, key=lambda line: "miss a right angle" in line)
    assert "scans/e.nii.gz" in warning and "miss a right angle" in warning
    begins = [line.partition(".nii.gz ")[0] for line in sorted(skipped)]
    assert begins == [f"Skipped: {scans}/b", f"Skipped: {scans}/f"]
    assert error.startswith("Error: 2 of 6 scans could not be segmented: ")
    assert "scans/b.nii.gz" in error and "scans/f.nii.gz" in error
    using, *lines = done.stdout.splitlines()
    assert using == f"using {network}"
    names = sorted(line.split(" -> ")[0][-8:] for line in lines)
    assert names == [f"{name}.nii.gz" for name in "acde"]
    assert sum("(kept;" in line for line in lines) == 1
    assert_same("dealt", "alone", "acde")


def test_fewer_scans_than_devices_have_their_windows_dealt(scans):
    network = write_checkpoint(Path("network.pt"), dtype=torch.float64, changes=EXACT)
    arguments = ("predict", scans, "--checkpoint", network)
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    done = warm.run([*arguments, "--devices", "cpu,cpu,cpu,cpu", "-o", "dealt"])
    assert done.returncode == 1
    assert done.stderr.startswith("computing on cpu in float64, windows dealt to 4 replicas\n")
    assert_same("dealt", "alone", "ac")


# How it ends

SHAPE = (24, 22, 20)


def start(checkpoint: Path, how: tuple[str, ...]) -> warm.Warm:
    """Segment many scans, and return when the first is done."""
    first = write_volume(Path("scans/00.nii.gz"), noise(SHAPE))
    for number in range(1, 60):
        shutil.copy(first, f"scans/{number:02}.nii.gz")
    words = ("predict", "scans", "-o", "out", "--checkpoint", checkpoint, *how)
    process = warm.start([*words, "--window", "8,8,8", "--overlap", "0.8"])
    deadline = time.monotonic() + 100
    while not Path("out/00_seg.nii.gz").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def assert_nothing_half() -> None:
    for path in Path("out").iterdir():
        assert path.name.endswith("_seg.nii.gz")
        assert labels(path).shape == SHAPE


by_night = pytest.mark.nightly


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        pytest.param(SPATIAL, 0, id="slabs-0", marks=by_night),
        pytest.param(SPATIAL, 1, id="slabs-1"),
        pytest.param(DEALT, 0, id="scans-0"),
        pytest.param(DEALT, 1, id="scans-1", marks=by_night),
    ],
)
def test_a_killed_rank_ends_the_others_and_is_named(checkpoint, how, rank):
    process = start(checkpoint, how)
    family = family_of(process.pid)
    os.kill(children_of(process.pid)[rank], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    *others, last = errors.splitlines()
    assert last == f"Error: rank {rank} was killed by SIGKILL; give the same command again"
    if rank == 1 or how == DEALT:
        assert others[-1].startswith("Not segmented: scans/")
    if rank == 1:  # what the first has begun, nobody takes away
        assert_nothing_half()
    assert "Traceback" not in errors
    assert_all_end(family, 10)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        pytest.param(SPATIAL, signal.SIGINT, id="slabs-SIGINT"),
        pytest.param(SPATIAL, signal.SIGTERM, id="slabs-SIGTERM", marks=by_night),
        pytest.param(DEALT, signal.SIGINT, id="scans-SIGINT", marks=by_night),
        pytest.param(DEALT, signal.SIGTERM, id="scans-SIGTERM"),
    ],
)
def test_a_signal_ends_all_ranks_and_says_what_is_left(checkpoint, how, number):
    process = start(checkpoint, how)
    family = family_of(process.pid)
    # A terminal sends Ctrl-C to all of a group.
    for one in (process.pid, *(family if number == signal.SIGINT else [])):
        os.kill(one, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    *_, left, stopped = errors.splitlines()
    assert errors.count("Not segmented: ") == 1
    assert left.startswith("Not segmented: scans/")
    assert left.endswith("; to go on, give the same command again")
    assert stopped == f"Stopped by {number.name}"
    assert_nothing_half()
    assert_all_end(family, 10)


def test_killing_the_command_leaves_no_rank(checkpoint):
    process = start(checkpoint, SPATIAL)
    family = family_of(process.pid)
    assert len(children_of(process.pid)) == 2
    process.kill()
    assert_all_end(family, 10)


@pytest.mark.nightly
def test_torchrun_starts_the_ranks_as_well(scans, checkpoint):
    arguments = ("predict", "scans", "--checkpoint", str(checkpoint), "-o")
    assert run(*arguments, "alone", "--devices", "cpu") == 1

    def torchrun(*more):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "unet3d", *arguments, "ranks", *more),
        ]
        return subprocess.run(
            command, capture_output=True, text=True, env=process_environment(), timeout=120
        )

    refused = torchrun("--parallel", "none")
    assert "Error: 2 ranks were started, but --parallel none predicts in one" in refused.stderr
    for more in ((), ("--parallel", "data", "--overwrite")):
        done = torchrun(*more)
        errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert errors == ["Error: 1 of 3 scans could not be segmented: scans/b.nii.gz"]
        assert done.stdout.count(" -> ") == 2
        for name in ("a_seg.nii.gz", "c_seg.nii.gz"):
            same = labels(Path("alone", name)) == labels(Path("ranks", name))
            assert same.mean() > 0.99  # bfloat16
    assert_same("ranks", "alone", "ac")
