"""Sweeps over cuts and micro-batches, with real steps of a tiny network on one CPU."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import run
from tests.images.samples import write_msd
from unet3d.config import Config, load_config
from unet3d.errors import DeviceError
from unet3d.parallel import Layout
from unet3d.parallel.balance import stopwatch as timings
from unet3d.parallel.pipeline import PipelineExecutor
from unet3d.planning import bench, placements, tuning
from unet3d.planning.bench import Bench, Row, promising_neighbours
from unet3d.planning.memory_estimate import Step, predict_memory
from unet3d.planning.network_plan import plan_without_data
from unet3d.planning.tuning import Progress, Tuning, micro_batch_counts, tune
from unet3d.planning.tuning_cache import TuningKey, recall_tuned, remember_tuned, resolve_auto

FLOAT32 = "training.precision=float32"
SMALL = (
    "model.base_channels=2",
    "model.num_levels=2",
    "patches.size=8,8,8",
    "training.batch_size=2",
)
SPREAD = ("parallel.mode=model", "parallel.devices=cpu,cpu")
ALONE = ("parallel.mode=none", "parallel.devices=cpu", "training.batch_size=1")
CPU = torch.device("cpu")


def settings(cache: Path, *overrides: str) -> Config:
    return load_config(None, [*SMALL, FLOAT32, *SPREAD, f"data.cache={cache}", *overrides])


def sweep(cache: Path, *overrides: str) -> Tuning:
    config = settings(cache, *overrides)
    return tune(config, plan_without_data(config))


def words(cache: Path, *overrides: str) -> list[str]:
    """Return such settings as options of a command."""
    changes = (*SMALL[:2], FLOAT32, f"data.cache={cache}", *overrides)
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch):
    """Take each time once, and leave garbage alone.

    A GPU needs the steps in which a step is captured, and the memory of what is garbage.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(bench.gc, "collect", lambda: 0)
        monkeypatch.setattr(timings, "NUM_TIMED_RUNS", 1)


@pytest.fixture(scope="module")
def times(tmp_path_factory):
    """Cache folder in which the times of blocks are known from the first sweep on."""
    return tmp_path_factory.mktemp("cache")


def test_settings_are_followed_or_refused_before_anything_is_timed(tmp_path, monkeypatch):
    offloading = ("memory.offload=skips", "parallel.cuda_graphs=off")
    found = sweep(tmp_path, *ALONE, *offloading)
    (row,) = found.rows
    assert (row.layout.offload, row.layout.cuda_graphs) == ("skips", "off")
    key = found.tuning_key.describe()
    assert (key["memory"]["offload"], key["cuda_graphs"]) == ("skips", "off")
    monkeypatch.setattr(tuning, "Bench", None)
    with pytest.raises(DeviceError, match=r"parallel.cuts \[999\] do not divide 7 blocks"):
        sweep(tmp_path, "parallel.cuts=999")


def test_every_cut_with_every_number_of_micro_batches_is_measured_and_the_fastest_chosen(times):
    swept = sweep(times, "parallel.cuts=2")
    found = [(row.layout.cuts, row.layout.num_micro_batches) for row in swept.rows]
    cuts = list(dict.fromkeys(cuts for cuts, _ in found))
    assert found == list(product(cuts, (1, 2)))
    assert cuts[0] is None and len(swept.rows[0].layout.devices) == 1
    assert cuts[1] == (4,)  # encoder and decoder
    assert (2,) in cuts  # which is set
    assert all(row.seconds > 0 for row in swept.rows)
    here = swept.tuning_key
    step = Step(
        topology=here.topology,
        layout=Layout(devices=here.devices),
        size=here.size,
        batch_size=2,
        settings=here.config.training,
        precision=here.precision,
    )
    for row in swept.rows[::3]:  # each number of micro-batches, on one device and on two
        assert row.peak_bytes == predict_memory(replace(step, layout=row.layout)).needed_bytes()
    spread = [row for row in swept.rows if len(row.layout.devices) == 2]
    fastest = min(spread, key=lambda row: row.seconds)
    assert swept.fastest_asked is fastest
    choices = {len(key.devices): choice for key, choice in swept.choices()}
    found = (choices[2].step_seconds, choices[2].cuts, choices[2].num_micro_batches)
    assert found == (fastest.seconds, fastest.layout.cuts, fastest.layout.num_micro_batches)
    record = swept.to_dict()
    alone = min(row.seconds for row in swept.rows if len(row.layout.devices) == 1)
    assert choices[1].step_seconds == record["best_one_device_seconds"] == alone
    (chosen,) = (row for row in record["rows"] if row["chosen"])
    assert chosen["seconds"] == fastest.seconds
    assert chosen["ratio"] == pytest.approx(alone / fastest.seconds)
    (first,) = (row for row in record["rows"] if row["fastest"])
    assert first["seconds"] == min(row.seconds for row in swept.rows)
    assert json.loads(json.dumps(record))["rows"] == record["rows"]


def with_times(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> list[tuple[Any, ...]]:
    """Let each setting take what a function of its layout says, and return what was asked."""
    asked: list[tuple[Any, ...]] = []

    def row(self: Bench, layout: Any, hopeless_seconds: float) -> Row:
        asked.append((layout.cuts, layout.num_micro_batches, hopeless_seconds))
        return Row(layout=layout, seconds=seconds(layout), peak_bytes={})

    monkeypatch.setattr(Bench, "row", row)
    monkeypatch.setattr(Bench, "sensible_cuts", lambda *_: [(4,), (3,)])
    return asked


def test_the_fastest_of_all_may_be_on_one_device(tmp_path, monkeypatch):
    times = {(None, 1): 0.9, (None, 2): 0.75, ((4,), 1): 1.2, ((4,), 2): 0.95}

    def seconds(layout):
        return times.get((layout.cuts, layout.num_micro_batches), 2.0)

    with_times(monkeypatch, seconds)
    found = sweep(tmp_path)
    rows = found.to_dict()["rows"]
    assert [row["seconds"] for row in rows if row["fastest"]] == [0.75]
    assert [row["seconds"] for row in rows if row["chosen"]] == [0.95]
    # Trainings on one device and on two each take their own.
    for key, choice in found.choices():
        remember_tuned(key, choice)
    on_one = {"parallel.mode": "none", "parallel.devices": ["cpu"]}
    alone = found.tuning_key.config.with_values(on_one)
    key = replace(found.tuning_key, config=alone, devices=(CPU,))
    assert resolve_auto(key).training.micro_batches == 2
    taken = resolve_auto(found.tuning_key)
    assert (taken.parallel.cuts, taken.training.micro_batches) == ((4,), 2)


def test_a_slow_setting_is_hopeless_beside_those_on_the_same_devices(tmp_path, monkeypatch):
    asked = with_times(monkeypatch, lambda layout: 3.0 if layout.cuts else 1.0)
    sweep(tmp_path)
    assert asked[:3] == [(None, 1, math.inf), ((4,), 1, math.inf), (None, 2, 1.5)]
    assert {limit for cuts, _, limit in asked[3:6]} == {4.5}


def test_a_lucky_time_does_not_win(tmp_path, monkeypatch):
    times = {((3,), 2): [0.2, 2.0], ((4,), 1): [0.8, 0.7], (None, 1): [0.9, 0.9]}

    def seconds(layout):
        left = times.get((layout.cuts, layout.num_micro_batches), [])
        return left.pop(0) if left else 3.0

    with_times(monkeypatch, seconds)
    found = sweep(tmp_path)
    best = found.fastest
    assert best is found.fastest_asked
    assert (best.layout.cuts, best.seconds) == ((4,), 0.75)
    assert not any(times.values())
    assert [row.layout.cuts for row in found.rows] == [None, None, (4,), (4,), (3,), (3,)]


@pytest.mark.parametrize(
    ("each", "num_measured"), [(1.0, 6), (90.0, 4), (1000.0, 2)], ids=["all", "some", "first"]
)
def test_a_sweep_keeps_to_its_time_and_says_how_far_it_is(
    each, num_measured, tmp_path, monkeypatch, caplog
):
    now = [0.0]

    def seconds(layout):
        now[0] += each
        return 1.0

    with_times(monkeypatch, seconds)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now[0])
    seen: list[Progress] = []
    config = settings(tmp_path)
    with caplog.at_level("INFO", "unet3d"):
        found = tune(config, plan_without_data(config), seen.append)
    assert len(found.rows) == num_measured and found.num_left_out == 6 - num_measured
    assert {len(row.layout.devices) for row in found.rows} == {1, 2}
    assert seen[0] == Progress(num_done=0, num_settings=6, seconds_left=None)
    assert [one.num_done for one in seen] == list(range(num_measured))
    for one in seen[1:]:
        assert one.seconds_left <= min((6 - one.num_done) * each, 300 + each)
    assert "up to 6 settings in about 5 min at most: one device and 2 cut(s)" in caplog.text
    assert f"{num_measured} of 6: " in caplog.text
    assert " of 6: one device, 1 micro-batch(es): 1000.0 ms, about" in caplog.text


def test_a_time_is_that_of_steps_that_do_all_the_work(tmp_path, monkeypatch):
    calls: list[str] = []
    forward_backward, take = PipelineExecutor.forward_backward, bench.Optimization.step

    def forward(self, image, target, *more):
        assert image.shape == (1, 1, 8, 8, 8) and target.shape == (1, 8, 8, 8)
        calls.append("forward and backward")
        return forward_backward(self, image, target, *more)

    def step(self, learning_rate):
        calls.append("step")
        take(self, learning_rate)

    monkeypatch.setattr(PipelineExecutor, "forward_backward", forward)
    monkeypatch.setattr(bench.Optimization, "step", step)
    one = Bench(replace(circumstances(tmp_path), config=settings(tmp_path, *ALONE)))
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.row(Layout(devices=(CPU,), cuts=()))
    assert calls == ["forward and backward", "step"] * (len(calls) // 2)
    assert all(torch.equal(v, before[n]) for n, v in one.model.state_dict().items())
    assert all(parameter.grad is None for parameter in one.model.parameters())


def circumstances(cache: Path) -> TuningKey:
    config = settings(cache)
    network = plan_without_data(config)
    return TuningKey(
        config=network.settled(config),
        topology=network.topology,
        size=network.size,
        devices=(CPU, CPU),
        precision="float32",
    )


def fail_for(monkeypatch: pytest.MonkeyPatch, num_stages: int, num_micro_batches: int) -> None:
    """Let steps run out of memory that have at most so many stages and micro-batches."""
    forward_backward = PipelineExecutor.forward_backward

    def failing(self: PipelineExecutor, *arguments: Any) -> Any:
        terms = forward_backward(self, *arguments)
        if len(self.stages) <= num_stages and self.num_micro_batches <= num_micro_batches:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB.")
        return terms

    monkeypatch.setattr(PipelineExecutor, "forward_backward", failing)


def test_running_out_of_memory_is_a_row(times, monkeypatch):
    with monkeypatch.context() as patch:
        fail_for(patch, num_stages=2, num_micro_batches=1)
        found = sweep(times)
    for row in found.rows:
        assert (row.seconds is None) == (row.layout.num_micro_batches == 1)
        assert bool(row.peak_bytes) == (row.seconds is not None)
    assert found.fastest_asked.layout.num_micro_batches == 2
    # Without a step on one device there is no ratio.
    fail_for(monkeypatch, num_stages=1, num_micro_batches=8)
    record = sweep(times).to_dict()
    assert record["best_one_device_seconds"] is None
    assert all(row["ratio"] is None for row in record["rows"])
    assert any(row["chosen"] for row in record["rows"])


def test_a_block_that_does_not_fit_alone_leaves_the_other_cuts(tmp_path, monkeypatch, caplog):
    def failing(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("unet3d.parallel.balance.block_costs.median_seconds", failing)
    found = sweep(tmp_path)
    assert "no cut is balanced by time" in caplog.text
    assert {row.layout.cuts for row in found.rows} >= {None, (4,)}
    assert found.fastest_asked is not None


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        (("training.batch_size=6",), [1, 2, 4, 6]),
        (("training.batch_size=8", "training.micro_batches=5"), [1, 2, 4, 5, 8]),
        (("training.batch_size=8", "model.norm=batch"), [1]),
    ],
    ids=str,
)
def test_micro_batches_double_up_to_the_batch(overrides, counts):
    assert micro_batch_counts(load_config(None, overrides)) == counts


def test_neighbours_are_measured_where_their_blocks_promise_something():
    blocks = [5.0, 1.0, 1.0, 1.0, 1.0, 5.0]

    def cost(stage, start, end):
        return sum(blocks[start:end])

    # With 8 micro-batches: 14 + 7 * (9, 8, 7, 8, 9) for cuts 1 to 5.
    assert promising_neighbours([(1,)], cost, 6, 8) == [(3,), (2,)]
    assert promising_neighbours([(3,)], cost, 6, 8) == []
    # One micro-batch takes as long wherever the cut is, so all are as good.
    assert promising_neighbours([(3,)], cost, 6, 1) == [(1,), (2,)]
    assert promising_neighbours([(1, 2)], cost, 6, 8)[0] == (1, 4)
    assert promising_neighbours([(1, 2, 3, 4, 5)], cost, 6, 8) == []


def test_the_command_shows_draws_and_remembers(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tuning.json"
    options = words(tmp_path, "training.optimizer=sgd")
    shape = ("--shape", "8,8,8", "--batch-size", "2")
    shape += ("--devices", "cpu,cpu", "--parallel", "model")
    with monkeypatch.context() as patch:
        fail_for(patch, num_stages=1, num_micro_batches=1)
        assert run("plan", "--measure", *shape, *options, "--json", path) == 0
    out = capsys.readouterr().out
    record = json.loads(path.read_text())
    table = out[out.index("Measured training steps") : out.index("Time against")]
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("out of memory") == 1
    (chosen,) = (row for row in record["rows"] if row["chosen"])
    assert f"{1000 * chosen['seconds']:.1f}" in table and "*" in table
    assert (tmp_path / "tuning.png").read_bytes()[:4] == b"\x89PNG"
    choice = recall_tuned(circumstances(tmp_path))
    found = (list(choice.cuts), choice.num_micro_batches)
    assert found == (chosen["cuts"], chosen["num_micro_batches"])
    # From now on a plan predicts what training will do, unless it is told otherwise.
    monkeypatch.setattr(placements, "largest_size", lambda *_: (8, 8, 8))  # saves time
    assert run("plan", *shape, *options, "--json", path) == 0
    ways = json.loads(path.read_text())["ways"]
    (asked,) = (way for way in ways if way["asked"])
    assert asked["num_micro_batches"] == chosen["num_micro_batches"]
    assert len(asked["slots"][0]["blocks"]) == chosen["cuts"][0]


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["--measure", "--device-memory", "80"], 2, "drop --device-memory"),
        (["--picture", "x.png"], 2, "add --measure"),
        (["--measure", "--devices", "0,1"], 1, "device '0' does not exist"),
    ],
    ids=str,
)
def test_wrong_use_is_explained(arguments, status, reason, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert run("plan", "--shape", "8,8,8", *arguments) == status
    assert reason in capsys.readouterr().err


def test_the_command_fails_where_nothing_fits_or_no_picture_can_be_written(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    measure = ("plan", "--measure", "--devices", "cpu", *words(tmp_path, *SMALL[2:]))
    picture = tmp_path / "nowhere" / "tuning.png"
    assert run(*measure, "--picture", picture) == 1
    assert f"cannot write {picture}" in capsys.readouterr().err.splitlines()[-1]
    fail_for(monkeypatch, num_stages=2, num_micro_batches=8)
    assert run(*measure) == 1
    out, err = capsys.readouterr()
    assert out.count("out of memory") == 2
    assert "every setting ran out of memory" in err.splitlines()[-1]
    assert not (tmp_path / "tuning.png").exists()


@pytest.mark.parametrize("balance", ["memory", pytest.param("time", marks=pytest.mark.nightly)])
def test_a_plan_predicts_the_balanced_cut_that_training_makes(
    balance, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(placements, "largest_size", lambda *_: (8, 8, 8))  # saves time
    dataset, path = write_msd(tmp_path / "data", 2, (8, 8, 8)), tmp_path / "plan.json"
    few = ("training.epochs=1", "training.steps_per_epoch=1", "data.num_workers=0")
    file = tmp_path / "settings.yaml"
    file.write_text(settings(tmp_path, f"parallel.balance={balance}", *few).to_yaml())
    arguments = ("--config", file, "--micro-batches", 2)
    assert run("plan", dataset, *arguments, "--balance", balance, "--json", path) == 0
    assert f"--micro-batches 2 --balance {balance}: up to" in capsys.readouterr().out
    assert run("train", dataset, *arguments, "--quiet", "--output", tmp_path / "run") == 0
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    (asked,) = (way for way in json.loads(path.read_text())["ways"] if way["asked"])
    for planned, trained in zip(asked["slots"], record["slots"], strict=True):
        assert planned["blocks"] == trained["blocks"]
        assert planned["predicted"] == trained["predicted"]


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_is_a_row(tmp_path):
    large = ("patches.size=128,128,128", "model.base_channels=32", "model.num_levels=4")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / total, 0)
    try:
        found = sweep(tmp_path, *ALONE[:1], "parallel.devices=0", *large, "training.batch_size=8")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    fits = [row.seconds is not None for row in found.rows]
    assert fits[0] is False and fits[-1] is True
