"""``unet3d predict`` as a user meets it."""

import errno
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.command_line import labels_of, names_in, refusal, run, scan_array
from tests.images.samples import write_json, write_volume
from tests.networks import random_checkpoint, set_to, write_checkpoint
from tests.products import by_night
from unet3d.config import InferenceSettings, ParallelSettings, load_config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inference.networks import Networks
from unet3d.inference.predictor import Predictor
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scans import Scan, read_scan
from unet3d.runs.checkpoint import load_checkpoint, save_checkpoint


def segmented(scan, *checkpoints, **inference):
    """Return how a predictor segments a scan with settings, without the command line."""
    settings = InferenceSettings(**inference)
    networks = Networks.of(*(set_to(load_checkpoint(one), settings) for one in checkpoints))
    predictor = Predictor(networks, ParallelSettings(devices=("cpu",)))
    return predictor.segment(read_scan(Scan(images=(scan,), output=scan)))


# Which network


def test_the_newest_finished_run_is_used_and_named(folder, scan, capsys):
    line = refusal(capsys, "predict", scan)
    assert f"{folder / 'runs'} has no finished run" in line
    assert "--checkpoint FILE" in line and "unet3d train" in line
    for age, name in enumerate(("newest", "middle", "oldest")):
        write_checkpoint(Path("runs", name, "checkpoint-latest.pt"), patch_size=(8, 8, 8))
        if name != "newest":  # the newest run is still in progress
            summary = write_json(Path("runs", name, "summary.json"), {})
            os.utime(summary, (1e9 - age, 1e9 - age))
    write_checkpoint(Path("runs/middle/checkpoint-best.pt"), patch_size=(8, 8, 8))
    assert run("predict", scan, "--devices", "cpu") == 0
    assert capsys.readouterr().out.startswith("using runs/middle/checkpoint-latest.pt\n")
    for name in ("newest", "middle", "oldest"):
        write_json(Path("runs", name, "data.json"), {"dataset": "/data/a"})
    assert run("predict", scan, "--devices", "cpu", "--overwrite") == 0
    capsys.readouterr()
    for name in ("newest", "oldest"):  # the newest is in progress, and counts, too
        write_json(Path("runs", name, "data.json"), {"dataset": "/data/b"})
        assert refusal(capsys, "predict", scan, "--overwrite") == (
            "Error: runs/ has runs of 2 data sets; add one of --checkpoint runs/middle (trained on "
            f"/data/a), --checkpoint runs/{name} (trained on /data/b)"
        )
        write_json(Path("runs", name, "data.json"), {"dataset": "/data/a"})
    Path("data").mkdir()  # a data set may be named by its folder, or by its file
    for name, dataset in (("newest", "data/dataset.json"), ("middle", "data"), ("oldest", "data")):
        write_json(Path("runs", name, "data.json"), {"dataset": str(folder / dataset)})
    write_json(Path("runs/killed/data.json"), {"dataset": "/data/b"})  # it has no checkpoint
    Path("runs/killed/config.yaml").touch()
    assert run("predict", scan, "--devices", "cpu", "--overwrite") == 0
    line = refusal(capsys, "predict", scan, "--checkpoint", "runs", "--overwrite")
    assert "runs holds no checkpoint: neither checkpoint-latest.pt nor checkpoint-best.pt" in line


def test_folds_are_averaged_and_named(scan, capsys):
    names = [f"runs/mine/fold{fold}/checkpoint-latest.pt" for fold in (0, 1)]
    for seed, name in enumerate(names, start=1):
        write_checkpoint(Path(name), patch_size=(8, 8, 8), seed=seed)
        write_json(Path(name).with_name("summary.json"), {})
    write_json(Path("runs/mine/summary.json"), {})
    mean = segmented(scan, *map(Path, names))
    options = ("predict", scan, "--devices", "cpu", "--statistics", "--overwrite")
    for choice in (
        (),  # default: the newest finished run
        ("-c", "runs/mine"),
        ("--checkpoint", names[0], "--checkpoint", "runs/mine/fold1", "--checkpoint", names[0]),
    ):
        assert run(*options, *choice) == 0
        said = f"using the mean of 2 networks: {', '.join(names)}\n"
        assert capsys.readouterr().out.startswith(said)
        assert json.loads(Path("a scan_seg.json").read_text())["checkpoints"] == names
        np.testing.assert_array_equal(labels_of("a scan_seg.nii.gz"), mean)
    assert run(*options, "--checkpoint", names[0]) == 0
    assert (mean != labels_of("a scan_seg.nii.gz")).any()


def test_a_run_of_one_fold_answers_to_its_number_and_to_all(scan, capsys):
    options = ("predict", scan, "--devices", "cpu", "--overwrite", "--checkpoint")
    name = write_checkpoint(Path("run/checkpoint-latest.pt"), patch_size=(8, 8, 8))
    write_json(Path("run/data.json"), {"unet3d": "0.1.0", "fold": 2})
    for folds in ("2", "all"):
        assert run(*options, "run", "--folds", folds) == 0
        assert capsys.readouterr().out.startswith(f"using {name}\n")
    assert "run has no fold 0; it has 2" in refusal(capsys, *options, "run", "--folds", "0")


@pytest.mark.usefixtures("scans")
def test_a_network_that_cannot_be_read_ends_all_scans(into_out, capsys):
    """The description of the network can be read, so the fault only shows with the first scan."""
    other = write_checkpoint(Path("other.pt"), patch_size=(8, 8, 8))
    content = bytearray(other.read_bytes())
    weight = load_checkpoint(other).model["encoder.levels.0.0.conv.weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    other.write_bytes(content)
    assert run(*into_out, "--checkpoint", "other.pt") == 1
    lines = capsys.readouterr().err.splitlines()
    begins = [line.split(":")[0] for line in lines if "computing" not in line]
    assert begins == ["Not segmented", "Error"]
    assert "other.pt is not a checkpoint that can be used" in lines[-1]


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
    assert "is also an input" in line


def test_bad_scans_among_others_are_skipped_and_only_the_end_is_an_error(predicting, capsys):
    for name in ("cut", "first", "half", "last"):
        write_volume(Path(f"scans/{name}.nii.gz"), scan_array())
    cut = Path("scans/cut.nii.gz")
    cut.write_bytes(cut.read_bytes()[:-400])
    Path("scans/empty.nii.gz").touch()
    write_json(Path("out/half.json"), {})
    assert run(*predicting, "scans", "--statistics", "-o", "out") == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    *skipped, error = captured.err.splitlines()
    reasons = ("out/half.json exists, but", "cannot read scans/cut", "scans/empty.nii.gz is")
    for line, reason in zip(skipped, reasons, strict=True):
        assert line.startswith(f"Skipped: {reason}")
    bad = ", ".join(f"scans/{name}.nii.gz" for name in ("half", "cut", "empty"))
    assert error == f"Error: 3 of 5 scans could not be segmented: {bad}"
    assert names_in("out", "*.nii.gz") == ["first.nii.gz", "last.nii.gz"]
    assert "empty.nii.gz is empty" in refusal(capsys, *predicting, "scans/empty.nii.gz")


def test_a_wrong_unit_is_refused_and_the_other_scans_are_segmented(folder, capsys):
    """A header in metres, or a network whose spacing is a thousandth of the scan's."""
    write_volume(Path("scans/good.nii.gz"), scan_array())
    metres = nib.Nifti1Image(scan_array(), np.eye(4))
    metres.header.set_xyzt_units("meter")
    nib.save(metres, "scans/metres.nii.gz")
    at_1_mm = write_checkpoint(Path("1.pt"), patch_size=(8, 8, 8), spacing_mm=(1, 1, 1))
    at_1_um = write_checkpoint(Path("2.pt"), patch_size=(8, 8, 8), spacing_mm=(1e-3,) * 3)
    cause = (
        "voxels of {0}x{0}x{0} mm would become 14000x13000x12000 of {1}x{1}x{1} mm, which is far"
    )
    options = ("--devices", "cpu", "-o", "out")
    assert run("predict", "--checkpoint", at_1_mm, "scans", *options) == 1
    skipped, _ = capsys.readouterr().err.splitlines()
    assert skipped.startswith("Skipped: scans/metres.nii.gz: 14x13x12 ")
    assert cause.format(1000, 1) in skipped and "fix the spacing or its unit in the he" in skipped
    assert names_in("out") == ["good.nii.gz"]
    for scan, network, sizes in (("metres", at_1_mm, (1000, 1)), ("good", at_1_um, (1, 0.001))):
        asked = (f"scans/{scan}.nii.gz", "--checkpoint", network)
        for command in (("predict", *asked, "-o", "other"), ("plan", "--predict", *asked)):
            line = refusal(capsys, *command, "--devices", "cpu")
            assert f"scans/{scan}.nii.gz: 14x13x12 " in line and cause.format(*sizes) in line


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


def while_segmenting(monkeypatch, name, act):
    """Call a function while a scan is segmented; return a list of the scans that are segmented."""
    segment, names = Predictor.segment, []

    def segment_and_act(self, image, *more):
        names.append(image.image.geometry.path.name)
        if image.image.geometry.path.name == name:
            act()
        return segment(self, image, *more)

    monkeypatch.setattr(Predictor, "segment", segment_and_act)
    return names


@pytest.mark.usefixtures("scans")
def test_two_predictions_share_a_folder_and_what_exists_is_kept(into_out, monkeypatch, capsys):
    def other_process():
        for name in "ac":
            Path(f"out/{name}.nii.gz").write_text("theirs")

    Path("out").mkdir()
    Path("out/b.nii.gz").write_text("theirs")
    names = while_segmenting(monkeypatch, "a.nii.gz", other_process)
    assert run(*into_out) == 0
    # b was there at first, a came while we segmented it, and c came before its turn.
    lines = [line.split(" (") for line in capsys.readouterr().out.splitlines()[1:]]
    expected = [f"scans/{name}.nii.gz -> out/{name}.nii.gz" for name in "bacd"]
    assert [line for line, _ in lines] == expected
    kept = [how == "kept; --overwrite replaces it)" for _, how in lines]
    assert kept == [True, True, True, False]
    assert names == ["a.nii.gz", "d.nii.gz"]
    theirs = {path.name[0]: path.read_bytes() == b"theirs" for path in Path("out").iterdir()}
    assert theirs == {"a": True, "b": True, "c": True, "d": False}
    assert run(*into_out, "--overwrite") == 0
    assert "kept" not in capsys.readouterr().out
    assert labels_of("out/b.nii.gz").shape == (14, 13, 12)


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.usefixtures("scans")
def test_after_an_interruption_the_rest_is_named(into_out, monkeypatch, capsys, overwrite):
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
    assert names_in("out") == ["a.nii.gz", "b.nii.gz"]


@pytest.mark.parametrize("error", [MemoryError("no 8 TiB"), OSError(errno.EIO, "odd")], ids=str)
@pytest.mark.usefixtures("scans")
def test_whatever_is_explained_does_not_end_a_folder(into_out, error, monkeypatch, capsys):
    def fail():
        raise error

    while_segmenting(monkeypatch, "b.nii.gz", fail)
    assert run(*into_out) == 1
    skipped, last = capsys.readouterr().err.splitlines()
    assert skipped.startswith("Skipped: scans/b.nii.gz: ")
    assert last == "Error: 1 of 4 scans could not be segmented: scans/b.nii.gz"
    assert len(names_in("out")) == 3


# What it takes and what it writes


def test_files_of_an_earlier_segmentation_are_pointed_out(scan, predicting, caplog):
    assert run(*predicting, scan, "--statistics", "--preview", "--probabilities") == 0
    assert "existed before" not in caplog.text
    assert run(*predicting, scan, "--overwrite") == 0
    for ending in (".json", ".png", ".npy"):
        assert f"a scan_seg{ending} existed before and may belong to another" in caplog.text


def test_a_terminal_counts_windows_and_a_log_does_not(scans, into_out, monkeypatch, capsys):
    assert run(*into_out) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 + len(scans) and not captured.err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert run(*into_out, "--overwrite") == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 + len(scans)
    assert "window 18/18" in captured.err and "a.nii.gz (1/4): writing" in captured.err


# Settings


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (("--overlap", 0.75), {"overlap": 0.75}),
        (("--tta",), {"tta": True}),
        (("--window", "12,10,8"), {"window": (12, 10, 8)}),
        (("--parallel", "model", "--devices", "cpu,cpu"), {}),
        *by_night(((), {}), (("--window", "whole"), {"window": "whole"})),
        *by_night((("--devices", "cpu,cpu,cpu"), {})),
    ],
    ids=str,
)
def test_options_reach_the_windows(scan, checkpoint, predicting, options, changes):
    assert run(*predicting, scan, *options, "-o", "found.nii") == 0
    expected = segmented(scan, checkpoint, **{"window": (8, 8, 8), "overlap": 0.5, **changes})
    np.testing.assert_array_equal(labels_of("found.nii"), expected)
    assert (segmented(scan, checkpoint) != expected).any() == bool(changes)


def test_every_setting_of_prediction_is_that_of_the_network():
    given = {
        **{"window": (24, 16, 8), "overlap": 0.25, "batch_size": 3, "precision": "float32"},
        **{"tta": True, "averaging": "logits", "postprocessing": False},
    }
    assert given.keys() == InferenceSettings.model_fields.keys()
    config = load_config(None).with_values({f"inference.{k}": v for k, v in given.items()})
    checkpoint = replace(random_checkpoint(), config=config)
    save_checkpoint(checkpoint, Path("network.pt"))

    def settings(**asked):
        request = PredictionRequest(settings={f"inference.{k}": v for k, v in asked.items()})
        (network,) = Networks.read(
            [Path("network.pt")], Group(Ranks()), request.inference
        ).described
        return network.config.inference

    assert settings() == InferenceSettings(**given)
    asked = {"tta": False, "window": "whole", "overlap": 0.5, "postprocessing": True}
    assert settings(**asked) == InferenceSettings(**{**given, **asked})
