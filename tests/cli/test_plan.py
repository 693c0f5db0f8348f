"""``unet3d plan`` as a user meets it; what it predicts and measures is tested elsewhere."""

import json
from pathlib import Path

import pytest

from tests.command_line import refusal, run
from tests.volumes.samples import write_msd
from unet3d.planning import comparison, placements

SMALL = (
    *("--shape", "16,16,16", "--set", "model.base_channels=4", "--set", "model.num_levels=2"),
    *("--device-memory", "1"),
)


@pytest.fixture(autouse=True)
def largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the time of looking for the largest volume."""
    monkeypatch.setattr(placements, "largest_size", lambda *_: (64, 64, 32))


def test_options_reach_the_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--devices", "cuda:0,cuda:1", "--batch-size", 4, "--micro-batches", 2)
    options += ("--parallel", "model")
    assert run("plan", *SMALL, *options, "--json", "plan.json") == 0
    record = json.loads((folder / "plan.json").read_text())
    assert record["shape"] == [16, 16, 16] and record["batch_size"] == 4
    (asked,) = (way for way in record["ways"] if way["asked"])
    assert (asked["parallel"], asked["num_micro_batches"]) == ("model", 2)
    assert [slot["device"] for slot in asked["slots"]] == ["cuda:0", "cuda:1"]
    assert {slot["device_bytes"] for way in record["ways"] for slot in way["slots"]} == {2**30}
    lines = capsys.readouterr().out.splitlines()
    start = "--parallel model --devices cuda:0,cuda:1 --micro-batches 2"
    assert f"{start}: up to 64x64x32 voxels (asked for)" in lines


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent/plan.json", "No such file or directory"),
        ("file/plan.json", "Not a directory"),
        ("taken", "Is a directory"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_anything_is_predicted(
    name: str,
    reason: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison, "compare", None)
    (folder / "taken").mkdir()
    (folder / "file").touch()
    for options in (("--json", name), ("--measure", "--picture", name)):
        line = refusal(capsys, "plan", "--shape", "16,16,16", *options)
        assert f"cannot write {name}: {reason}" in line
    assert sorted(path.name for path in folder.iterdir()) == ["file", "taken"]


def test_results_are_not_written_over_what_they_are_made_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_msd(folder / "data")
    (folder / "my.yaml").write_text("{}")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for options in (
        ("data", "--json", "data/dataset.json"),
        ("data/dataset.json", "--json", "data/dataset.json"),
        ("--config", "my.yaml", "--json", "my.yaml"),
        ("--config", "my.yaml", "--measure", "--picture", "my.yaml"),
        ("--measure", "--picture", "x", "--json", "x"),
        ("data", "--json", "data/imagesTr/case_0.nii.gz"),
    ):
        assert "is no place for the results" in refusal(capsys, "plan", *options)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_file_that_is_there_is_kept_until_the_new_one_is_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "plan.json").write_text("an older one")
    refusal(capsys, "plan", "--shape", "1,1,1", "--json", "plan.json")
    assert (folder / "plan.json").read_text() == "an older one"


@pytest.mark.parametrize("options", [(), ("--measure",)], ids=str)
def test_a_network_that_the_host_cannot_hold_is_refused(
    options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(
        capsys,
        *("plan", "--devices", "cpu", "--shape", "8,8,8", "--set", "model.base_channels=65536"),
        *("--set", "model.max_channels=65536", *options),
    )
    assert "a network with 65536, 65536 channels takes" in said


def test_the_table_comes_before_the_search_and_each_line_as_it_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def search(*_: object) -> tuple[int, int, int]:
        shown.append(capsys.readouterr().out)
        return 64, 64, 32

    monkeypatch.setattr(placements, "largest_size", search)
    assert run("plan", *SMALL, "--devices", "0,1") == 0
    before_first, before_second, *_ = shown
    assert "Predicted memory" in before_first and "up to" not in before_first
    assert before_second.startswith("--parallel none --devices cuda:0 --micro-batches 1: ")
    assert "ms a step, up to 64x64x32 voxels" in before_second
    assert len(before_second.splitlines()) == 1


def test_a_terminal_shows_what_is_being_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", *SMALL, "--devices", "0,1") == 0
    assert capsys.readouterr().err == ""  # nothing into a log
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert run("plan", *SMALL, "--devices", "0,1") == 0
    err = capsys.readouterr().err
    assert "predicting the memory of" in err
    assert "searching for the largest volume with model, 1 micro-batch(es)" in err


def test_a_shape_that_is_rounded_up_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--shape", "15,16,16", *SMALL[2:], "--devices", "0")
    assert run("plan", *options, "--json", "plan.json") == 0
    note = "patches.size 15x16x16 is rounded up to 16x16x16, multiples of 2x2x2"
    assert note in capsys.readouterr().out
    rounded, planned = json.loads((folder / "plan.json").read_text())["notes"]
    assert note in rounded
    assert planned.startswith("patches of 16x16x16 voxels (as set), ")
    assert run("plan", *SMALL, "--devices", "0") == 0
    assert "rounded" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "channels", "is_cpu"),
    [
        (("--devices", "cpu"), [8, 16, 32], True),
        (("--devices", "cpu,cpu"), [8, 16, 32], True),
        (("--devices", "0", "--device-memory", "1"), [32, 64, 128], False),
        (("--devices", "cpu,0", "--device-memory", "1"), [32, 64, 128], False),
        (("--device-memory", "1"), [32, 64, 128], False),
        (("--devices", "cpu", "--config", "empty.yaml"), [32, 64, 128], False),
    ],
    ids=str,
)
def test_the_settings_are_those_that_training_would_take(
    options: tuple[str, ...],
    channels: list[int],
    is_cpu: bool,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "empty.yaml").touch()
    assert run("plan", "--shape", "16,16,16", *options, "--json", "plan.json") == 0
    assert json.loads((folder / "plan.json").read_text())["channels"] == channels
    assert ("for a CPU, without --config" in capsys.readouterr().out) == is_cpu
