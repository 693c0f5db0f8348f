"""``unet3d predict`` as a user meets it."""

import errno
import io
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import matplotlib.image
import nibabel as nib
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.command_line import refusal, run, scan_array
from tests.networks import random_checkpoint, write_checkpoint
from tests.volumes.dicom_series import write_series
from tests.volumes.samples import write_json, write_volume
from unet3d.cli.checkpoints import trained_inference
from unet3d.config import InferenceSettings, ParallelSettings, load_config
from unet3d.errors import DoesNotFitError
from unet3d.inference.networks import Networks
from unet3d.inference.postprocessing import keep_largest
from unet3d.inference.predictor import Predictor
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.volumes.nifti import read_label
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
    assert capsys.readouterr().out.startswith("using runs/oldest/checkpoint-latest.pt\n")


def test_the_folder_of_a_run_stands_for_its_final_checkpoint(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(folder / "runs/mine/checkpoint-best.pt", patch_size=(8, 8, 8))
    options = ("--devices", "cpu", "--overwrite", "--checkpoint")
    assert run("predict", scan, *options, "runs/mine/") == 0
    assert capsys.readouterr().out.startswith("using runs/mine/checkpoint-best.pt\n")
    write_checkpoint(folder / "runs/mine/checkpoint-latest.pt", patch_size=(8, 8, 8))
    assert run("predict", scan, *options, "runs/mine") == 0
    assert capsys.readouterr().out.startswith("using runs/mine/checkpoint-latest.pt\n")
    line = refusal(capsys, "predict", scan, *options, "runs")
    assert "runs has neither checkpoint-latest.pt nor checkpoint-best.pt, no folds" in line


def write_folds(folder: Path) -> list[str]:
    """Write two folds that are finished, with the checkpoints that stand for them."""
    names = []
    for fold in (0, 1):
        run_folder = folder / "runs" / "mine" / f"fold{fold}"
        write_checkpoint(run_folder / "checkpoint-latest.pt", patch_size=(8, 8, 8), seed=fold + 1)
        write_json(run_folder / "summary.json", {})
        names.append(f"runs/mine/fold{fold}/checkpoint-latest.pt")
    write_json(folder / "runs" / "mine" / "summary.json", {})
    return names


def test_folds_are_averaged_and_named(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = write_folds(folder)
    expected = f"using the mean of 2 networks: {', '.join(names)}\n"
    options = ("predict", scan, "--devices", "cpu", "--statistics", "--overwrite")
    found = []
    for choice in (
        (),  # the newest finished run
        ("--checkpoint", "runs/mine"),
        ("--checkpoint", names[0], "--checkpoint", "runs/mine/fold1", "--checkpoint", names[0]),
    ):
        assert run(*options, *choice) == 0
        assert capsys.readouterr().out.startswith(expected)
        content = json.loads(scan.with_name("a scan_seg.json").read_text())
        assert content["checkpoints"] == names
        found.append(np.asarray(nib.load(scan.with_name("a scan_seg.nii.gz")).dataobj))
    image = read_scan(Scan(images=(scan,), output=scan))
    members = Networks.of(*(load_checkpoint(folder / name) for name in names))
    settings = [InferenceSettings()] * 2
    mean = Predictor(members, ParallelSettings(devices=("cpu",)), settings).segment(image)
    for labels in found:
        np.testing.assert_array_equal(labels, mean)
    assert run(*options, "--checkpoint", names[0]) == 0
    assert (mean != np.asarray(nib.load(scan.with_name("a scan_seg.nii.gz")).dataobj)).any()


def test_networks_that_do_not_belong_together_are_one_line(
    folder: Path, scan: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(folder / "other.pt", spacing_mm=(1.0, 1.0, 1.0))
    choice = ("--checkpoint", checkpoint, "--checkpoint", "other.pt")
    line = refusal(capsys, "predict", scan, *choice, "--devices", "cpu")
    assert f"other.pt cannot be averaged with {checkpoint}: its spacing_mm is [1.0, 1.0" in line
    assert not scan.with_name("a scan_seg.nii.gz").exists()


def test_a_network_that_cannot_be_read_ends_all_scans(
    folder: Path, scans: list[Path], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its description can be, so that this shows with the first scan."""
    other = write_checkpoint(folder / "other.pt", patch_size=(8, 8, 8))
    content = bytearray(other.read_bytes())
    weight = load_checkpoint(other).model["encoder.levels.0.0.conv.weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    other.write_bytes(content)
    options = ("-o", "out", "--devices", "cpu", "--checkpoint", checkpoint)
    assert run("predict", "scans", *options, "--checkpoint", "other.pt") == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines if "computing" not in line] == [
        "Not segmented",
        "Error",
    ]
    assert "other.pt is not a checkpoint, or is damaged" in lines[-1]


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
    begin, end = capsys.readouterr().out.splitlines()
    assert begin == f"using {checkpoint}"
    assert end.startswith(f"{scan} -> {written} (")
    line = refusal(capsys, *arguments)
    assert (
        line == f"Error: {written} exists; add --overwrite to replace it, or --continue to keep it"
    )
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
    assert len(captured.out.splitlines()) == 3
    skipped, error = captured.err.splitlines()
    assert skipped.startswith("Skipped: scans/middle.nii.gz is empty")
    assert error == "Error: 1 of 3 scans could not be segmented: scans/middle.nii.gz"
    assert "middle.nii.gz is empty" in refusal(capsys, *predicting, "scans/middle.nii.gz")


# A folder, continued and shared


@pytest.fixture
def scans(folder: Path) -> list[Path]:
    """Four scans in a folder."""
    return [write_volume(folder / f"scans/{name}.nii.gz", scan_array(seed=3)) for name in "abcd"]


@pytest.fixture
def into_out(checkpoint: Path) -> tuple[object, ...]:
    """Arguments that segment the folder."""
    return ("predict", "scans", "-o", "out", "--checkpoint", checkpoint, "--devices", "cpu")


def while_segmenting(
    monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]
) -> list[str]:
    """Have something happen while the scan of a name is segmented; return what is segmented."""
    segment, names = Predictor.segment, []

    def segment_and_act(self: Predictor, image: Any, *more: Any) -> Any:
        names.append(image.header.path.name)
        if image.header.path.name == name:
            act()
        return segment(self, image, *more)

    monkeypatch.setattr(Predictor, "segment", segment_and_act)
    return names


@pytest.mark.usefixtures("scans")
def test_a_folder_is_continued_and_what_exists_is_kept_and_named(
    folder: Path,
    into_out: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "out").mkdir()
    (folder / "out/b_seg.nii.gz").write_text("theirs")
    names = while_segmenting(monkeypatch, "", int)
    assert run(*into_out) == 0
    _, kept, *made = capsys.readouterr().out.splitlines()
    assert kept == "scans/b.nii.gz -> out/b_seg.nii.gz (kept; --overwrite replaces it)"
    assert [line.split(" (")[0] for line in made] == [
        f"scans/{name}.nii.gz -> out/{name}_seg.nii.gz" for name in "acd"
    ]
    assert names == ["a.nii.gz", "c.nii.gz", "d.nii.gz"]
    assert (folder / "out/b_seg.nii.gz").read_text() == "theirs"
    before = (folder / "out/a_seg.nii.gz").stat()
    assert run(*into_out) == 0
    assert capsys.readouterr().out.count("(kept; ") == 4
    assert (folder / "out/a_seg.nii.gz").stat() == before
    assert run(*into_out, "--overwrite") == 0
    assert "kept" not in capsys.readouterr().out
    assert nib.load(folder / "out/b_seg.nii.gz").shape == (14, 13, 12)


def test_the_second_of_two_predictions_of_one_scan_does_not_replace_the_first(
    folder: Path,
    scan: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = scan.with_name("a scan_seg.nii.gz")
    while_segmenting(monkeypatch, scan.name, lambda: written.write_text("theirs"))
    arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu")
    line = refusal(capsys, *arguments, "--statistics")
    assert f"{written} was made by somebody else in the meantime, and is kept" in line
    assert written.read_text() == "theirs"
    assert set(folder.iterdir()) == {scan, written}


@pytest.mark.usefixtures("scans")
def test_two_predictions_share_a_folder(
    folder: Path,
    into_out: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def other_process() -> None:
        for name in "ac":
            (folder / f"out/{name}_seg.nii.gz").write_text("theirs")

    (folder / "out").mkdir()
    names = while_segmenting(monkeypatch, "a.nii.gz", other_process)
    assert run(*into_out) == 0
    # The first came while we segmented it, the other before.
    lines = capsys.readouterr().out.splitlines()[1:]
    assert ["(kept; " in line for line in lines] == [True, False, True, False]
    assert names == ["a.nii.gz", "b.nii.gz", "d.nii.gz"]
    assert {path.name: path.stat().st_size > 6 for path in (folder / "out").iterdir()} == {
        f"{name}_seg.nii.gz": name in "bd" for name in "abcd"
    }


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.usefixtures("scans")
def test_after_an_interruption_what_is_done_is_kept_and_the_rest_is_named(
    folder: Path,
    into_out: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overwrite: tuple[str, ...],
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        while_segmenting(patched, "c.nii.gz", interrupt)
        assert run(*into_out, *overwrite) == 130
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    rest, stopped = filter(None, captured.err.splitlines())
    advice = "name these" if overwrite else "give the same command again"
    assert rest == f"Not segmented: scans/c.nii.gz, scans/d.nii.gz; to go on, {advice}"
    assert stopped.startswith("Stopped")
    written = sorted(path.name for path in (folder / "out").iterdir())
    assert written == ["a_seg.nii.gz", "b_seg.nii.gz"]
    assert run(*into_out) == 0
    assert capsys.readouterr().out.count("(kept; ") == 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8.00 TiB for an array"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
        DoesNotFitError("windows of 16x16x16 voxels do not fit on cuda:0"),
        OSError(errno.EIO, os.strerror(errno.EIO)),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.usefixtures("scans")
def test_whatever_is_explained_does_not_end_a_folder(
    folder: Path,
    into_out: tuple[object, ...],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    while_segmenting(monkeypatch, "b.nii.gz", fail)
    assert run(*into_out) == 1
    skipped, last = capsys.readouterr().err.splitlines()
    assert skipped.startswith("Skipped: ") and "\n" not in skipped
    assert last == "Error: 1 of 4 scans could not be segmented: scans/b.nii.gz"
    assert len(list((folder / "out").iterdir())) == 3


def test_what_memory_cannot_hold_is_refused_before_it_is_taken(
    scan: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_volume(scan, scan_array((40, 30, 20)))
    earlier = ["unet3d.runs.checkpoint.shortage"]  # what is compared with memory before
    earlier += [
        f"unet3d.volumes.{name}.refuse_beyond_memory" for name in ("nifti", "resample", "scratch")
    ]
    for available, words in (
        (
            200_000,
            "a scan.nii.gz: adding up the logits of 40x30x20 voxels and 3 classes takes 281.2 KiB",
        ),
        (10_000, "a window of 8x8x8 voxels, with the image around it, takes 36.75 KiB"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("unet3d.memory.host.available_bytes", lambda limit=available: limit)
            patched.setattr("unet3d.memory.host.SMALL_BYTES", 0)
            for name in earlier:
                patched.setattr(name, lambda *_: None)
            arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu")
            assert words in refusal(capsys, *arguments)


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
def test_a_scan_that_changes_while_it_is_segmented_is_refused(
    scan: Path,
    checkpoint: Path,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def act() -> None:
        if change == "written":
            scan.write_bytes(scan.read_bytes() + b"\0")
        elif change == "removed":
            scan.unlink()
        else:
            write_volume(scan.with_name("other.nii.gz"), scan_array(seed=5)).replace(scan)

    while_segmenting(monkeypatch, scan.name, act)
    arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu")
    line = refusal(capsys, *arguments)
    assert f"{scan} was changed while it was segmented, so nothing is written" in line
    assert not scan.with_name("a scan_seg.nii.gz").exists()


def test_a_preview_is_drawn_beside_the_segmentation(
    folder: Path, scan: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu", "--preview")
    assert run(*arguments, "-o", "out/s.nii.gz") == 0
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["s.nii.gz", "s.png"]
    picture = matplotlib.image.imread("out/s.png")
    assert min(picture.shape[:2]) > 300
    colours = np.unique((255 * picture[..., :3]).astype(np.uint8).reshape(-1, 3), axis=0)
    assert (np.ptp(colours.astype(int), axis=1) > 100).any()  # there are outlines on the grey

    assert "s.nii.gz exists; add --overwrite" in refusal(capsys, *arguments, "-o", "out/s.nii.gz")
    Path("out/s.png").write_bytes(b"old")
    assert run(*arguments, "-o", "out/s.nii.gz", "--overwrite") == 0
    np.testing.assert_array_equal(matplotlib.image.imread("out/s.png"), picture)
    Path("out/s.png").unlink()
    line = refusal(capsys, *arguments, "-o", "out/s.nii.gz")
    assert "s.nii.gz exists, but not s.png; add --overwrite to make both" in line


def test_a_picture_that_cannot_be_written_leaves_no_segmentation(
    folder: Path,
    scan: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(_: Figure, file: Path, **options: Any) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", full)
    (folder / "out").mkdir()
    arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu", "--preview")
    line = refusal(capsys, *arguments, "-o", "out")
    assert "cannot write out/a scan_seg.png: No space left on device; choose another" in line
    assert not list((folder / "out").iterdir())


def test_a_preview_of_a_folder_is_kept_and_drawn(
    folder: Path, scans: list[Path], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("predict", "scans", "--checkpoint", checkpoint, "--devices", "cpu", "--preview")
    assert run(*arguments, "-o", "out") == 0
    first = {path.name: path.stat().st_mtime_ns for path in (folder / "out").iterdir()}
    assert len(first) == 2 * len(scans)
    lost = sorted(path for path in (folder / "out").iterdir() if path.name.startswith("b"))
    for path in lost:
        path.unlink()
    capsys.readouterr()
    assert run(*arguments, "-o", "out") == 0
    assert capsys.readouterr().out.count("(kept; --overwrite replaces it)") == len(scans) - 1
    second = {path.name: path.stat().st_mtime_ns for path in (folder / "out").iterdir()}
    assert second.keys() == first.keys()
    assert {name for name in first if first[name] != second[name]} == {path.name for path in lost}


def test_files_of_an_earlier_segmentation_are_pointed_out(
    scan: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu", "--overwrite")
    assert run(*arguments, "--statistics", "--preview") == 0
    assert "was there before" not in caplog.text
    assert run(*arguments) == 0
    assert "a scan_seg.json was there before and may describe another segmentation" in caplog.text
    assert "a scan_seg.png was there before and may show another segmentation" in caplog.text


def test_a_full_disk_leaves_nothing_behind(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may hold no more than 2 KB, as if the disk were full; the scan is 12."""
    write_volume(folder / "scans/a.nii.gz", scan_array())
    write_volume(folder / "scans/b.nii.gz", scan_array((4, 4, 4)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        predicting = ("predict", "scans", "-o", "out", "--checkpoint", checkpoint)
        assert run(*predicting, "--devices", "cpu") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    skipped, error = capsys.readouterr().err.splitlines()
    assert skipped.startswith("Skipped: cannot write out/a_seg.nii.gz: File too large")
    assert "1 of 2 scans could not be segmented: scans/a.nii.gz" in error
    assert [path.name for path in (folder / "out").iterdir()] == ["b_seg.nii.gz"]


def test_names_that_are_no_text_are_shown_all_the_same(
    folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = os.fsdecode(b"caf\xe9.nii.gz")
    write_volume(folder / "scan.nii.gz", scan_array()).rename(folder / name)
    stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        predicting = ("predict", name, "--checkpoint", checkpoint, "--devices", "cpu")
        assert run(*predicting, "--statistics") == 0
    stdout.seek(0)
    line = stdout.read().splitlines()[1]
    assert line.startswith(r"caf\udce9.nii.gz -> caf\udce9_seg.nii.gz (")
    assert (folder / os.fsdecode(b"caf\xe9_seg.json")).exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_counts_windows_and_a_log_gets_a_line_a_case(
    scans: list[Path],
    into_out: tuple[object, ...],
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    assert run(*into_out) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 + len(scans)
    assert ("window 18/18" in captured.err) == terminal
    assert ("a.nii.gz (1/4): writing" in captured.err) == terminal
    if not terminal:
        assert captured.err == ""


def test_the_first_line_comes_before_the_heavy_work(
    scan: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(click, "echo", lambda text, **_: shown.append(text))

    def load(path: Path, part: str) -> None:
        assert shown == [f"using {checkpoint}"]
        raise KeyboardInterrupt

    monkeypatch.setattr("unet3d.inference.networks.load_network", load)
    assert run("predict", scan, "--checkpoint", checkpoint) == 130


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), InferenceSettings(window=(8, 8, 8), overlap=0.5)),
        (("--overlap", 0), InferenceSettings(window=(8, 8, 8), overlap=0)),
        (("--overlap", 0.75), InferenceSettings(window=(8, 8, 8), overlap=0.75)),
        (("--tta",), InferenceSettings(window=(8, 8, 8), tta=True)),
        (("--no-tta",), InferenceSettings(window=(8, 8, 8))),
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
    networks = Networks.of(load_checkpoint(checkpoint))
    predictor = Predictor(networks, ParallelSettings(devices=("cpu",)), [expected])
    np.testing.assert_array_equal(nib.load("found.nii").dataobj, predictor.segment(image))
    usual = Predictor(networks, ParallelSettings(devices=("cpu",)), [InferenceSettings()]).segment(
        image
    )
    differs = expected.overlap != 0.5 or expected.window != (8, 8, 8) or expected.tta
    assert (usual != np.asarray(nib.load("found.nii").dataobj)).any() == differs


@pytest.mark.parametrize(
    ("options", "is_mirrored"), [((), True), (("--tta",), True), (("--no-tta",), False)], ids=str
)
def test_mirror_images_are_those_of_the_network_unless_asked_otherwise(
    scan: Path,
    folder: Path,
    options: tuple[str, ...],
    is_mirrored: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = write_checkpoint(folder / "network.pt", changes=("inference.tta=true",))
    arguments = ("predict", scan, "--checkpoint", network, "--devices", "cpu", "--window", "8,8,8")
    assert run(*arguments, "-o", "found.nii", *options) == 0
    said = "each window is predicted 4 times, mirrored along Y, Z"
    assert (said in caplog.text) == is_mirrored
    predictor = Predictor(
        Networks.of(load_checkpoint(network)),
        ParallelSettings(devices=("cpu",)),
        [InferenceSettings(window=(8, 8, 8), tta=is_mirrored)],
    )
    image = read_scan(Scan(images=(scan,), output=scan))
    np.testing.assert_array_equal(nib.load("found.nii").dataobj, predictor.segment(image))


def test_every_setting_of_prediction_is_that_of_the_network() -> None:
    given: dict[str, Any] = {
        "window": (24, 16, 8),
        "overlap": 0.25,
        "batch_size": 3,
        "precision": "float32",
        "tta": True,
        "averaging": "logits",
        "postprocessing": False,
    }
    assert given.keys() == InferenceSettings.model_fields.keys()
    config = load_config(None).with_values({f"inference.{k}": v for k, v in given.items()})
    changes = trained_inference(replace(random_checkpoint(), config=config))
    assert load_config(None, changes).inference == InferenceSettings(**given)


def test_components_are_kept_on_request(scan: Path, folder: Path) -> None:
    network = write_checkpoint(folder / "network.pt", patch_size=(8, 8, 8), postprocessing=((1,),))
    arguments = ("predict", scan, "--checkpoint", network, "--devices", "cpu")
    assert run(*arguments, "-o", "kept.nii") == 0
    assert run(*arguments, "-o", "all.nii", "--no-postprocessing") == 0
    kept, everything = (read_label(name).array for name in ("kept.nii", "all.nii"))
    assert not np.array_equal(kept, everything)
    keep_largest(everything, [(1,)])
    np.testing.assert_array_equal(kept, everything)


@pytest.mark.parametrize("window", ["0,8,8", "8,8", "wide"])
def test_a_window_that_cannot_be_is_explained(
    scan: Path, checkpoint: Path, window: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "predict", scan, "--checkpoint", checkpoint, "--window", window)
    assert "--window is " in line and "three whole numbers" in line


def test_scans_of_every_format_are_segmented_alike(
    folder: Path, scan: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pydicom", reason="needs pydicom, of the extra itk")
    stored = nib.load(scan)
    array = np.asanyarray(stored.dataobj).astype(np.int16)
    write_volume(folder / "all" / "nifti.nii.gz", array)
    write_series(folder / "all" / "series.1", array, stored.affine)
    lps = "ObjectType = Image\nNDims = 3\nBinaryData = True\nTransformMatrix = -1 0 0 0 -1 0 0 0 1"
    shape = " ".join(map(str, array.shape))
    text = f"{lps}\nElementSpacing = 1 1 1\nDimSize = {shape}\nElementType = MET_SHORT\n"
    (folder / "all" / "meta.mha").write_bytes(
        f"{text}ElementDataFile = LOCAL\n".encode() + array.tobytes(order="F")
    )
    options = ("--checkpoint", checkpoint, "--devices", "cpu")
    assert run("predict", "all", *options, "-o", "out", "--statistics") == 0
    names = ("nifti", "series.1", "meta")
    maps = [nib.load(folder / "out" / f"{name}_seg.nii.gz") for name in names]
    assert np.unique(maps[0].get_fdata()).size > 1
    for found in maps[1:]:
        np.testing.assert_allclose(found.affine, maps[0].affine, atol=1e-6)
        np.testing.assert_array_equal(found.get_fdata(), maps[0].get_fdata())
    capsys.readouterr()
    assert run("evaluate", "out/meta_seg.nii.gz", "out/nifti_seg.nii.gz") == 0
    assert run("predict", "all/series.1/", *options) == 0
    assert (folder / "all" / "series.1_seg.nii.gz").exists()
    slices = sorted((folder / "all" / "series.1").iterdir())
    slices[4].unlink()
    line = refusal(capsys, "predict", "all/series.1", *options, "--overwrite")
    assert "all/series.1 lacks slices between" in line
