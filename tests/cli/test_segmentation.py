"""``unet3d predict`` continued, killed or interrupted, on small disks, with all of its results."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.command_line import process_environment, refusal, run, scan_array
from tests.volumes.samples import write_volume
from unet3d.cli.predict import predict
from unet3d.distributed import launcher
from unet3d.inference.predictor import Predictor

ALL_RESULTS = ("--statistics", "--preview", "--probabilities")
ENDINGS = (".nii.gz", ".json", ".png", ".npy")


@pytest.fixture
def predicting(checkpoint: Path) -> tuple[object, ...]:
    """Arguments that segment what is named."""
    return ("predict", "--checkpoint", checkpoint, "--devices", "cpu")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def labels_of(path: Path | str) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


# Continued


def test_a_single_scan_with_all_results_is_kept(
    folder: Path,
    scan: Path,
    predicting: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out")
    assert run(*arguments, "--continue") == 0  # there is nothing yet
    made = {path.name: path.stat() for path in (folder / "out").iterdir()}
    assert sorted(made) == sorted(f"a scan_seg{ending}" for ending in ENDINGS)
    assert "add --overwrite to replace it, or --continue to keep it" in refusal(capsys, *arguments)
    monkeypatch.setattr(Predictor, "segment", lambda *_: pytest.fail("segmented again"))
    assert run(*arguments, "--continue") == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(
        f"{scan} -> out/a scan_seg.nii.gz (kept; --overwrite replaces it)\n"
    )
    assert not captured.err
    assert {path.name: path.stat() for path in (folder / "out").iterdir()} == made


@pytest.mark.parametrize("lost", ENDINGS)
def test_results_that_are_incomplete_are_made_again(
    folder: Path,
    scan: Path,
    predicting: tuple[object, ...],
    lost: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out")
    assert run(*arguments) == 0
    made = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    (folder / f"out/a scan_seg{lost}").unlink()
    for path in (folder / "out").iterdir():
        path.write_bytes(b"of another network")
    line = refusal(capsys, *arguments)
    assert f"but not a scan_seg{lost}; add --overwrite to make all, or --continue" in line
    assert run(*arguments, "--continue") == 0
    assert "kept" not in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == made


def test_a_folder_is_continued_with_what_is_incomplete(
    folder: Path, predicting: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        write_volume(folder / f"scans/{name}.nii.gz", scan_array())
    arguments = (*predicting, "scans", "--statistics", "-o", "out")
    assert run(*arguments) == 0
    (folder / "out/b_seg.json").unlink()
    (folder / "out/c_seg.nii.gz").unlink()
    capsys.readouterr()
    assert run(*arguments) == 1  # who made one of the two, nobody knows
    skipped = [line for line in capsys.readouterr().err.splitlines() if "Skipped" in line]
    assert len(skipped) == 2 and all("or --continue where" in line for line in skipped)
    assert run(*arguments, "--continue") == 0
    kept = [line for line in capsys.readouterr().out.splitlines() if "(kept; " in line]
    assert [line.split()[0] for line in kept] == ["scans/a.nii.gz"]
    assert names_in(folder / "out") == [
        f"{n}_seg.{end}" for n in "abc" for end in ("json", "nii.gz")
    ]


def test_to_keep_and_to_replace_are_not_both(
    scan: Path, predicting: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*predicting, scan, "--continue", "--overwrite") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == "Error: --continue keeps results and --overwrite replaces them; drop one"
    assert names_in(scan.parent) == [scan.name]


# On a disk


@pytest.mark.parametrize("name", ["a.nii", "b.nii.gz"])
def test_scratch_files_change_nothing_and_are_gone(
    folder: Path, predicting: tuple[object, ...], name: str
) -> None:
    path = write_volume(folder / name, scan_array((30, 20, 19)))
    (folder / "disk").mkdir()
    assert run(*predicting, path, *ALL_RESULTS, "-o", "memory") == 0
    assert run(*predicting, path, *ALL_RESULTS, "-o", "out", "--scratch", "disk") == 0
    for one in (folder / "memory").iterdir():
        assert (folder / "out" / one.name).read_bytes() == one.read_bytes(), one.name
    assert not names_in(folder / "disk")


@pytest.mark.parametrize("place", ["absent", "a scan.nii.gz"])
def test_scratch_is_a_folder(
    scan: Path, predicting: tuple[object, ...], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*predicting, scan, "--scratch", place) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: Invalid value for '--scratch': ") and place in line
    assert names_in(scan.parent) == ["a scan.nii.gz"]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_scratch_disk_is_one_line(
    folder: Path,
    scan: Path,
    predicting: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "disk").mkdir()
    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refusal(capsys, *predicting, scan, "--scratch", "disk", "-o", "out")
    assert line.startswith(f"Error: {scan}: reading 14x13x12x1 voxels takes ")
    assert line.endswith("of disk: No space left on device; name another folder with --scratch")
    assert not any(names_in(one) for one in folder.iterdir() if one.is_dir())


# Probabilities


def test_probabilities_lie_beside_the_segmentation(
    folder: Path,
    scan: Path,
    predicting: tuple[object, ...],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = (*predicting, scan, "-o", "out/s.nii")
    assert run(*arguments, "--probabilities") == 0
    assert names_in(folder / "out") == ["s.nii", "s.npy"]
    found = np.load("out/s.npy")
    assert (found.shape, found.dtype) == ((3, 12, 13, 14), np.float16)
    likeliest = np.take_along_axis(found.T, labels_of("out/s.nii")[..., None].astype(int), -1)
    assert (likeliest[..., 0] >= found.T.max(-1)).all()

    assert "s.nii exists; add" in refusal(capsys, *arguments, "--probabilities")
    caplog.clear()
    assert run(*arguments, "--overwrite") == 0
    assert "s.npy was there before and may belong to another segmentation" in caplog.text
    Path("out/s.nii").unlink()
    line = refusal(capsys, *arguments, "--probabilities")
    assert "out/s.npy exists, but not s.nii; add --overwrite to make both, or --cont" in line
    Path("out/s.npy").write_bytes(b"old")
    assert run(*arguments, "--probabilities", "--overwrite") == 0
    np.testing.assert_array_equal(np.load("out/s.npy"), found)


def test_probabilities_for_which_there_is_no_space_leave_nothing(
    folder: Path,
    scan: Path,
    predicting: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refusal(capsys, *predicting, scan, *ALL_RESULTS, "-o", "out")
    assert line == (
        "Error: cannot write out/a scan_seg.npy: No space left on device; choose another --output"
    )
    assert not names_in(folder / "out")


@pytest.mark.parametrize("ending", [".json", ".png"])
def test_a_result_for_which_there_is_no_space_leaves_none_of_the_others(
    folder: Path,
    scan: Path,
    predicting: tuple[object, ...],
    ending: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else the same command would be refused, because some results exist and others do not."""
    write_bytes, save = Path.write_bytes, Figure.savefig

    def write_or_fail(path: Path, content: bytes) -> int:
        return full() if path.name.endswith(ending) else write_bytes(path, content)

    def save_or_fail(figure: Figure, path: Path, **more: Any) -> None:
        full() if ending == ".png" else save(figure, path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", write_or_fail)
        patched.setattr(Figure, "savefig", save_or_fail)
        line = refusal(capsys, *predicting, scan, *ALL_RESULTS, "-o", "out")
    assert f"cannot write out/a scan_seg{ending}: No space left on device" in line
    assert not names_in(folder / "out")
    assert run(*predicting, scan, *ALL_RESULTS, "-o", "out") == 0


IN_A_SMALL_DISK = (
    'mount -t tmpfs -o size=$1 none out; shift; "$@"; status=$?; ls -A out; exit $status'
)


@pytest.mark.nightly
def test_a_small_disk_has_all_results_or_none(folder: Path, checkpoint: Path) -> None:
    small = ["unshare", "--map-root-user", "--mount", "bash", "-c", IN_A_SMALL_DISK, "bash"]
    (folder / "out").mkdir()
    try:
        subprocess.run([*small, "1m", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk needs user and mount namespaces: {error}")
    write_volume(folder / "a.nii.gz", scan_array((40, 30, 20)))
    command = [sys.executable, "-m", "unet3d", "predict", "a.nii.gz", "--checkpoint"]
    command += [str(checkpoint), "--devices", "cpu", "-o", "out", *ALL_RESULTS]
    seen = set()
    # 144 KB of probabilities, a picture of as much, a segmentation, and a page of statistics.
    for kib in (100, 156, 200, 240, 264, 2000):
        ended = subprocess.run(
            [*small, f"{kib}k", *command],
            capture_output=True,
            text=True,
            env=process_environment(),
            timeout=60,
        )
        there = [line for line in ended.stdout.splitlines() if "->" not in line][1:]
        assert "Traceback" not in ended.stderr
        assert ended.returncode == (0 if there else 1), (kib, ended.stderr)
        assert not there or there == sorted(f"a_seg{ending}" for ending in ENDINGS), kib
        assert ended.returncode == 0 or "No space left on device" in ended.stderr
        seen.add(ended.returncode)
    assert seen == {0, 1}


# Files that are bad, or change


@pytest.mark.parametrize("kind", ["cut off", "checksum", "header"])
def test_a_bad_file_is_named_when_its_turn_comes(
    folder: Path,
    predicting: tuple[object, ...],
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others are segmented, though it was read while one of them was."""
    for name in "abc":
        write_volume(folder / f"scans/{name}.nii.gz", scan_array(seed=ord(name)))
    bad = folder / "scans/b.nii.gz"
    content = bytearray(bad.read_bytes())
    if kind == "cut off":
        del content[-400:]
    elif kind == "checksum":
        content[-6] ^= 1
    else:
        content = bytearray(gzip.compress(b"no header of a volume" * 100))
    bad.write_bytes(content)
    assert run(*predicting, "scans", "-o", "out") == 1
    captured = capsys.readouterr()
    skipped, error = captured.err.splitlines()
    assert skipped.startswith("Skipped: cannot read scans/b.nii.gz: ")
    assert error == "Error: 1 of 3 scans could not be segmented: scans/b.nii.gz"
    assert names_in(folder / "out") == ["a_seg.nii.gz", "c_seg.nii.gz"]


# Processes that are ended

PATCHED = """
import os, sys, time
from unet3d.inference import windows
from unet3d.inference.image_slab import ImageSlab
from unet3d.volumes import inflating

def say(word):
    os.write(1, word.encode() + b"\\n")

pieces, cut = inflating._pieces, ImageSlab.cut

def slow_pieces(path, start):
    for number, part in enumerate(pieces(path, start)):
        say("reading " + path.name)
        yield part
        time.sleep({reading_s})

def slow_cut(self, starts):
    say("windows")
    time.sleep({window_s})
    return cut(self, starts)

windows.CPU_VOXELS = 4 * 8**3  # computed at a time
inflating.PIECE_BYTES = 4096
inflating._pieces = slow_pieces
ImageSlab.cut = slow_cut
from unet3d.__main__ import main
main()
"""
"""The command on a slow disk, or with a slow network, which says what it does."""


def start(
    folder: Path, *arguments: object, reading_s: float = 0, window_s: float = 0
) -> subprocess.Popen[str]:
    code = PATCHED.format(reading_s=reading_s, window_s=window_s)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=process_environment(),
    )


def wait_for(process: subprocess.Popen[str], *words: str) -> None:
    """Wait until a process has said some words, one after the other."""
    assert process.stdout is not None
    left = list(words)
    for line in process.stdout:
        if line.strip() == left[0]:
            del left[0]
            if not left:
                return
    pytest.fail(f"it ended before {left}: {process.communicate()[1]}")


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        (("reading a.nii.gz",) * 10, {"reading_s": 0.2}),
        (("windows",), {"window_s": 0.2}),
        (("windows", "reading b.nii.gz"), {"window_s": 0.2, "reading_s": 0.2}),
    ],
    ids=["reading", "windows", "both"],
)
def test_ctrl_c_ends_it_at_once(
    folder: Path,
    predicting: tuple[object, ...],
    words: tuple[str, ...],
    slow: dict[str, float],
) -> None:
    """Whatever is left would take a minute."""
    rng = np.random.default_rng(0)
    for name in "ab":
        write_volume(folder / f"scans/{name}.nii.gz", rng.normal(0, 1, (60, 50, 40)))
    if "reading a.nii.gz" not in words:  # the first is read at once
        (folder / "scans/a.nii").write_bytes(
            gzip.decompress((folder / "scans/a.nii.gz").read_bytes())
        )
        (folder / "scans/a.nii.gz").unlink()
    process = start(folder, *predicting, "scans", "-o", "out", "--probabilities", **slow)
    wait_for(process, *words)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 3
    assert process.returncode == 130, errors
    *_, left, stopped = errors.splitlines()
    if "windows" in words:
        assert left.startswith("Not segmented: scans/a.nii") and "b.nii.gz; to go on" in left
    assert stopped == "Stopped by SIGINT" and "Traceback" not in errors
    assert not list(folder.glob("out/*"))


def test_what_is_killed_is_continued(
    folder: Path, scan: Path, predicting: tuple[object, ...]
) -> None:
    arguments = (*predicting, scan, *ALL_RESULTS, "-o", "out", "--continue")
    process = start(folder, *arguments, window_s=0.2)
    wait_for(process, "windows", "windows")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert all(name.startswith(".unfinished-") for name in names_in(folder / "out"))
    assert run(*arguments) == 0
    made = [name for name in names_in(folder / "out") if not name.startswith(".")]
    assert made == sorted(f"a scan_seg{ending}" for ending in ENDINGS)
    assert run(*predicting, scan, *ALL_RESULTS, "-o", "undisturbed") == 0
    for name in made:
        assert (folder / "out" / name).read_bytes() == (
            folder / "undisturbed" / name
        ).read_bytes(), name


def cut_off(path: Path) -> None:
    os.truncate(path, 2000)


def replace_it(path: Path) -> None:
    write_volume(path.with_name("new.nii"), scan_array((40, 30, 20), seed=9)).replace(path)


@pytest.mark.parametrize("change", [Path.unlink, replace_it])
def test_a_mapped_scan_that_is_gone_while_it_is_segmented(
    folder: Path, predicting: tuple[object, ...], change: Callable[[Path], None]
) -> None:
    path = write_volume(folder / "a.nii", scan_array((24, 16, 12)))
    process = start(folder, *predicting, path, "-o", "out", window_s=0.2)
    wait_for(process, "windows")
    change(path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    *_, line = errors.splitlines()
    assert line == (
        f"Error: {path} was changed while it was segmented, so nothing is written; segment it again"
    )
    assert not list(folder.glob("out/*"))


def test_a_mapped_scan_that_is_cut_off_leaves_nothing(
    folder: Path, predicting: tuple[object, ...]
) -> None:
    """What the file has lost cannot be had any more; the system may even end the process."""
    path = write_volume(folder / "a.nii", scan_array((24, 16, 12)))
    process = start(folder, *predicting, path, *ALL_RESULTS, "-o", "out", window_s=0.2)
    wait_for(process, "windows")
    cut_off(path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in errors
    assert all(name.startswith(".unfinished-") for name in names_in(folder / "out"))


# Windows that are skipped


def test_windows_in_air_are_skipped(
    folder: Path, predicting: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    array = np.full((64, 16, 16), -1000, np.int16)
    array[:20] = scan_array((20, 16, 16))
    path = write_volume(folder / "a.nii.gz", array)
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


def test_ranks_are_given_every_option(
    folder: Path, scan: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are flags, those with a value, and what looks like an option and is a file."""
    (folder / "disk").mkdir()
    other = write_volume(folder / "-scan.nii", scan_array())
    launched: list[list[str]] = []
    monkeypatch.setattr(launcher, "launch", lambda words, *_, **more: launched.append(words))
    own = ("--checkpoint", checkpoint, "--parallel", "spatial", "--devices", "cpu,cpu")
    for more in (
        (*ALL_RESULTS, "--skip-background", "--scratch", "disk", "--continue"),
        ("--tta", "--overlap", "0.3", "--window", "16,16,16", "--overwrite", "-o", "out"),
        ("--window", "whole", "--no-postprocessing", "--probabilities"),
    ):
        words = [str(word) for word in (*own, "--window", "16,16,16", *more, "--", scan, other)]
        assert run("predict", *words) == 0
        name, *given = launched.pop()
        assert name == "predict"
        found, expected = (predict.make_context("predict", one).params for one in (given, words))
        assert found == expected
