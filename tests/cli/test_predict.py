"""``unet3d predict`` as a user meets it."""

import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.command_line import refusal, run, scan_array
from tests.networks import write_checkpoint
from tests.volumes.samples import write_json, write_volume
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.inference.predictor import Predictor
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.volumes.scans import Scan, read_scan


def test_without_a_checkpoint_it_says_how_to_get_one(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "predict", scan)
    assert f"no finished run in {folder / 'runs'}" in line
    assert "--checkpoint FILE" in line and "unet3d train" in line


def test_the_newest_finished_run_is_used_and_named(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for age, name in enumerate(("newest", "middle", "oldest")):
        write_checkpoint(folder / "runs" / name / "checkpoint-latest.pt", patch_size=(8, 8, 8))
        if name != "newest":  # that one still runs
            summary = write_json(folder / "runs" / name / "summary.json", {})
            os.utime(summary, (1e9 - age, 1e9 - age))
    write_checkpoint(folder / "runs/oldest/checkpoint-best.pt", patch_size=(8, 8, 8))
    (folder / "runs/notes.txt").touch()
    assert run("predict", scan, "--devices", "cpu") == 0
    assert capsys.readouterr().out.startswith("using runs/middle/checkpoint-latest.pt\n")
    os.utime(folder / "runs/oldest/summary.json")
    assert run("predict", scan, "--devices", "cpu", "--overwrite") == 0
    assert capsys.readouterr().out.startswith("using runs/oldest/checkpoint-best.pt\n")


def test_a_checkpoint_that_is_none_is_refused(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "text.pt").write_text("no network")
    assert "text.pt is not a checkpoint" in refusal(
        capsys, "predict", scan, "--checkpoint", "text.pt"
    )
    line = refusal(capsys, "predict", scan, "--checkpoint", "absent.pt")
    assert "cannot read the checkpoint absent.pt: No such file" in line


def test_predict_beside_the_scan_and_never_over_it(
    scan: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu")
    assert run(*arguments) == 0
    written = scan.with_name("a scan_seg.nii.gz")
    assert capsys.readouterr().out.startswith(f"{scan} -> {written} (")
    line = refusal(capsys, *arguments)
    assert line == f"Error: {written} exists; add --overwrite to replace it"
    assert run(*arguments, "--overwrite") == 0
    assert "is itself to be segmented" in refusal(capsys, *arguments, "-o", scan, "--overwrite")


def test_scans_that_are_not_there_are_named(
    folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    predicting = ("predict", "--checkpoint", checkpoint, "--devices", "cpu")
    assert "absent.nii.gz: No such file" in refusal(capsys, *predicting, "absent.nii.gz")
    assert "empty holds no volumes" in refusal(capsys, *predicting, "empty")
    (folder / "scan.dcm").touch()
    assert "scan.dcm is not named like a volume" in refusal(capsys, *predicting, "scan.dcm")


def test_a_bad_scan_among_others_is_skipped_and_only_the_end_is_an_error(
    folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "last"):
        write_volume(folder / f"scans/{name}.nii.gz", scan_array())
    (folder / "scans/middle.nii.gz").touch()
    predicting = ("predict", "--checkpoint", checkpoint, "--devices", "cpu")
    assert run(*predicting, "scans") == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    skipped, error = captured.err.splitlines()
    assert skipped.startswith("Skipped: scans/middle.nii.gz is empty")
    assert error == "Error: 1 of 3 scans could not be segmented"
    assert "middle.nii.gz is empty" in refusal(capsys, *predicting, "scans/middle.nii.gz")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), InferenceSettings(window=(8, 8, 8), overlap=0.5)),
        (("--overlap", 0), InferenceSettings(window=(8, 8, 8), overlap=0)),
        (("--overlap", 0.75), InferenceSettings(window=(8, 8, 8), overlap=0.75)),
        (("--window", "whole"), InferenceSettings(window="whole")),
        (("--window", "12,10,8"), InferenceSettings(window=(12, 10, 8))),
        (("--parallel", "model", "--devices", "cpu,cpu"), InferenceSettings(window=(8, 8, 8))),
        (("--devices", "cpu,cpu,cpu"), InferenceSettings(window=(8, 8, 8))),
    ],
    ids=str,
)
def test_options_reach_the_windows(
    scan: Path, checkpoint: Path, options: tuple[object, ...], expected: InferenceSettings
) -> None:
    devices = () if "--devices" in options else ("--devices", "cpu")
    arguments = ("predict", scan, "--checkpoint", checkpoint, *devices, *options)
    assert run(*arguments, "-o", "found.nii") == 0
    image = read_scan(Scan(images=(scan,), output=scan))
    predictor = Predictor(load_checkpoint(checkpoint), ParallelSettings(devices=("cpu",)), expected)
    np.testing.assert_array_equal(nib.load("found.nii").dataobj, predictor.segment(image))
    usual = Predictor(
        load_checkpoint(checkpoint), ParallelSettings(devices=("cpu",)), InferenceSettings()
    ).segment(image)
    differs = expected.overlap != 0.5 or expected.window != (8, 8, 8)
    assert (usual != np.asarray(nib.load("found.nii").dataobj)).any() == differs


@pytest.mark.parametrize("window", ["0,8,8", "8,8", "wide"])
def test_a_window_that_cannot_be_is_explained(
    scan: Path, checkpoint: Path, window: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "predict", scan, "--checkpoint", checkpoint, "--window", window)
    assert "--window is " in line and "three whole numbers" in line
