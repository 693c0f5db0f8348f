"""``unet3d plan`` as a user meets it; what it predicts and measures is tested elsewhere."""

import json
from pathlib import Path

import pytest

from tests.command_line import refusal, run
from unet3d.planning import comparison

SMALL = (
    *("--shape", "16,16,16", "--set", "model.base_channels=4", "--set", "model.num_levels=2"),
    *("--device-memory", "1"),
)


@pytest.fixture(autouse=True)
def largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the time of looking for the largest volume."""
    monkeypatch.setattr(comparison, "largest_size", lambda *_: (64, 64, 32))


def test_options_reach_the_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--devices", "cuda:0,cuda:1", "--batch-size", 4, "--micro-batches", 2)
    assert run("plan", *SMALL, *options, "--json", "plan.json") == 0
    record = json.loads((folder / "plan.json").read_text())
    assert record["shape"] == [16, 16, 16] and record["batch_size"] == 4
    (asked,) = (way for way in record["ways"] if way["asked"])
    assert (asked["parallel"], asked["num_micro_batches"]) == ("model", 2)  # by its two devices
    assert [slot["device"] for slot in asked["slots"]] == ["cuda:0", "cuda:1"]
    assert {slot["device_bytes"] for way in record["ways"] for slot in way["slots"]} == {2**30}
    lines = capsys.readouterr().out.splitlines()
    start = "--parallel model --devices cuda:0,cuda:1 --micro-batches 2"
    assert f"{start}: up to 64x64x32 voxels (asked for)" in lines


def test_a_record_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "plan", *SMALL, "--devices", "cpu", "--json", "absent/plan.json")
    assert "cannot write absent/plan.json: No such file or directory" in line
