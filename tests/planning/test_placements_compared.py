"""``unet3d plan``: the compared ways, its output and record, and its errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import refusal, run
from unet3d.planning import placements

TINY = ("--set", "model.base_channels=4", "--set", "model.num_levels=2")

pytestmark = pytest.mark.usefixtures("launched")


def plan(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str
) -> tuple[dict[str, Any], str]:
    """Return the record that a command writes, and its output."""
    path = folder / "plan.json"
    status = run("plan", *arguments, "--json", str(path), "--overwrite")
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    record: dict[str, Any] = json.loads(path.read_text())
    return record, out


@pytest.fixture
def no_search(monkeypatch):
    """Instead of searching for the largest volume, return the MiB available for a patch."""

    def mib_for_a_patch(step, memory, _):
        mib = min(memory.values()) // 1024**2 // step.batch_size
        return mib, mib, mib

    monkeypatch.setattr(placements, "largest_size", mib_for_a_patch)


@pytest.mark.usefixtures("no_search")
def test_the_command_shows_every_way_side_by_side(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    record, out = plan(
        capsys,
        tmp_path,
        *("--shape", "64,64,32", "--devices", "0,1", "--batch-size", "2", "--micro-batches", "2"),
        *("--parallel", "model", "--device-memory", "1.7", *TINY),
    )
    assert (record["shape"], record["batch_size"]) == ([64, 64, 32], 2)
    ways = [(way["parallel"], way["num_micro_batches"], way["asked"]) for way in record["ways"]]
    assert ways == [
        ("none", 1, False),
        ("none", 2, False),
        ("spatial", 1, False),
        ("spatial", 2, False),
        ("model", 1, False),
        ("model", 2, True),
    ]
    for way in record["ways"]:
        peaks = [slot["predicted"]["peak_bytes"] for slot in way["slots"]]
        room = 0.2 if way["parallel"] == "spatial" else 0.7  # without the buffers of messages
        assert way["fits"] == (max(peaks) <= room * 1024**3)
        x, y, z = way["largest_shape"]
        assert f"up to {x}x{y}x{z} voxels" in out
        for slot in way["slots"]:
            assert slot["device_bytes"] == int(1.7 * 1024**3)
    assert "none, 1" in out and "model, 2*" in out
    table = out[: out.index("--parallel")]
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("yes") + table.count("NO") == 6
    assert record["choice"] is None


def ways_of(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str
) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the ways of a plan by name, and the command's output."""
    record, out = plan(capsys, folder, "--shape", "32,32,32", *arguments, *TINY)
    return {
        f"{way['replicas']} {way['parallel']} {way['num_micro_batches']}": way
        for way in record["ways"]
    }, out


@pytest.mark.usefixtures("no_search")
@pytest.mark.nightly
def test_shards_have_a_row_each(capsys, tmp_path):
    spread = ("--parallel", "spatial", "--device-memory", "2", "--batch-size", "2")
    ways, out = ways_of(capsys, tmp_path, "--devices", "0,1,2", *spread)
    spatial = ways["1 spatial 1"]
    assert spatial["asked"] and spatial["shards"] == 3
    assert [(slot["slot"], slot["rank"], slot["device"]) for slot in spatial["slots"]] == [
        (index, index, f"cuda:{index}") for index in range(3)
    ]
    # Of 32 planes two slabs have 11 and one 10, and the middle slab has two neighbours.
    first, middle, last = (slot["predicted"] for slot in spatial["slots"])
    assert first["activations_bytes"] > last["activations_bytes"]
    (one,) = ways["1 none 1"]["slots"]
    assert middle["parameters_bytes"] == one["predicted"]["parameters_bytes"]
    assert middle["activations_bytes"] < 0.55 * one["predicted"]["activations_bytes"]
    assert "--parallel spatial --devices cuda:0,cuda:1,cuda:2 --micro-batches 1: " in out
    # Groups of shards share the batch; each group has a volume.
    groups, out = ways_of(capsys, tmp_path, "--devices", "0,1,2,3", "--replicas", "2", *spread)
    alone, grouped = groups["1 spatial 1"], groups["2 spatial 1"]
    assert (alone["shards"], alone["asked"]) == (4, False)
    assert (grouped["shards"], grouped["asked"]) == (2, True)
    assert [slot["rank"] for slot in grouped["slots"]] == [0, 1, 2, 3]
    assert "2 x spatial, 1*" in out and "--replicas 2 --micro-batches 1: " in out


@pytest.mark.usefixtures("no_search")
@pytest.mark.nightly
def test_auto_is_chosen_and_starred(capsys, tmp_path):
    four = ("--shape", "256,256,256", "--devices", "0,1,2,3", "--batch-size", "1")
    fewer = ("--set", "model.num_levels=3")
    record, out = plan(capsys, tmp_path, *four, "--device-memory", "24", *fewer)
    (asked,) = (way for way in record["ways"] if way["asked"])
    assert (asked["parallel"], asked["shards"]) == ("spatial", 4)
    one = record["ways"][0]
    peak = asked["slots"][0]["predicted"]["peak_bytes"] / 1024**3
    assert record["choice"] == (
        f"parallel: spatial over 4 GPUs: predicted {1000 * asked['step_seconds']:.0f} ms a "
        f"step against {1000 * one['step_seconds']:.0f} on one device; {peak:.1f} GiB each"
    )
    assert record["choice"] in out.splitlines()
    assert "spatial, 1*" in out


@pytest.mark.usefixtures("no_search")
def test_what_auto_has_no_alternative_to_is_starred(capsys, tmp_path):
    more_than_planes = ("--shape", "8,32,32", "--devices", ",".join(["cpu"] * 9))
    network = ("--set", "model.channels=4,8", "--batch-size", "1")
    record, _ = plan(capsys, tmp_path, *more_than_planes, *network)
    assert [way["parallel"] for way in record["ways"] if way["asked"]] == ["none"]
    assert record["choice"].startswith("parallel: none")


@pytest.mark.usefixtures("no_search")
def test_what_is_not_predicted_is_said(capsys, tmp_path):
    threads = ("--set", "parallel.data_parallel=true", "--parallel", "data", "--devices", "0,1")
    _, out = ways_of(capsys, tmp_path, *threads, "--device-memory", "2", "--batch-size", "2")
    assert "parallel.data_parallel=true is not predicted" in " ".join(out.split())


@pytest.mark.nightly
def test_without_a_gpu_the_command_searches_what_the_cpu_can_hold(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    small = ("--shape", "32,32,16", "--batch-size", "1")
    record, out = plan(capsys, tmp_path, *small, *TINY)
    assert "This machine has no GPU, so the plan is for its CPU" in " ".join(out.split())
    assert "--parallel model --devices cpu,cpu" in out
    for way in record["ways"]:
        x, y, z = way["largest_shape"]
        assert x == y and abs(z - x / 2) < 2  # the volume's proportions, in multiples of the stride
        assert f"up to {x}x{y}x{z} voxels" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--devices", "0"], "cuda:0 is not on this machine, so its memory is unknown"),
        (["--devices", "gpu"], "device 'gpu' is unknown"),
        (["--parallel", "none", "--devices", "cpu,cpu"], "parallel mode none uses one"),
        (["--micro-batches", "3", "--batch-size", "2"], "--micro-batches is 3 but a batch has 2"),
        (["--shape", "4,4,4"], "voxels"),
        (["--shape=0,1,2"], "Error: --shape is 0,1,2; give"),
        (["--shape", "[1"], "Error: --shape: the value '[1' is not valid YAML"),
        (["--set", "patches.size=64,64"], "Error: patches.size is 64,64"),
        (["--parallel", "model", "--set", "parallel.cuts=999"], "cuts [999] do not divide"),
        (["no-such-folder"], "no-such-folder"),
    ],
    ids=str,
)
def test_the_command_explains_itself_in_one_line(capsys, monkeypatch, arguments, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert reason in refusal(capsys, "plan", *arguments)
