"""``unet3d predict`` as a user meets it."""

import errno
import io
import json
import os
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


def labels(path: Path | str) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


def segmented(scan: Path, *checkpoints: Path, **inference: Any) -> np.ndarray:
    """Return what a predictor makes of a scan with settings, without the command line."""
    networks = Networks.of(*map(load_checkpoint, checkpoints))
    settings = [InferenceSettings(**inference)] * len(checkpoints)
    predictor = Predictor(networks, ParallelSettings(devices=("cpu",)), settings)
    return predictor.segment(read_scan(Scan(images=(scan,), output=scan)))


# Which network


def test_the_newest_finished_run_is_used_and_named(folder, scan, capsys):
    line = refusal(capsys, "predict", scan)
    assert f"no finished run in {folder / 'runs'}" in line
    assert "--checkpoint FILE" in line and "unet3d train" in line
    for age, name in enumerate(("newest", "middle", "oldest")):
        write_checkpoint(Path("runs", name, "checkpoint-latest.pt"), patch_size=(8, 8, 8))
        if name != "newest":  # that one still runs
            summary = write_json(Path("runs", name, "summary.json"), {})
            os.utime(summary, (1e9 - age, 1e9 - age))
    write_checkpoint(Path("runs/oldest/checkpoint-best.pt"), patch_size=(8, 8, 8))
    Path("runs/notes.txt").touch()
    assert run("predict", scan, "--devices", "cpu") == 0
    assert capsys.readouterr().out.startswith("using runs/middle/checkpoint-latest.pt\n")
    os.utime("runs/oldest/summary.json")
    assert run("predict", scan, "--devices", "cpu", "--overwrite") == 0
    assert capsys.readouterr().out.startswith("using runs/oldest/checkpoint-latest.pt\n")


def test_the_folder_of_a_run_stands_for_its_final_checkpoint(scan, capsys):
    options = ("--devices", "cpu", "--overwrite", "--checkpoint")
    for name in ("best", "latest"):
        write_checkpoint(Path(f"runs/mine/checkpoint-{name}.pt"), patch_size=(8, 8, 8))
        assert run("predict", scan, *options, "runs/mine/") == 0
        assert capsys.readouterr().out.startswith(f"using runs/mine/checkpoint-{name}.pt\n")
    line = refusal(capsys, "predict", scan, *options, "runs")
    assert "runs has neither checkpoint-latest.pt nor checkpoint-best.pt, no folds" in line


def test_folds_are_averaged_and_named(scan, capsys):
    names = [f"runs/mine/fold{fold}/checkpoint-latest.pt" for fold in (0, 1)]
    for seed, name in enumerate(names, start=1):
        write_checkpoint(Path(name), patch_size=(8, 8, 8), seed=seed)
        write_json(Path(name).with_name("summary.json"), {})
    write_json(Path("runs/mine/summary.json"), {})
    mean = segmented(scan, *map(Path, names))
    options = ("predict", scan, "--devices", "cpu", "--statistics", "--overwrite")
    for choice in (
        (),  # the newest finished run
        ("--checkpoint", "runs/mine"),
        ("--checkpoint", names[0], "--checkpoint", "runs/mine/fold1", "--checkpoint", names[0]),
    ):
        assert run(*options, *choice) == 0
        said = f"using the mean of 2 networks: {', '.join(names)}\n"
        assert capsys.readouterr().out.startswith(said)
        assert json.loads(Path("a scan_seg.json").read_text())["checkpoints"] == names
        np.testing.assert_array_equal(labels("a scan_seg.nii.gz"), mean)
    assert run(*options, "--checkpoint", names[0]) == 0
    assert (mean != labels("a scan_seg.nii.gz")).any()


@pytest.mark.usefixtures("scans")
def test_a_network_that_cannot_be_read_ends_all_scans(into_out, capsys):
    """Its description can be, so that this shows with the first scan."""
    other = write_checkpoint(Path("other.pt"), patch_size=(8, 8, 8))
    content = bytearray(other.read_bytes())
    weight = load_checkpoint(other).model["encoder.levels.0.0.conv.weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    other.write_bytes(content)
    assert run(*into_out, "--checkpoint", "other.pt") == 1
    lines = capsys.readouterr().err.splitlines()
    begins = [line.split(":")[0] for line in lines if "computing" not in line]
    assert begins == ["Not segmented", "Error"]
    assert "other.pt is not a checkpoint, or is damaged" in lines[-1]


def test_the_first_line_comes_before_the_heavy_work(scan, checkpoint, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(click, "echo", lambda text, **_: shown.append(text))

    def load(path, part):
        assert shown == [f"using {checkpoint}"]
        raise KeyboardInterrupt

    monkeypatch.setattr("unet3d.inference.networks.load_network", load)
    assert run("predict", scan, "--checkpoint", checkpoint) == 130


# Which scans


def test_predict_beside_the_scan_and_never_over_it(scan, checkpoint, predicting, capsys):
    assert run(*predicting, scan) == 0
    written = scan.with_name("a scan_seg.nii.gz")
    begin, end = capsys.readouterr().out.splitlines()
    assert begin == f"using {checkpoint}"
    assert end.startswith(f"{scan} -> {written} (")
    assert refusal(capsys, *predicting, scan) == (
        f"Error: {written} exists; add --overwrite to replace it, or --continue to keep it"
    )
    assert run(*predicting, scan, "--overwrite") == 0
    line = refusal(capsys, *predicting, scan, "-o", scan, "--overwrite")
    assert "is itself to be segmented" in line


def test_a_bad_scan_among_others_is_skipped_and_only_the_end_is_an_error(predicting, capsys):
    for name in ("first", "last"):
        write_volume(Path(f"scans/{name}.nii.gz"), scan_array())
    Path("scans/middle.nii.gz").touch()
    assert run(*predicting, "scans") == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    skipped, error = captured.err.splitlines()
    assert skipped.startswith("Skipped: scans/middle.nii.gz is empty")
    assert error == "Error: 1 of 3 scans could not be segmented: scans/middle.nii.gz"
    assert "middle.nii.gz is empty" in refusal(capsys, *predicting, "scans/middle.nii.gz")


def test_scans_of_every_format_are_segmented_alike(scan, predicting, capsys):
    pytest.importorskip("pydicom", reason="needs pydicom, of the extra itk")
    stored = nib.load(scan)
    array = np.asanyarray(stored.dataobj).astype(np.int16)
    write_volume(Path("all/nifti.nii.gz"), array)
    write_series(Path("all/series.1"), array, stored.affine)
    lps = "ObjectType = Image\nNDims = 3\nBinaryData = True\nTransformMatrix = -1 0 0 0 -1 0 0 0 1"
    shape = " ".join(map(str, array.shape))
    text = f"{lps}\nElementSpacing = 1 1 1\nDimSize = {shape}\nElementType = MET_SHORT\n"
    header = f"{text}ElementDataFile = LOCAL\n".encode()
    Path("all/meta.mha").write_bytes(header + array.tobytes(order="F"))
    assert run(*predicting, "all", "-o", "out") == 0
    first, *others = (nib.load(f"out/{name}_seg.nii.gz") for name in ("nifti", "series.1", "meta"))
    assert np.unique(first.get_fdata()).size > 1
    for found in others:
        np.testing.assert_allclose(found.affine, first.affine, atol=1e-6)
        np.testing.assert_array_equal(found.get_fdata(), first.get_fdata())
    assert run("evaluate", "out/meta_seg.nii.gz", "out/nifti_seg.nii.gz") == 0
    assert run(*predicting, "all/series.1/") == 0
    assert Path("all/series.1_seg.nii.gz").exists()
    sorted(Path("all/series.1").iterdir())[4].unlink()
    line = refusal(capsys, *predicting, "all/series.1", "--overwrite")
    assert "all/series.1 lacks slices between" in line


def test_names_that_are_no_text_are_shown_all_the_same(predicting, monkeypatch):
    name = os.fsdecode(b"caf\xe9.nii.gz")
    write_volume(Path("scan.nii.gz"), scan_array()).rename(name)
    stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        assert run(*predicting, name, "--statistics") == 0
    stdout.seek(0)
    line = stdout.read().splitlines()[1]
    assert line.startswith(r"caf\udce9.nii.gz -> caf\udce9_seg.nii.gz (")
    assert Path(os.fsdecode(b"caf\xe9_seg.json")).exists()


# A folder, continued and shared


@pytest.fixture
def scans(folder):
    """Four scans in a folder."""
    return [write_volume(folder / f"scans/{name}.nii.gz", scan_array(seed=3)) for name in "abcd"]


@pytest.fixture
def into_out(predicting):
    """Arguments that segment the folder."""
    return (*predicting, "scans", "-o", "out")


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
def test_a_folder_is_continued_and_what_exists_is_kept_and_named(into_out, monkeypatch, capsys):
    Path("out").mkdir()
    Path("out/b_seg.nii.gz").write_text("theirs")
    names = while_segmenting(monkeypatch, "", int)
    assert run(*into_out) == 0
    _, kept, *made = capsys.readouterr().out.splitlines()
    assert kept == "scans/b.nii.gz -> out/b_seg.nii.gz (kept; --overwrite replaces it)"
    assert [line.split(" (")[0] for line in made] == [
        f"scans/{name}.nii.gz -> out/{name}_seg.nii.gz" for name in "acd"
    ]
    assert names == ["a.nii.gz", "c.nii.gz", "d.nii.gz"]
    assert Path("out/b_seg.nii.gz").read_text() == "theirs"
    before = Path("out/a_seg.nii.gz").stat()
    assert run(*into_out) == 0
    assert capsys.readouterr().out.count("(kept; ") == 4
    assert Path("out/a_seg.nii.gz").stat() == before
    assert run(*into_out, "--overwrite") == 0
    assert "kept" not in capsys.readouterr().out
    assert nib.load("out/b_seg.nii.gz").shape == (14, 13, 12)


def test_the_second_of_two_predictions_of_one_scan_does_not_replace_the_first(
    folder, scan, predicting, monkeypatch, capsys
):
    written = scan.with_name("a scan_seg.nii.gz")
    while_segmenting(monkeypatch, scan.name, lambda: written.write_text("theirs"))
    line = refusal(capsys, *predicting, scan, "--statistics")
    assert f"{written} was made by somebody else in the meantime, and is kept" in line
    assert written.read_text() == "theirs"
    assert set(folder.iterdir()) == {scan, written}


@pytest.mark.usefixtures("scans")
def test_two_predictions_share_a_folder(into_out, monkeypatch, capsys):
    def other_process():
        for name in "ac":
            Path(f"out/{name}_seg.nii.gz").write_text("theirs")

    Path("out").mkdir()
    names = while_segmenting(monkeypatch, "a.nii.gz", other_process)
    assert run(*into_out) == 0
    # The first came while we segmented it, the other before.
    lines = capsys.readouterr().out.splitlines()[1:]
    assert ["(kept; " in line for line in lines] == [True, False, True, False]
    assert names == ["a.nii.gz", "b.nii.gz", "d.nii.gz"]
    assert {path.name: path.stat().st_size > 6 for path in Path("out").iterdir()} == {
        f"{name}_seg.nii.gz": name in "bd" for name in "abcd"
    }


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.usefixtures("scans")
def test_after_an_interruption_what_is_done_is_kept_and_the_rest_is_named(
    into_out, monkeypatch, capsys, overwrite
):
    def interrupt():
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
    assert sorted(path.name for path in Path("out").iterdir()) == ["a_seg.nii.gz", "b_seg.nii.gz"]


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
def test_whatever_is_explained_does_not_end_a_folder(into_out, error, monkeypatch, capsys):
    def fail():
        raise error

    while_segmenting(monkeypatch, "b.nii.gz", fail)
    assert run(*into_out) == 1
    skipped, last = capsys.readouterr().err.splitlines()
    assert skipped.startswith("Skipped: ")
    assert last == "Error: 1 of 4 scans could not be segmented: scans/b.nii.gz"
    assert len(list(Path("out").iterdir())) == 3


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
@pytest.mark.parametrize("name", ["packed.nii.gz", "mapped.nii"])
def test_a_scan_that_changes_while_it_is_segmented_is_refused(
    name, change, predicting, monkeypatch, capsys
):
    scan = write_volume(Path(name), scan_array())

    def act():
        if change == "written":
            scan.write_bytes(scan.read_bytes() + b"\0")
        elif change == "removed":
            scan.unlink()
        else:
            write_volume(Path(f"other {name}"), scan_array(seed=5)).replace(scan)

    while_segmenting(monkeypatch, name, act)
    line = refusal(capsys, *predicting, scan, "-o", "out")
    assert line == (
        f"Error: {name} was changed while it was segmented, so nothing is written; segment it again"
    )
    assert not list(Path("out").glob("*"))


# What it takes and what it writes


def test_what_memory_cannot_hold_is_refused_before_it_is_taken(
    scan, predicting, monkeypatch, capsys
):
    write_volume(scan, scan_array((40, 30, 20)))
    earlier = ["unet3d.runs.checkpoint.shortage"]  # what is compared with memory before
    earlier += [
        f"unet3d.volumes.{name}.refuse_beyond_memory" for name in ("nifti", "resample", "scratch")
    ]
    monkeypatch.setattr("unet3d.memory.host.SMALL_BYTES", 0)
    for name in earlier:
        monkeypatch.setattr(name, lambda *_: None)
    logits = "adding up the logits of 40x30x20 voxels and 3 classes takes 281.2 KiB"
    window = "a window of 8x8x8 voxels, with the image around it, takes 36.75 KiB"
    for available, words in ((200_000, f"a scan.nii.gz: {logits}"), (10_000, window)):
        monkeypatch.setattr("unet3d.memory.host.available_bytes", lambda limit=available: limit)
        assert words in refusal(capsys, *predicting, scan)


def test_a_preview_is_drawn_beside_the_segmentation(scan, predicting, capsys):
    arguments = (*predicting, scan, "--preview", "-o", "out/s.nii.gz")
    assert run(*arguments) == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["s.nii.gz", "s.png"]
    picture = matplotlib.image.imread("out/s.png")
    assert min(picture.shape[:2]) > 300
    colours = np.unique((255 * picture[..., :3]).astype(np.uint8).reshape(-1, 3), axis=0)
    assert (np.ptp(colours.astype(int), axis=1) > 100).any()  # there are outlines on the grey
    assert "s.nii.gz exists; add --overwrite" in refusal(capsys, *arguments)
    Path("out/s.png").write_bytes(b"old")
    assert run(*arguments, "--overwrite") == 0
    np.testing.assert_array_equal(matplotlib.image.imread("out/s.png"), picture)


def test_files_of_an_earlier_segmentation_are_pointed_out(scan, predicting, caplog):
    assert run(*predicting, scan, "--statistics", "--preview", "--probabilities") == 0
    assert "was there before" not in caplog.text
    assert run(*predicting, scan, "--overwrite") == 0
    for words in (
        "a scan_seg.json was there before and may describe another segmentation",
        "a scan_seg.png was there before and may show another segmentation",
        "a scan_seg.npy was there before and may belong to another segmentation",
    ):
        assert words in caplog.text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_counts_windows_and_a_log_gets_a_line_a_case(
    scans, into_out, terminal, monkeypatch, capsys
):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    assert run(*into_out) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 + len(scans)
    assert ("window 18/18" in captured.err) == terminal
    assert ("a.nii.gz (1/4): writing" in captured.err) == terminal
    assert terminal or captured.err == ""


# Settings


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ((), {}),
        (("--overlap", 0), {"overlap": 0}),
        (("--overlap", 0.75), {"overlap": 0.75}),
        (("--tta",), {"tta": True}),
        (("--no-tta",), {}),
        (("--window", "whole"), {"window": "whole"}),
        (("--window", "12,10,8"), {"window": (12, 10, 8)}),
        (("--parallel", "model", "--devices", "cpu,cpu"), {}),
        (("--devices", "cpu,cpu,cpu"), {}),
    ],
    ids=str,
)
def test_options_reach_the_windows(scan, checkpoint, predicting, options, changes):
    assert run(*predicting, scan, *options, "-o", "found.nii") == 0
    expected = segmented(scan, checkpoint, **{"window": (8, 8, 8), "overlap": 0.5, **changes})
    np.testing.assert_array_equal(labels("found.nii"), expected)
    assert (segmented(scan, checkpoint) != expected).any() == bool(changes)


@pytest.mark.parametrize(
    ("options", "is_mirrored"), [((), True), (("--tta",), True), (("--no-tta",), False)], ids=str
)
def test_mirror_images_are_those_of_the_network_unless_asked_otherwise(
    scan, options, is_mirrored, caplog
):
    network = write_checkpoint(Path("network.pt"), changes=("inference.tta=true",))
    arguments = ("predict", scan, "--checkpoint", network, "--devices", "cpu", "--window", "8,8,8")
    assert run(*arguments, "-o", "found.nii", *options) == 0
    said = "each window is predicted 4 times, mirrored along Y, Z"
    assert (said in caplog.text) == is_mirrored
    expected = segmented(scan, network, window=(8, 8, 8), tta=is_mirrored)
    np.testing.assert_array_equal(labels("found.nii"), expected)


def test_every_setting_of_prediction_is_that_of_the_network():
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


def test_components_are_kept_on_request(scan):
    network = write_checkpoint(Path("network.pt"), patch_size=(8, 8, 8), postprocessing=((1,),))
    arguments = ("predict", scan, "--checkpoint", network, "--devices", "cpu")
    assert run(*arguments, "-o", "kept.nii") == 0
    assert run(*arguments, "-o", "all.nii", "--no-postprocessing") == 0
    kept, everything = (read_label(name).array for name in ("kept.nii", "all.nii"))
    assert not np.array_equal(kept, everything)
    keep_largest(everything, [(1,)])
    np.testing.assert_array_equal(kept, everything)


# What cannot be


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("absent.nii.gz",), "absent.nii.gz: No such file"),
        (("empty",), "empty holds no volumes"),
        (("scan.dcm",), "scan.dcm is not named like a volume"),
        *(
            (("a scan.nii.gz", "--window", window), "or three whole numbers")
            for window in ("0,8,8", "8,8", "wide")
        ),
        (("a scan.nii.gz", "--precision", "float16"), "precision=float16 needs a GPU"),
        (("a scan.nii.gz", "--checkpoint", "text.pt"), "text.pt is not a checkpoint"),
        (
            ("a scan.nii.gz", "--checkpoint", "absent.pt"),
            "cannot read the checkpoint absent.pt: No such file",
        ),
        (
            ("a scan.nii.gz", "--checkpoint", "other.pt"),
            "other.pt cannot be averaged with {checkpoint}: its spacing_mm is [1.0, 1.0",
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("scan")
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    options, words, checkpoint, predicting, capsys
):
    Path("empty").mkdir()
    Path("scan.dcm").touch()
    Path("text.pt").write_text("no network")
    write_checkpoint(Path("other.pt"), spacing_mm=(1.0, 1.0, 1.0))
    before = sorted(Path().iterdir())
    line = refusal(capsys, *predicting, *options)
    assert words.format(checkpoint=checkpoint) in line
    assert "--window" not in options or "--window is " in line
    assert sorted(Path().iterdir()) == before
