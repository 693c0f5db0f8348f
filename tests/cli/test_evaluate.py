"""``unet3d evaluate`` and ``unet3d check`` as a user meets them."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import refusal, run
from tests.images.samples import blob_label, write_msd, write_volume
from tests.trainings import contents


def test_check_of_a_sound_data_set(monkeypatch, capsys):
    write_msd(Path("data"))
    told = []
    monkeypatch.setattr("rich.status.Status.update", lambda self, text: told.append(str(text)))
    assert run("check", "data", "--json", "findings.json") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "3 cases, 0 errors, 0 warnings" and not captured.err
    assert json.loads(Path("findings.json").read_text())["findings"] == []
    assert told == ["reading headers", *(f"checking case_{n}, {n + 1} of 3" for n in range(3))]


def test_check_finds_what_training_would_refuse_of_the_cases(capsys):
    write_msd(Path("one"), num_cases=1)
    line = refusal(capsys, "check", "one", "--json", "findings.json")
    assert line == "Error: one: 1 case, 1 error, 0 warnings; fix the errors before training"
    (finding,) = json.loads(Path("findings.json").read_text())["findings"]
    assert finding["case"] == "one" and "it needs two, one to train on and" in finding["message"]
    assert finding["message"] in refusal(capsys, "train", "one", "--devices", "cpu")
    assert run("check", "one", "--set", "data.fold=none") == 0


def test_evaluate_explains_what_does_not_match(capsys):
    label = write_volume(Path("labels/x.nii.gz"), blob_label((9, 8, 7)))
    other = write_volume(Path("predictions/y.nii.gz"), blob_label((9, 8, 6)))
    assert run("evaluate", label, label) == 0
    captured = capsys.readouterr()
    assert "1.000" in captured.out and not captured.err
    assert "y" in refusal(capsys, "evaluate", "predictions", "labels")
    line = refusal(capsys, "evaluate", other, label)
    assert str(other) in line and str(label) in line and "9x8x6" in line
    assert "absent" in refusal(capsys, "evaluate", "absent", "labels")


def test_evaluate_says_what_has_no_partner(capsys):
    label = blob_label((9, 8, 7))
    for index in range(14):
        write_volume(Path(f"labels/case_{index:02d}.nii.gz"), label)
    write_volume(Path("segmentations/case_05_seg.nii.gz"), label)
    command = ("evaluate", "segmentations", "labels", "--json", "scores.json", "--overwrite")
    assert run(*command) == 0
    *_, last = capsys.readouterr().out.splitlines()
    without_prediction = (
        "13 of the 14 label maps have no segmentation and do not count: "
        "case_00, case_01, case_02, case_03, case_04, case_06, case_07, case_08 and 5 more"
    )
    assert last == without_prediction
    scores = json.loads(Path("scores.json").read_text())
    assert len(scores["cases"]) == 1 and len(scores["without_prediction"]) == 13
    write_volume(Path("segmentations/z_seg.nii.gz"), label)
    assert "--leave-out" in refusal(capsys, *command)
    assert run(*command, "--leave-out") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        without_prediction,
        "1 of the 2 segmentations have no label map and do not count: z_seg",
    ]


def test_results_are_not_written_over_what_they_are_made_from(capsys):
    label = write_volume(Path("labels/x.nii.gz"), blob_label((9, 8, 7)))
    write_msd(Path("data"))
    Path("link.json").symlink_to("data/dataset.json")
    before = contents(Path())
    for command in (
        ("evaluate", label, label, "--json", label),
        ("check", "data", "--json", "data/dataset.json"),
        ("check", "data", "--json", "link.json"),
    ):
        assert "cannot hold the results" in refusal(capsys, *command)
    assert contents(Path()) == before


def test_a_tolerance_is_a_number(capsys):
    for tolerance in ("nan", "inf", "-1"):
        assert run("evaluate", "a", "b", "--tolerance-mm", tolerance) == 2
        assert "Invalid value for '--tolerance-mm'" in capsys.readouterr().err


def test_labels_are_named_by_the_data_set_that_they_lie_in(capsys):
    write_msd(Path("data"))
    for number in range(3):
        label = Path(f"data/labelsTr/case_{number}.nii.gz")
        Path(f"case_{number}_seg.nii.gz").write_bytes(label.read_bytes())
    assert run("evaluate", "case_1_seg.nii.gz", "data/labelsTr", "--json", "scores.json") == 0
    out, err = capsys.readouterr()
    assert "left" in out and "right" in out and "NSD" in out
    scores = json.loads(Path("scores.json").read_text())
    assert [mean["name"] for mean in scores["mean"].values()] == ["left", "right"]
    assert scores["mean"]["1"]["nsd"] == 1.0 and scores["tolerance_mm"] == 1.0
    tree = {"labels": {"both": [1, 2], "ignore": 7}, "regions_class_order": [1]}
    Path("regions.json").write_text(json.dumps(tree))
    arguments = ("evaluate", "case_1_seg.nii.gz", "data/labelsTr", "--dataset", "regions.json")
    assert run(*arguments, "--tolerance-mm", "2.5", "--json", "regional.json") == 0
    assert "both" in capsys.readouterr().out
    scores = json.loads(Path("regional.json").read_text())
    assert (scores["ignore"], scores["tolerance_mm"]) == (7, 2.5)
    assert {key: mean["name"] for key, mean in scores["mean"].items()} == {"1,2": "both"}
    assert "--ignore 2 is a label" in refusal(capsys, *arguments, "--ignore", "2")
    assert "cannot hold the results" in refusal(capsys, *arguments, "--json", "regions.json")
    assert "cannot read absent" in refusal(capsys, *arguments[:-1], "absent")


def test_a_description_that_nobody_named_and_nobody_understands_is_only_a_warning(capsys, caplog):
    label = write_volume(Path("data/labelsTr/x.nii.gz"), blob_label((9, 8, 7)))
    Path("data/dataset.json").write_text("{")
    assert run("evaluate", label, label, "--json", "scores.json") == 0
    (warning,) = caplog.messages
    assert "label values are shown without names" in warning and "is not valid JSON" in warning
    assert json.loads(Path("scores.json").read_text())["mean"]["1"]["name"] is None
    assert "is not valid JSON" in refusal(capsys, "evaluate", label, label, "--dataset", "data")


def test_an_ignored_value_counts_nowhere(capsys):
    array = blob_label((9, 8, 7))
    prediction = write_volume(Path("p.nii.gz"), array)
    array[0, 0, 0] = 9
    label = write_volume(Path("l.nii.gz"), array)
    for options, keys in (((), {"1", "2", "9"}), (("--ignore", "9"), {"1", "2"})):
        command = ("evaluate", prediction, label, *options, "--json", "scores.json")
        assert run(*command, "--overwrite") == 0
        scores = json.loads(Path("scores.json").read_text())
        assert scores["mean"].keys() == keys and (scores["mean_dice"] == 1.0) == bool(options)


def test_an_image_of_a_microscope_has_its_units_and_tolerance(capsys):
    """A voxel of 10 x 10 x 30 nm has 3e-6 µm3; JSON has mm and mL."""
    array = blob_label((9, 8, 7))
    label = write_volume(Path("l.nii.gz"), array, (1e-5, 1e-5, 3e-5))
    moved = write_volume(Path("p.nii.gz"), np.roll(array, 2, axis=0), (1e-5, 1e-5, 3e-5))
    assert run("evaluate", moved, label, "--json", "scores.json") == 0
    out = capsys.readouterr().out
    for words in ("HD95\n", "(nm)", "(20 nm)", "(µm³)", "within 20 nm, twice the spacing"):
        assert words.strip() in out, words
    scores = json.loads(Path("scores.json").read_text())
    assert scores["tolerance_mm"] == pytest.approx(2e-5)
    one = scores["mean"]["1"]
    assert one["label_ml"] == pytest.approx((array == 1).sum() * 3e-6 * 1e-12)
    assert one["hd95_mm"] == pytest.approx(2e-5) and one["nsd"] == 1.0
    command = ("evaluate", moved, label, "--tolerance-mm", "0.00001", "--json", "near.json")
    assert run(*command) == 0
    assert "twice the spacing" not in capsys.readouterr().out
    assert json.loads(Path("near.json").read_text())["mean"]["1"]["nsd"] < 1.0
