"""``unet3d evaluate`` and ``unet3d check`` as a user meets them."""

import json
import os
from pathlib import Path

from tests.command_line import refusal, run
from tests.trainings import contents
from tests.volumes.samples import blob_label, write_msd, write_volume


def test_check_of_a_sound_data_set(monkeypatch, capsys):
    write_msd(Path("data"))
    told: list[str] = []
    monkeypatch.setattr("rich.status.Status.update", lambda self, text: told.append(str(text)))
    assert run("check", "data", "--json", "findings.json") == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("3 cases, 0 errors, 0 warnings\n", "")
    assert json.loads(Path("findings.json").read_text()) == {"findings": []}
    assert told == ["reading headers", *(f"checking case_{n}, {n + 1} of 3" for n in range(3))]


def test_evaluate_explains_what_does_not_match(capsys):
    label = write_volume(Path("labels/x.nii.gz"), blob_label((9, 8, 7)))
    other = write_volume(Path("predictions/y.nii.gz"), blob_label((9, 8, 6)))
    assert run("evaluate", label, label) == 0
    assert "1.000" in capsys.readouterr().out
    assert "y" in refusal(capsys, "evaluate", "predictions", "labels")
    line = refusal(capsys, "evaluate", other, label)
    assert str(other) in line and str(label) in line and "9x8x6" in line
    assert "absent" in refusal(capsys, "evaluate", "absent", "labels")


def test_scores_that_cannot_be_written_are_refused_before_they_are_computed(capsys):
    Path("taken").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to("other.json")
    for command in (("evaluate", "absent", "labels"), ("check", "absent")):
        line = refusal(capsys, *command, "--json", "nowhere/scores.json")
        assert "cannot write nowhere/scores.json: No such file or directory" in line
        assert "cannot write taken: Is a directory" in refusal(capsys, *command, "--json", "taken")
        for name in ("pipe", "link"):
            line = refusal(capsys, *command, "--json", name)
            assert f"cannot write {name}: it is not a regular file" in line
    assert Path("pipe").is_fifo() and Path("link").is_symlink()


def test_evaluate_says_what_has_no_segmentation(capsys):
    label = blob_label((9, 8, 7))
    for index in range(14):
        write_volume(Path(f"labels/case_{index:02d}.nii.gz"), label)
    write_volume(Path("segmentations/case_05_seg.nii.gz"), label)
    assert run("evaluate", "segmentations", "labels", "--json", "scores.json") == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == (
        "13 of the 14 label maps in labels have no segmentation and do not count: "
        "case_00, case_01, case_02, case_03, case_04, case_06, case_07, case_08 and 5 more"
    )
    scores = json.loads(Path("scores.json").read_text())
    assert len(scores["cases"]) == 1 and len(scores["without_prediction"]) == 13
    for index in range(14):
        write_volume(Path(f"segmentations/case_{index:02d}_seg.nii.gz"), label)
    assert run("evaluate", "segmentations", "labels") == 0
    assert "no segmentation" not in capsys.readouterr().out


def test_a_terminal_shows_how_many_cases_are_compared(monkeypatch, capsys):
    label = write_volume(Path("labels/x.nii.gz"), blob_label((9, 8, 7)))
    assert run("evaluate", label, label) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert run("evaluate", label, label) == 0
    assert "evaluating" in capsys.readouterr().err


def test_results_are_not_written_over_what_they_are_made_from(capsys):
    label = write_volume(Path("labels/x.nii.gz"), blob_label((9, 8, 7)))
    write_msd(Path("data"))
    Path("link.json").symlink_to("data/dataset.json")
    before = contents(Path())
    for command in (
        ("evaluate", label, label, "--json", label),
        ("evaluate", "labels", "labels", "--json", "labels"),
        ("check", "data", "--json", "data/dataset.json"),
        ("check", "data", "--json", "link.json"),
        ("check", "data/dataset.json", "--json", "data/dataset.json"),
    ):
        assert "is no place for the results" in refusal(capsys, *command)
    assert contents(Path()) == before


def test_results_that_fail_without_a_reason_of_the_system_have_one(monkeypatch, capsys):
    def fail(*_):
        raise OSError("encoder error -2")

    write_msd(Path("data"))
    monkeypatch.setattr("unet3d.cli.output.write_atomically", fail)
    line = refusal(capsys, "check", "data", "--json", "findings.json")
    assert "cannot write findings.json: encoder error -2" in line


def test_labels_are_named_by_the_data_set_that_they_lie_in(capsys):
    write_msd(Path("data"))
    for number in range(3):
        label = Path(f"data/labelsTr/case_{number}.nii.gz")
        Path(f"case_{number}_seg.nii.gz").write_bytes(label.read_bytes())
    assert run("evaluate", "case_1_seg.nii.gz", "data/labelsTr", "--json", "scores.json") == 0
    out = capsys.readouterr().out
    assert "left" in out and "right" in out and "dataset.json" in out and "NSD" in out
    scores = json.loads(Path("scores.json").read_text())
    assert {key: mean["name"] for key, mean in scores["mean"].items()} == {
        "1": "left",
        "2": "right",
    }
    assert scores["mean"]["1"]["nsd"] == 1.0 and scores["tolerance_mm"] == 1.0

    tree = {"labels": {"both": [1, 2], "ignore": 7}, "regions_class_order": [1]}
    Path("regions.json").write_text(json.dumps(tree))
    arguments = ("evaluate", "case_1_seg.nii.gz", "data/labelsTr", "--json", "scores.json")
    assert run(*arguments, "--dataset", "regions.json", "--tolerance-mm", "2.5") == 0
    assert "both" in capsys.readouterr().out
    scores = json.loads(Path("scores.json").read_text())
    assert (scores["ignore"], scores["tolerance_mm"]) == (7, 2.5)
    assert {key: mean["name"] for key, mean in scores["mean"].items()} == {"1,2": "both"}
    assert "--ignore 2 is a label" in refusal(
        capsys, *arguments, "--dataset", "regions.json", "--ignore", "2"
    )
    assert "is no place" in refusal(
        capsys, *arguments[:3], "--dataset", "regions.json", "--json", "regions.json"
    )
    assert "cannot read absent" in refusal(capsys, *arguments, "--dataset", "absent")


def test_a_description_that_nobody_named_and_nobody_understands_is_only_a_warning(capsys, caplog):
    label = write_volume(Path("data/labelsTr/x.nii.gz"), blob_label((9, 8, 7)))
    Path("data/dataset.json").write_text("{")
    assert run("evaluate", label, label, "--json", "scores.json") == 0
    (warning,) = caplog.messages
    assert "labels have no names" in warning and "is not valid JSON" in warning
    assert json.loads(Path("scores.json").read_text())["mean"]["1"]["name"] is None
    assert "is not valid JSON" in refusal(capsys, "evaluate", label, label, "--dataset", "data")


def test_an_ignored_value_counts_nowhere(capsys):
    array = blob_label((9, 8, 7))
    prediction = write_volume(Path("p.nii.gz"), array)
    marked = array.copy()
    marked[0, 0, 0] = 9
    label = write_volume(Path("l.nii.gz"), marked)
    assert run("evaluate", prediction, label, "--json", "scores.json") == 0
    assert json.loads(Path("scores.json").read_text())["mean"].keys() == {"1", "2", "9"}
    assert run("evaluate", prediction, label, "--ignore", "9", "--json", "scores.json") == 0
    scores = json.loads(Path("scores.json").read_text())
    assert scores["mean"].keys() == {"1", "2"} and scores["mean_dice"] == 1.0


def test_segmentations_without_label_map_are_left_out_on_request(capsys):
    label = blob_label((9, 8, 7))
    for name in ("labels/a", "labels/b", "segmentations/a_seg", "segmentations/z_seg"):
        write_volume(Path(f"{name}.nii.gz"), label)
    assert "--leave-out" in refusal(capsys, "evaluate", "segmentations", "labels")
    assert run("evaluate", "segmentations", "labels", "--leave-out") == 0
    *_, without_prediction, without_label = capsys.readouterr().out.splitlines()
    assert without_prediction == (
        "1 of the 2 label maps in labels have no segmentation and do not count: b"
    )
    assert without_label == (
        "1 of the 2 segmentations in segmentations have no label map and do not count: z_seg"
    )
