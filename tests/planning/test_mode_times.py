"""Steps of every mode, measured in ranks, and what a training makes of them."""

import json
from pathlib import Path

import pytest

from tests.command_line import run
from unet3d.config import Config, load_config
from unet3d.errors import Unet3dError
from unet3d.planning import mode_times
from unet3d.planning.choice import choose_mode
from unet3d.planning.mode_times import ModeTimes, time_modes
from unet3d.planning.network_plan import plan_without_data

SMALL = (
    "patches.size=16,16,16",
    "model.base_channels=4",
    "model.num_levels=2",
    "training.batch_size=2",
    "training.precision=float32",
    "parallel.devices=cpu,cpu",
)


def settings(cache: Path, *changes: str) -> Config:
    return load_config(None, [*SMALL, f"data.cache={cache}", *changes])


@pytest.fixture
def seconds(monkeypatch):
    """Return what steps take, by mode, instead of taking any; None: out of memory."""
    times: dict[str, float | None] = {"none": 0.3, "data": 0.2, "spatial": 0.1}

    def launch(arguments, folder, **options):
        command, option, path, record_option, record = arguments
        assert (command, option, record_option) == ("plan", "--config", "--step-record")
        parallel = load_config(Path(path)).parallel
        assert options["num_ranks"] == len(parallel.devices or ())
        assert (options["max_restarts"], options["on_gpus"]) == (0, False)
        took = times[parallel.mode]
        peaks = [] if took is None else [5] * options["num_ranks"]
        Path(record).write_text(json.dumps({"seconds": took, "peak_bytes": peaks}))
        if took is None:
            raise Unet3dError("rank 1 ran out of memory")

    monkeypatch.setattr(mode_times, "launch", launch)
    return times


def timed(config: Config) -> ModeTimes:
    network = plan_without_data(config)
    return time_modes(network.settled(config), network)


def test_every_mode_is_measured_and_remembered(tmp_path, seconds):
    network = plan_without_data(settings(tmp_path))
    config = network.settled(settings(tmp_path))
    assert choose_mode(config, network).settings.mode == "none"
    found = timed(config)
    modes = [(row.option.dims.mode, row.seconds, row.peak_bytes) for row in found.rows]
    assert modes == [("none", 0.3, (5,)), ("data", 0.2, (5, 5)), ("spatial", 0.1, (5, 5))]
    assert found.fastest is found.rows[2]
    assert len(set(found.remember())) == 3
    choice = choose_mode(config, network)
    assert choice.settings.mode == "spatial"
    assert "measured 100 ms a step against 300 on one" in choice.line
    record = found.to_dict()
    assert [row["fastest"] for row in record["modes"]] == [False, False, True]
    assert json.loads(json.dumps(record)) == record
    seconds["spatial"] = None  # out of memory
    found = timed(settings(tmp_path))
    assert [row.seconds for row in found.rows] == [0.3, 0.2, None]
    assert len(found.remember()) == 2
    assert found.fastest is found.rows[1]
    # Of another batch nothing is known.
    larger = settings(tmp_path, "training.batch_size=4")
    assert choose_mode(larger, plan_without_data(larger)).settings.mode == "none"


@pytest.mark.usefixtures("seconds")
def test_which_modes_are_measured(tmp_path, monkeypatch):
    (row,) = timed(settings(tmp_path, "parallel.mode=data")).rows
    assert row.option.dims.mode == "data"
    # Cuts and one device are measured elsewhere.
    for change in ("parallel.devices=cpu", "model.norm=batch", "parallel.mode=model"):
        config = settings(tmp_path, change)
        assert time_modes(config, plan_without_data(config)) is None

    def fail(*_, **__):
        raise Unet3dError("rank 1 was killed by SIGKILL")

    monkeypatch.setattr(mode_times, "launch", fail)
    with pytest.raises(Unet3dError, match="SIGKILL"):
        timed(settings(tmp_path))


def test_the_command_shows_draws_and_remembers(tmp_path, seconds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    options = [word for change in (*SMALL, f"data.cache={tmp_path}") for word in ("--set", change)]
    assert run("plan", "--measure", *options, "--json", "times.json") == 0
    out = capsys.readouterr().out
    table = out[out.index("Measured training steps") : out.index("The fastest is")]
    assert max(map(len, table.splitlines())) <= 80
    assert "spatial over 2 CPU processes*" in out and "3.00x" in out
    assert "The fastest is spatial over 2 CPU processes: 100.0 ms a step against 300.0" in out
    assert (tmp_path / "tuning.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((tmp_path / "times.json").read_text())
    assert [row["parallel"] for row in record["modes"]] == ["none", "data", "spatial"]
    seconds |= {"none": None, "data": None, "spatial": None}
    assert run("plan", "--measure", *options) == 1
    out, err = capsys.readouterr()
    assert out.count("out of memory") == 3
    assert "every setting ran out of memory" in err.splitlines()[-1]


LARGE = ("patches.size=128,128,128", "model.base_channels=32", "model.num_levels=5")
ON_GPUS = ("parallel.devices=0,1", "training.precision=auto", *LARGE)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        # On CPUs what is predicted is what is measured.
        pytest.param(("parallel.replicas=1",), 0.0, marks=pytest.mark.nightly, id="CPU"),
        pytest.param(ON_GPUS, 0.1, marks=pytest.mark.multigpu, id="GPUs"),
    ],
)
def test_ranks_take_the_steps(changes, tolerance, tmp_path):
    found = timed(settings(tmp_path, *changes))
    assert [row.option.dims.mode for row in found.rows] == ["none", "data", "spatial"]
    for row in found.rows:
        assert row.seconds is not None and 0 < row.seconds < 60
        shards = [shard for _ in range(row.option.dims.num_replicas) for shard in row.option.shards]
        predicted = [shard.memory[0].peak_bytes for shard in shards]
        assert list(row.peak_bytes) == pytest.approx(predicted, rel=tolerance)
