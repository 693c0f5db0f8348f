"""The examples run as their documents say, at sizes where a CPU is enough."""

import json
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from matplotlib.image import imread
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("devices", ["cpu,cpu", pytest.param("0,1", marks=pytest.mark.multigpu)])
@pytest.mark.nightly
def test_resnet50_in_two_stages(devices, tmp_path, monkeypatch, capsys):
    """Run the example's file in this process, which has imported MONAI already."""
    picture, record_path = tmp_path / "times.png", tmp_path / "times.json"
    options = f"--devices {devices} --shape 17,17,17 --width 0.0625 --batch-size 4 --steps 3"
    outputs = ("--output", str(picture), "--json", str(record_path))
    example = str(ROOT / "examples" / "resnet50_two_stages.py")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [example, *options.split(), *outputs])
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
        # Network and batch are the same for every split.
        assert row["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=1e-2)
        milliseconds = 1000 * statistics.median(row["seconds"])
        assert f"{milliseconds:.1f}" in output and f"{row['first_loss']:.4f}" in output
    assert f"cut before {record['cut_before'][0]}" in output
    height, width, _ = imread(picture).shape
    assert width > height > 100


def test_wrong_options_are_explained_in_a_line(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from resnet50_two_stages import main

    for arguments, message in [
        ("--devices cpu,tpu", "Error: device 'tpu' is unknown"),
        ("--devices cpu", "is one device"),
        ("--devices cpu,cpu --splits 5", "do not divide a batch of 12"),
        ("--devices cpu,cpu --splits 1,x", "'1,x' are not whole numbers"),
        ("--devices cpu,cpu --shape 16,32,32", "three sizes above 16"),
    ]:
        done = CliRunner().invoke(main, arguments.split())
        assert done.exit_code in (1, 2) and isinstance(done.exception, SystemExit)
        assert message in done.output


def test_the_network_of_the_documents_is_cut_and_trained():
    text = (ROOT / "docs" / "concepts" / "pipeline.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(code, names)
    executor, image, target = names["executor"], names["image"], names["target"]
    assert [len(slot.blocks) > 0 for slot in executor.slots] == [True, True]
    expected = functional.cross_entropy(names["network"](image), target)
    torch.testing.assert_close(names["loss"], expected.detach())
    assert all(parameter.grad is not None for parameter in names["chain"].parameters())
