"""``unet3d evaluate`` and ``unet3d check`` as a user meets them."""

import json
from pathlib import Path

import pytest

from tests.command_line import refusal, run
from tests.volumes.samples import blob_label, write_msd, write_volume


def test_check_of_a_sound_data_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_msd(folder / "data")
    assert run("check", "data", "--json", "findings.json") == 0
    assert capsys.readouterr().out == "3 cases, 0 errors, 0 warnings\n"
    assert json.loads(Path("findings.json").read_text()) == {"findings": []}


def test_evaluate_explains_what_does_not_match(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = write_volume(folder / "labels/x.nii.gz", blob_label((9, 8, 7)))
    other = write_volume(folder / "predictions/y.nii.gz", blob_label((9, 8, 6)))
    assert run("evaluate", label, label) == 0
    assert "1.000" in capsys.readouterr().out
    assert "y" in refusal(capsys, "evaluate", "predictions", "labels")
    line = refusal(capsys, "evaluate", other, label)
    assert str(other) in line and str(label) in line and "9x8x6" in line
    assert "absent" in refusal(capsys, "evaluate", "absent", "labels")


def test_scores_that_cannot_be_written_are_refused_before_they_are_computed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "taken").mkdir()
    for command in (("evaluate", "absent", "labels"), ("check", "absent")):
        line = refusal(capsys, *command, "--json", "nowhere/scores.json")
        assert "cannot write nowhere/scores.json: No such file or directory" in line
        assert "cannot write taken: Is a directory" in refusal(capsys, *command, "--json", "taken")
