"""``unet3d predict`` continued, killed or interrupted, on small disks, with all of its results."""

import errno
import gzip
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests import warm
from tests.cli import slow_prediction
from tests.cli.slow_prediction import READING, WINDOWS
from tests.command_line import refusal, run, scan_array
from tests.volumes.samples import noise, write_volume
from unet3d.cli.predict import predict
from unet3d.distributed import launcher
from unet3d.inference.predictor import Predictor

ALL_RESULTS = ("--statistics", "--preview", "--probabilities")
ENDINGS = (".nii.gz", ".json", ".png", ".npy")


def names_in(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def labels_of(path: str) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# Continued


def test_a_single_scan_with_all_results_is_kept(scan, predicting, monkeypatch, capsys):
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out")
    assert run(*arguments, "--continue") == 0  # there is nothing yet
    made = {path.name: path.stat() for path in Path("out").iterdir()}
    assert sorted(made) == sorted(f"a scan_seg{ending}" for ending in ENDINGS)
    assert "add --overwrite to replace it, or --continue to keep it" in refusal(capsys, *arguments)
    monkeypatch.setattr(Predictor, "segment", lambda *_: pytest.fail("segmented again"))
    assert run(*arguments, "--continue") == 0
    captured = capsys.readouterr()
    kept = f"{scan} -> out/a scan_seg.nii.gz (kept; --overwrite replaces it)\n"
    assert captured.out.endswith(kept) and not captured.err
    assert {path.name: path.stat() for path in Path("out").iterdir()} == made


def test_results_that_are_incomplete_are_made_again(scan, predicting, capsys):
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out")
    assert run(*arguments) == 0
    made = contents("out")
    for lost in ENDINGS:
        Path(f"out/a scan_seg{lost}").unlink()
        for path in Path("out").iterdir():
            path.write_bytes(b"of another network")
        line = refusal(capsys, *arguments)
        assert f"but not a scan_seg{lost}; add --overwrite to make all, or --continue" in line
        assert run(*arguments, "--continue") == 0
        assert "kept" not in capsys.readouterr().out
        assert contents("out") == made


def test_a_folder_is_continued_with_what_is_incomplete(predicting, capsys):
    for name in "abc":
        write_volume(Path(f"scans/{name}.nii.gz"), scan_array())
    arguments = (*predicting, "scans", "--statistics", "-o", "out")
    assert run(*arguments) == 0
    Path("out/b_seg.json").unlink()
    Path("out/c_seg.nii.gz").unlink()
    capsys.readouterr()
    assert run(*arguments) == 1  # who made one of the two, nobody knows
    skipped = [line for line in capsys.readouterr().err.splitlines() if "Skipped" in line]
    assert len(skipped) == 2 and all("or --continue where" in line for line in skipped)
    assert run(*arguments, "--continue") == 0
    kept = [line for line in capsys.readouterr().out.splitlines() if "(kept; " in line]
    assert [line.split()[0] for line in kept] == ["scans/a.nii.gz"]
    assert names_in("out") == [f"{n}_seg.{end}" for n in "abc" for end in ("json", "nii.gz")]


def test_to_keep_and_to_replace_are_not_both(scan, predicting, capsys):
    assert run(*predicting, scan, "--continue", "--overwrite") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == "Error: --continue keeps results and --overwrite replaces them; drop one"
    assert names_in(scan.parent) == [scan.name]


# On a disk


@pytest.mark.parametrize("name", ["a.nii", "b.nii.gz"])
def test_scratch_files_change_nothing_and_are_gone(predicting, name):
    path = write_volume(Path(name), scan_array((30, 20, 19)))
    Path("disk").mkdir()
    arguments = (*predicting, path, "--statistics", "--probabilities", "-o")
    assert run(*arguments, "memory") == 0
    assert run(*arguments, "out", "--scratch", "disk") == 0
    assert contents("out") == contents("memory") and len(contents("out")) == 3
    assert not names_in("disk")


def test_scratch_is_a_folder(scan, predicting, capsys):
    for place in ("absent", "a scan.nii.gz"):
        assert run(*predicting, scan, "--scratch", place) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("Error: Invalid value for '--scratch': ") and place in line
    assert names_in(scan.parent) == ["a scan.nii.gz"]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_files_for_which_there_is_no_space_are_named(scan, predicting, monkeypatch, capsys):
    Path("disk").mkdir()
    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refusal(capsys, *predicting, scan, "--scratch", "disk", "-o", "out")
    assert line.startswith(f"Error: {scan}: reading 14x13x12x1 voxels takes ")
    assert line.endswith("of disk: No space left on device; name another folder with --scratch")
    assert refusal(capsys, *predicting, scan, *ALL_RESULTS, "-o", "out") == (
        "Error: cannot write out/a scan_seg.npy: No space left on device; choose another --output"
    )
    assert not names_in("disk") and not names_in("out")


@pytest.mark.parametrize("ending", [".nii.gz", ".json", ".png"])
def test_a_result_for_which_there_is_no_space_leaves_none_of_the_others(
    scan, predicting, ending, monkeypatch, capsys
):
    """Else the same command would be refused, because some results exist and others do not."""
    write_bytes, save = Path.write_bytes, Figure.savefig

    def write_or_fail(path, content):
        return full() if path.name.endswith(ending) else write_bytes(path, content)

    def save_or_fail(figure, path, **more):
        full() if ending == ".png" else save(figure, path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", write_or_fail)
        patched.setattr(Figure, "savefig", save_or_fail)
        if ending == ".nii.gz":
            patched.setattr("unet3d.volumes.nifti.write_nifti", full)
        line = refusal(capsys, *predicting, scan, *ALL_RESULTS, "-o", "out")
    assert f"cannot write out/a scan_seg{ending}: No space left on device" in line
    assert not names_in("out")
    assert run(*predicting, scan, *ALL_RESULTS, "-o", "out") == 0


# Probabilities


def test_probabilities_lie_beside_the_segmentation(scan, predicting, capsys):
    arguments = (*predicting, scan, "-o", "out/s.nii", "--probabilities")
    assert run(*arguments) == 0
    assert names_in("out") == ["s.nii", "s.npy"]
    found = np.load("out/s.npy")
    assert (found.shape, found.dtype) == ((3, 12, 13, 14), np.float16)
    likeliest = np.take_along_axis(found.T, labels_of("out/s.nii")[..., None].astype(int), -1)
    assert (likeliest[..., 0] >= found.T.max(-1)).all()
    assert "s.nii exists; add" in refusal(capsys, *arguments)
    Path("out/s.nii").unlink()
    line = refusal(capsys, *arguments)
    assert "out/s.npy exists, but not s.nii; add --overwrite to make both, or --cont" in line
    Path("out/s.npy").write_bytes(b"old")
    assert run(*arguments, "--overwrite") == 0
    np.testing.assert_array_equal(np.load("out/s.npy"), found)


# Files that are bad, or change


@pytest.mark.parametrize("kind", ["cut off", "checksum", "header"])
def test_a_bad_file_is_named_when_its_turn_comes(predicting, kind, capsys):
    """The others are segmented, though it was read while one of them was."""
    for name in "abc":
        write_volume(Path(f"scans/{name}.nii.gz"), scan_array(seed=ord(name)))
    bad = Path("scans/b.nii.gz")
    content = bytearray(bad.read_bytes())
    if kind == "cut off":
        del content[-400:]
    elif kind == "checksum":
        content[-6] ^= 1
    else:
        content = bytearray(gzip.compress(b"no header of a volume" * 100))
    bad.write_bytes(content)
    assert run(*predicting, "scans", "-o", "out") == 1
    skipped, error = capsys.readouterr().err.splitlines()
    assert skipped.startswith("Skipped: cannot read scans/b.nii.gz: ")
    assert error == "Error: 1 of 3 scans could not be segmented: scans/b.nii.gz"
    assert names_in("out") == ["a_seg.nii.gz", "c_seg.nii.gz"]


# Processes that are ended


def start(*words: object, reading_s: float = 0, window_s: float = 0) -> warm.Warm:
    return warm.call(slow_prediction.predict, [*map(str, words)], reading_s, window_s)


def wait_for(process: warm.Warm, *words: str) -> None:
    """Wait until a process has said some words, one after the other."""
    deadline = time.monotonic() + 100
    while not re.search(".*".join(words), process.written(0), re.DOTALL):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        ((READING, READING), {"reading_s": 3}),
        ((WINDOWS,), {"window_s": 3}),
        ((WINDOWS, READING), {"window_s": 3, "reading_s": 3}),
    ],
    ids=["reading", "windows", "both"],
)
def test_ctrl_c_ends_it_at_once(predicting, words, slow):
    """Whatever is left would take many minutes."""
    # The first is read at once, unless it is packed.
    first = "a.nii.gz" if words[0] == READING else "a.nii"
    for name in (first, "b.nii.gz"):
        write_volume(Path("scans", name), noise((60, 50, 40)))
    process = start(*predicting, "scans", "-o", "out", "--probabilities", **slow)
    wait_for(process, *words)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    *_, left, stopped = errors.splitlines()
    if WINDOWS in words:
        assert left.startswith("Not segmented: scans/a.nii") and "b.nii.gz; to go on" in left
    assert stopped == "Stopped by SIGINT" and "Traceback" not in errors
    assert not list(Path("out").glob("*"))


def test_what_is_killed_is_continued(scan, predicting):
    arguments = (*predicting, scan, *ALL_RESULTS)
    process = start(*arguments, "-o", "out", "--continue", window_s=0.2)
    wait_for(process, WINDOWS, WINDOWS)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert all(name.startswith(".unfinished-") for name in names_in("out"))
    assert run(*arguments, "-o", "out", "--continue") == 0
    assert run(*arguments, "-o", "undisturbed") == 0
    made = {name: one for name, one in contents("out").items() if not name.startswith(".")}
    assert made == contents("undisturbed")


def test_a_mapped_scan_that_is_cut_off_leaves_nothing(predicting):
    """What the file has lost cannot be had any more; the system may even end the process."""
    path = write_volume(Path("a.nii"), scan_array((24, 16, 12)))
    process = start(*predicting, path, *ALL_RESULTS, "-o", "out", window_s=0.2)
    wait_for(process, WINDOWS)
    os.truncate(path, 2000)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in errors
    assert all(name.startswith(".unfinished-") for name in names_in("out"))


# Windows that are skipped


def test_windows_in_air_are_skipped(predicting, caplog):
    array = np.full((64, 16, 16), -1000, np.int16)
    array[:20] = scan_array((20, 16, 16))
    path = write_volume(Path("a.nii.gz"), array)
    assert run(*predicting, path, "-o", "all.nii") == 0
    assert "skipped" not in caplog.text
    assert run(*predicting, path, "-o", "some.nii", "--skip-background", "--statistics") == 0
    # Windows of 8 start at 0, 4, ..., 56 along X, and at 0, 4, 8 elsewhere.
    assert "skipped 90 of 135 windows, which are empty" in caplog.text
    found, expected = labels_of("some.nii"), labels_of("all.nii")
    np.testing.assert_array_equal(found[:20], expected[:20])
    assert not found[24:].any() and expected[24:].any()
    statistics = json.loads(Path("some.json").read_text())["labels"]
    for one in statistics.values():
        assert one["num_voxels"] == (found == one["value"]).sum()


# Ranks


def test_ranks_are_given_every_option(scan, checkpoint, monkeypatch):
    """Those that are flags, those with a value, and what looks like an option and is a file."""
    Path("disk").mkdir()
    other = write_volume(Path("-scan.nii"), scan_array())
    launched: list[list[str]] = []
    monkeypatch.setattr(launcher, "launch", lambda words, *_, **more: launched.append(words))
    own = ("--checkpoint", checkpoint, "--parallel", "spatial", "--devices", "cpu,cpu")
    for more in (
        (*ALL_RESULTS, "--skip-background", "--scratch", "disk", "--continue", "--no-tta"),
        ("--tta", "--overlap", "0.3", "--window", "16,16,16", "--overwrite", "-o", "out"),
        ("--window", "whole", "--no-postprocessing", "--precision", "float32"),
    ):
        words = [str(word) for word in (*own, "--window", "16,16,16", *more, "--", scan, other)]
        assert run("predict", *words) == 0
        name, *given = launched.pop()
        assert name == "predict"
        found, expected = (predict.make_context("predict", one).params for one in (given, words))
        assert found == expected
