"""``unet3d predict`` in a process for each device: the same files, and how it ends."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests import warm
from tests.command_line import (
    error_line,
    in_a_process,
    labels_of,
    names_in,
    process_environment,
    run,
    wait_until,
)
from tests.images.samples import noise, write_volume
from tests.networks import write_checkpoint
from tests.process_trees import assert_all_end, children_of, family_of
from tests.products import by_night

SPATIAL = ("--parallel", "spatial", "--devices", "cpu,cpu")
DEALT = ("--devices", "cpu,cpu")
"""Options by which the scans of a folder are distributed over two ranks."""

EXACT = ("training.precision=float64",)


def assert_same(folder, other, names):
    """Check that a folder has the segmentations of these scans, and no others, as the other has."""
    assert names_in(folder) == [f"{name}.nii.gz" for name in names]
    for file in names_in(folder):
        expected = labels_of(Path(other, file))
        assert len(np.unique(expected)) == 3
        np.testing.assert_array_equal(labels_of(Path(folder, file)), expected)


@pytest.fixture
def scans(folder):
    """Three scans; the second cannot be read."""
    for seed, name in enumerate("abc"):
        write_volume(folder / f"scans/{name}.nii.gz", noise((13, 16, 12), seed=seed))
    (folder / "scans/b.nii.gz").write_bytes(b"nothing")
    return folder / "scans"


@pytest.mark.parametrize(
    ("options", "precision", "num_networks"),
    [
        (("--window", "whole", "--statistics", "--preview", "--no-postprocessing"), "float64", 2),
        *by_night((("--overlap", "0.4", "--window", "12,16,8", "--tta"), "float32", 1)),
    ],
)
def test_ranks_write_the_files_of_one_process(scans, options, precision, num_networks):
    changes = (f"training.precision={precision}",)
    names = [f"networks/{number}.pt" for number in range(num_networks)]
    for number, name in enumerate(names):
        write_checkpoint(
            Path(name),
            **{"dtype": getattr(torch, precision), "changes": changes, "channels": (4 + number, 8)},
            postprocessing=((1, 2),),
        )
    arguments = ("predict", scans, "--checkpoint", "networks", *options)
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    spatial = ("--parallel", "spatial", "--devices", "cpu,cpu,cpu")
    done = warm.run([*arguments, *spatial, "-o", "ranks"])
    assert done.returncode == 1
    computing, *said, skipped, error = done.stderr.splitlines()
    mirrored = "each window is predicted 4 times, mirrored along Y, Z"
    kept = "post-processing: only the largest component is kept of all labels together"
    assert said == ([mirrored, kept] if num_networks == 1 else [])
    assert computing == f"computing on cpu in {precision}, each window in 3 slabs"
    assert skipped.startswith("Skipped: ") and "b.nii.gz" in skipped
    assert error.startswith("Error: 1 of 3 scans could not be segmented: ")
    using, *lines = done.stdout.splitlines()
    mean = "the mean of 2 networks: " if num_networks > 1 else ""
    assert using == f"using {mean}{', '.join(names)}"
    assert [line.split(" -> ")[0][-8:] for line in lines] == ["a.nii.gz", "c.nii.gz"]
    beside = [path for path in Path("alone").iterdir() if path.suffix in (".json", ".png")]
    assert len(beside) == (4 if "--preview" in options else 0)
    for path in beside:
        assert path.read_bytes() == Path("ranks", path.name).read_bytes()
        Path("ranks", path.name).unlink()
    assert_same("ranks", "alone", "ac")


def test_what_cannot_begin_is_one_line(scan, checkpoint):
    arguments = ("predict", "--checkpoint", checkpoint, *SPATIAL)
    Path("empty").mkdir()
    assert "empty holds no volumes" in error_line(warm.run([*arguments, "empty"]).stderr)
    few = warm.run([*arguments, scan, "--window", "2,8,8", "--devices", "cpu,cpu,cpu"])
    assert few.returncode == 1 and few.stdout == f"using {checkpoint}\n"
    *_, error = few.stderr.splitlines()
    assert error.startswith("Error: a volume of 2x8x8 voxels has 2 planes along X, too few for 3")


def test_scans_of_a_folder_are_dealt_to_the_devices(scans):
    """Each rank, which loads PyTorch ahead, reports its own scans: skipped ones, odd headers."""
    write_volume(scans / "d.nii.gz", noise((14, 16, 15), seed=3))
    sheared = np.eye(4)
    sheared[0, 1] = 0.3
    nib.save(nib.Nifti1Image(noise((9, 12, 10)), sheared), scans / "e.nii.gz")
    (scans / "f.nii.gz").write_bytes(b"nothing")
    network = write_checkpoint(Path("network.pt"), dtype=torch.float64, changes=EXACT)
    arguments = ("predict", scans, "--checkpoint", network, "--overlap", "0.3")
    assert run(*arguments, "--devices", "cpu", "-o", "alone") == 1
    Path("dealt").mkdir()
    shutil.copy("alone/c.nii.gz", "dealt")
    done = in_a_process(*arguments, *DEALT, "-o", "dealt", "--continue")
    assert done.returncode == 1
    dealt, *said, error = done.stderr.splitlines()
    assert dealt == "distributing 5 scans over 2 devices"
    said.remove("computing on cpu in float64")  # said by the first rank, at any time
    *skipped, warning = sorted(said, key=lambda line: "deviate from a right angle" in line)
    assert "scans/e.nii.gz" in warning and "deviate from a right angle" in warning
    begins = [line.partition(".nii.gz")[0] for line in sorted(skipped)]
    assert begins == [f"Skipped: cannot read {scans}/{name}" for name in "bf"]
    assert error.startswith("Error: 2 of 6 scans could not be segmented: ")
    assert "scans/b.nii.gz" in error and "scans/f.nii.gz" in error
    using, *lines = done.stdout.splitlines()
    assert using == f"using {network}"
    names = sorted(line.split(" -> ")[0][-8:] for line in lines)
    assert names == [f"{name}.nii.gz" for name in "acde"]
    assert sum("(kept;" in line for line in lines) == 1
    assert_same("dealt", "alone", "acde")


# How it ends

SHAPE = (24, 22, 20)


def start(checkpoint, how):
    """Segment many scans, and return when the first is done."""
    first = write_volume(Path("scans/00.nii.gz"), noise(SHAPE))
    for number in range(1, 60):
        shutil.copy(first, f"scans/{number:02}.nii.gz")
    words = ("predict", "scans", "-o", "out", "--checkpoint", checkpoint, *how)
    process = warm.start([*words, "--window", "8,8,8", "--overlap", "0.8"])
    wait_until(Path("out/00.nii.gz").exists, process)
    return process


def assert_nothing_half():
    for name in names_in("out"):
        assert name.endswith(".nii.gz") and labels_of(f"out/{name}").shape == SHAPE


@pytest.mark.parametrize(
    ("how", "rank", "number"),
    [
        (SPATIAL, 1, signal.SIGKILL),
        *by_night((SPATIAL, 0, signal.SIGKILL), (DEALT, 0, signal.SIGKILL)),
        *by_night(
            (DEALT, 1, signal.SIGKILL), (DEALT, None, signal.SIGINT), (DEALT, None, signal.SIGTERM)
        ),
        *by_night((SPATIAL, None, signal.SIGINT), (SPATIAL, None, signal.SIGTERM)),
    ],
)
def test_a_killed_rank_or_a_signal_ends_all_and_says_what_is_left(checkpoint, how, rank, number):
    process = start(checkpoint, how)
    family = family_of(process.pid)
    # A terminal sends Ctrl-C to the whole group of processes.
    group = (process.pid, *(family if number == signal.SIGINT else []))
    for one in group if rank is None else children_of(process.pid)[rank : rank + 1]:
        os.kill(one, number)
    _, errors = process.communicate(timeout=60)
    *others, last = errors.splitlines()
    if rank is None:
        assert process.returncode == 128 + number, errors
        assert last == f"Stopped by {number.name}"
    else:
        assert process.returncode == 1
        assert last == f"Error: rank {rank} was killed by SIGKILL; give the same command again"
    if rank != 0 or how == DEALT:
        assert others[-1].startswith("Not segmented: scans/")
        assert others[-1].endswith("; to go on, give the same command again")
        assert errors.count("Not segmented: ") == 1
    if rank != 0:  # if the first rank is killed, no process removes its unfinished files
        assert_nothing_half()
    assert "Traceback" not in errors
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
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "unet3d")
    command = [sys.executable, *torchrun, *arguments, "ranks", "--parallel"]
    how = {"capture_output": True, "text": True, "env": process_environment()}
    refused = subprocess.run([*command, "none"], **how)
    assert "Error: 2 ranks were started, but --parallel none predicts in one" in refused.stderr
    done = subprocess.run([*command, "data"], **how)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert errors == ["Error: 1 of 3 scans could not be segmented: scans/b.nii.gz"]
    assert done.stdout.count(" -> ") == 2
    assert_same("ranks", "alone", "ac")
