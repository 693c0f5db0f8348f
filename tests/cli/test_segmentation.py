"""``unet3d predict`` that is continued, killed or interrupted, on small disks, with all results."""

import errno
import os
import re
import signal
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests import warm
from tests.cli import slow_prediction
from tests.cli.slow_prediction import READING, WINDOWS
from tests.command_line import labels_of, names_in, refusal, run, scan_array, wait_until
from tests.images.samples import noise, write_volume
from tests.products import by_night
from unet3d.distributed import launcher
from unet3d.inference import job
from unet3d.inference.predictor import Predictor
from unet3d.inference.request import PredictionRequest
from unet3d.inputs.reading import read_json

ALL_RESULTS = ("--statistics", "--preview", "--probabilities")
ENDINGS = (".nii.gz", ".json", ".png", ".npy")


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def stamps_of(folder):
    status = {path.name: path.stat() for path in Path(folder).iterdir()}
    return {name: (one.st_ino, one.st_mtime_ns, one.st_size) for name, one in status.items()}


def test_a_single_scan_with_all_results_is_kept(scan, predicting, monkeypatch, capsys):
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out", "--continue")
    assert run(*arguments) == 0  # nothing to continue yet
    made = stamps_of("out")
    assert sorted(made) == sorted(f"a scan{ending}" for ending in ENDINGS)
    monkeypatch.setattr(Predictor, "segment", lambda *_: pytest.fail("segmented again"))
    capsys.readouterr()
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    kept = f"{scan} -> out/a scan.nii.gz (kept; --overwrite replaces it)\n"
    assert captured.out.endswith(kept) and not captured.err
    assert stamps_of("out") == made


@pytest.mark.nightly
def test_results_that_are_incomplete_are_made_again(scan, predicting, capsys):
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out")
    assert run(*arguments) == 0
    made = contents("out")
    for lost in ENDINGS[:2]:
        Path(f"out/a scan{lost}").unlink()
        for path in Path("out").iterdir():
            path.write_bytes(b"of another network")
        line = refusal(capsys, *arguments)
        assert f"but not a scan{lost}; add --overwrite to write all" in line
        assert run(*arguments, "--continue") == 0
        assert "kept" not in capsys.readouterr().out
        assert contents("out") == made


@pytest.mark.nightly
def test_results_that_are_cut_off_are_made_again(scan, predicting, capsys):
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out", "--continue")
    assert run(*arguments) == 0
    made = contents("out")
    for name, content in made.items():
        Path("out", name).write_bytes(content[: len(content) - 20])
        assert run(*arguments) == 0
        assert "kept" not in capsys.readouterr().out
        assert contents("out") == made


# On a disk


def test_scratch_files_change_nothing_and_are_gone(predicting):
    path = write_volume(Path("a.nii.gz"), scan_array((30, 20, 19)))
    Path("disk").mkdir()
    arguments = (*predicting, path, "--statistics", "--probabilities", "-o")
    assert run(*arguments, "memory") == 0
    assert run(*arguments, "out", "--scratch", "disk") == 0
    assert contents("out") == contents("memory") and len(contents("out")) == 3
    assert not names_in("disk")


@pytest.mark.nightly
def test_large_labels_are_in_a_file_beside_the_result(predicting, monkeypatch, capsys):
    path = write_volume(Path("a.nii.gz"), scan_array((30, 20, 19)))
    arguments = (*predicting, path, *ALL_RESULTS, "-o")
    assert run(*arguments, "memory") == 0
    monkeypatch.setattr(job, "LARGE_BYTES", 1000)
    assert run(*arguments, "out") == 0
    assert contents("out") == contents("memory") and len(contents("out")) == 4
    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refusal(capsys, *predicting, path, "-o", "new/folder")
    assert line.startswith(f"Error: {path}: its segmentation takes 11.13 KiB of ")
    assert line.endswith("folder: No space left on device; name another folder with --scratch")
    assert not names_in("new/folder")


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_files_for_which_there_is_no_space_are_named(scan, predicting, monkeypatch, capsys):
    Path("disk").mkdir()
    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refusal(capsys, *predicting, scan, "--scratch", "disk", "-o", "out")
    assert line.startswith(f"Error: {scan}: reading 14x13x12x1 voxels takes ")
    assert line.endswith("of disk: No space left on device; name another folder with --scratch")
    assert refusal(capsys, *predicting, scan, *ALL_RESULTS, "-o", "out") == (
        "Error: cannot write out/a scan.npy: No space left on device; choose another --output"
    )
    assert not names_in("disk") and not names_in("out")


@pytest.mark.parametrize("ending", [".nii.gz", *by_night(".json", ".png")])
def test_without_space_for_one_result_there_is_none(scan, predicting, ending, monkeypatch, capsys):
    """Otherwise the same command would be refused, because only some of the results exist."""
    write_bytes, save = Path.write_bytes, Figure.savefig

    def write_or_fail(path, content):
        return full() if path.name.endswith(ending) else write_bytes(path, content)

    def save_or_fail(figure, path, **more):
        full() if ending == ".png" else save(figure, path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", write_or_fail)
        patched.setattr(Figure, "savefig", save_or_fail)
        if ending == ".nii.gz":
            patched.setattr("unet3d.images.nifti.write_nifti", full)
        line = refusal(capsys, *predicting, scan, *ALL_RESULTS, "-o", "out")
    assert f"cannot write out/a scan{ending}: No space left on device" in line
    assert not names_in("out")
    assert run(*predicting, scan, *ALL_RESULTS, "-o", "out") == 0


def test_probabilities_and_a_preview_lie_beside_the_segmentation(scan, predicting, capsys):
    arguments = (*predicting, scan, "-o", "out/s.nii", "--probabilities", "--preview")
    assert run(*arguments) == 0
    assert names_in("out") == ["s.nii", "s.npy", "s.png"]
    picture = matplotlib.image.imread("out/s.png")
    assert min(picture.shape[:2]) > 300
    assert np.ptp(picture[..., :3], axis=-1).max() > 0.4  # coloured outlines on the grey scan
    found = np.load("out/s.npy")
    assert (found.shape, found.dtype) == ((3, 12, 13, 14), np.float16)
    likeliest = np.take_along_axis(found.T, labels_of("out/s.nii")[..., None].astype(int), -1)
    assert (likeliest[..., 0] >= found.T.max(-1)).all()
    assert "s.nii exists; add" in refusal(capsys, *arguments)
    for name in ("s.nii", "s.npy"):
        Path("out", name).unlink()
    line = refusal(capsys, *arguments)
    assert "s.png exists, but not s.nii and s.npy; add --overwrite to write all results" in line
    Path("out/s.png").write_bytes(b"old")
    assert run(*arguments, "--overwrite") == 0
    np.testing.assert_array_equal(np.load("out/s.npy"), found)
    np.testing.assert_array_equal(matplotlib.image.imread("out/s.png"), picture)


# Processes that are ended


def start(words, *said, reading_s=0, window_s=0):
    """Begin a slow prediction, and return when it has printed these words in this order."""
    process = warm.call(slow_prediction.predict, [*map(str, words)], reading_s, window_s)
    said = re.compile(".*".join(said), re.DOTALL)
    wait_until(lambda: said.search(process.written(0)), process)
    return process


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
    """The scans that are left would take many minutes."""
    # The first scan is read at once unless it is compressed.
    first = "a.nii.gz" if words[0] == READING else "a.nii"
    for name in (first, "b.nii.gz"):
        write_volume(Path("scans", name), noise((60, 50, 40)))
    process = start((*predicting, "scans", "-o", "out", "--probabilities"), *words, **slow)
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
    process = start((*arguments, "-o", "out", "--continue"), WINDOWS, WINDOWS, window_s=0.2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert all(name.startswith(".unfinished-") for name in names_in("out"))
    assert run(*arguments, "-o", "out", "--continue") == 0
    assert run(*arguments, "-o", "undisturbed") == 0
    assert contents("out") == contents("undisturbed")
    assert names_in("out", ".*") == []  # files that the killed process left are removed


@pytest.mark.parametrize(
    ("words", "asked", "settings"),
    [
        (
            (*ALL_RESULTS, "--skip-background", "--scratch", "disk", "--continue", "--no-tta"),
            {"statistics": True, "preview": True, "probabilities": True, "skip_background": True}
            | {"scratch": Path("disk"), "goes_on": True},
            {"tta": False},
        ),
        (
            ("--tta", "--overlap", "0.3", "--window", "16,16,16", "--overwrite", "-o", "out"),
            {"overwrite": True, "output": Path("out")},
            {"tta": True, "overlap": 0.3, "window": [16, 16, 16]},
        ),
        (
            ("--window", "whole", "--no-postprocessing", "--precision", "float32"),
            {},
            {"window": "whole", "postprocessing": False, "precision": "float32"},
        ),
    ],
)
def test_ranks_are_given_all_that_was_asked(words, asked, settings, checkpoint, monkeypatch):
    """Ranks read the request from a file, also names that are not UTF-8 or look like options."""
    Path("disk").mkdir()
    images = tuple(map(Path, ("plain.nii", os.fsdecode(b"-caf\xe9.nii"))))
    for image in images:
        write_volume(Path("a.nii"), scan_array()).rename(image)
    read = []

    def launch(arguments, folder, **more):
        read.append(PredictionRequest.of(read_json(Path(arguments[1]))))

    monkeypatch.setattr(launcher, "launch", launch)
    own = ("--checkpoint", checkpoint, "--parallel", "spatial", "--devices", "cpu,cpu")
    assert run("predict", *own, *words, "--", *images) == 0
    placement = {"parallel.mode": "spatial", "parallel.devices": ["cpu", "cpu"]}
    of_windows = {f"inference.{name}": value for name, value in settings.items()}
    found = PredictionRequest(
        images=images, checkpoints=(checkpoint,), settings={**of_windows, **placement}, **asked
    )
    assert read == [found]
