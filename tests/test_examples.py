"""The examples run as their documents say, at sizes where a CPU is enough."""

import json
import re
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from matplotlib.image import imread
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--shape", "17,17,17", "--width", "0.0625", "--batch-size", "4", "--steps", "3")


def check_sweep(
    devices: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the example's file as a program, in this process, which has imported MONAI already."""
    picture, record_path = folder / "times.png", folder / "times.json"
    options = ("--devices", devices, *SMALL, "--output", str(picture), "--json", str(record_path))
    example = str(ROOT / "examples" / "resnet50_two_stages.py")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [example, *options])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(example, run_name="__main__")
    output, errors = capsys.readouterr()
    assert ending.value.code == 0, errors
    record = json.loads(record_path.read_text())
    rows = record["rows"]
    assert [(row["name"], row["num_stages"], row["split_size"]) for row in rows] == [
        ("one device", 1, 4),
        ("2 stages in turn", 2, 4),
        ("2 stages pipelined", 2, 1),
        ("2 stages pipelined", 2, 2),
    ]
    for row in rows:
        assert len(row["seconds"]) == 3 and min(row["seconds"]) > 0
        # The same network and batch, whatever the split.
        assert row["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=1e-2)
        milliseconds = 1000 * statistics.median(row["seconds"])
        assert f"{milliseconds:.1f}" in output and f"{row['first_loss']:.4f}" in output
    assert f"cut before {record['cut_before'][0]}" in output
    height, width, _ = imread(picture).shape
    assert width > height > 100


def test_resnet50_in_two_stages_on_a_cpu(tmp_path, monkeypatch, capsys):
    check_sweep("cpu,cpu", tmp_path, monkeypatch, capsys)


@pytest.mark.multigpu
def test_resnet50_in_two_stages_on_two_gpus(tmp_path, monkeypatch, capsys):
    check_sweep("0,1", tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "cpu,tpu"), "Error: device 'tpu' is unknown"),
        (("--devices", "cpu"), "is one device"),
        (("--devices", "cpu,cpu", "--splits", "5"), "do not divide a batch of 12"),
        (("--devices", "cpu,cpu", "--splits", "1,x"), "'1,x' are not whole numbers"),
        (("--devices", "cpu,cpu", "--shape", "16,32,32"), "three sizes above 16"),
    ],
    ids=["device", "one device", "split", "numbers", "shape"],
)
def test_wrong_options_are_explained_in_a_line(arguments, message, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from resnet50_two_stages import main

    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code in (1, 2) and isinstance(done.exception, SystemExit)
    assert message in done.output


def test_the_network_of_the_documents_is_cut_and_trained():
    text = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    executor, image, target = names["executor"], names["image"], names["target"]
    assert [len(slot.blocks) > 0 for slot in executor.slots] == [True, True]
    expected = functional.cross_entropy(names["network"](image), target)
    torch.testing.assert_close(names["loss"], expected.detach())
    assert all(parameter.grad is not None for parameter in names["chain"].parameters())
