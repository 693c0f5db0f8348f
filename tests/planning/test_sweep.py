"""Sweeps over modes, cuts and micro-batches, with real steps of a tiny network on one CPU."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import run
from tests.images.samples import write_msd
from tests.steps import CPU, make_step
from tests.trainings import without_pictures
from unet3d.config import Config, load_config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DeviceError, DoesNotFitError, Unet3dError
from unet3d.parallel.executor import NetworkExecutor
from unet3d.planning import placements, sweep
from unet3d.planning.memory_estimate import predict_shards
from unet3d.planning.network_plan import plan_without_data
from unet3d.planning.placements import choose_mode, placed, timed_options
from unet3d.planning.step_time import step_seconds
from unet3d.planning.sweep import Sweep, measure, measure_rank, micro_batch_counts
from unet3d.planning.tuning_cache import recall_tuned, resolve_auto

FLOAT32 = "training.precision=float32"
SMALL = (
    "model.base_channels=2",
    "model.num_levels=2",
    "patches.size=8,8,8",
    "training.batch_size=2",
)
SPREAD = ("parallel.mode=model", "parallel.devices=cpu,cpu")
ANY = ("parallel.mode=auto", "parallel.devices=cpu,cpu", "patches.size=16,16,16")
ALONE = ("parallel.mode=none", "parallel.devices=cpu", "training.batch_size=1")


def settings(cache: Path, *overrides: str) -> Config:
    return load_config(None, [*SMALL, FLOAT32, *SPREAD, f"data.cache={cache}", *overrides])


def swept(config: Config, **more: Any) -> Sweep:
    return measure(config, plan_without_data(config), **more)


def words(cache: Path, *overrides: str) -> list[str]:
    """Return settings as options of a command."""
    changes = (*SMALL[:2], FLOAT32, f"data.cache={cache}", *overrides)
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch):
    """Time each step only once."""
    monkeypatch.setattr(sweep, "NUM_TIMED_STEPS", 1)


@pytest.mark.nightly
def test_every_cut_with_every_number_of_micro_batches_is_measured_and_the_fastest_kept(tmp_path):
    found = swept(settings(tmp_path, "parallel.cuts=2"))
    layouts = [row.option.step.layout for row in found.rows]
    cuts = list(dict.fromkeys(layout.cuts for layout in layouts))
    assert [(one.cuts, one.num_micro_batches) for one in layouts] == list(product(cuts, (1, 2)))
    assert cuts[0] is None and len(layouts[0].devices) == 1
    assert cuts[1:3] == [(4,), (2,)]  # encoder | decoder, and the cut that is set
    for row in found.rows:
        assert row.seconds > 0
        assert row.option.seconds == step_seconds(row.option.step)
        memory = row.option.prediction.memory
        assert row.peak_bytes == [memory[i].peak_bytes for i in sorted(memory)]
    record = found.to_dict()
    rows = record["rows"]
    alone = min(row["seconds"] for row in rows if row["parallel"] == "none")
    spread = min((row for row in rows if row["cuts"]), key=lambda row: row["seconds"])
    assert record["best_one_device_seconds"] == alone
    assert [row for row in rows if row["chosen"]] == [spread]
    assert spread["ratio"] == pytest.approx(alone / spread["seconds"])
    (first,) = (row for row in rows if row["fastest"])
    assert first["seconds"] == min(row["seconds"] for row in rows)
    assert json.loads(json.dumps(record)) == record
    # Trainings on one device and on two find their own choices.
    found.remember()
    for step, best in (
        (found.rows[0].option.step, alone),
        (found.best(found.asked).option.step, spread["seconds"]),
    ):
        assert recall_tuned(found.config, step).step_seconds == best
    taken = resolve_auto(settings(tmp_path), found.best(found.asked).option.step)
    assert list(taken.parallel.cuts) == spread["cuts"]
    assert taken.training.micro_batches == spread["num_micro_batches"]


def test_settings_are_followed_or_refused_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("UNET3D_CUDA_GRAPHS", "0")
    (row,) = swept(settings(tmp_path, *ALONE, "memory.offload=skips")).rows
    layout = row.option.step.layout
    assert (layout.offload, layout.captures) == ("skips", False)
    monkeypatch.setattr(sweep, "time_step", None)
    with pytest.raises(DeviceError, match=r"parallel.cuts \[999\] do not divide 7 blocks"):
        swept(settings(tmp_path, "parallel.cuts=999"))


@pytest.mark.parametrize(
    ("overrides", "batch_size", "counts"),
    [
        ((), 6, [1, 2, 4, 6]),
        (("training.batch_size=8", "training.micro_batches=5"), 8, [1, 2, 4, 5, 8]),
        (("model.norm=batch",), 8, [1]),
    ],
    ids=str,
)
def test_micro_batches_double_up_to_the_batch(overrides, batch_size, counts):
    assert micro_batch_counts(load_config(None, overrides), batch_size) == counts


@pytest.mark.parametrize(
    ("each", "num_measured"), [(1.0, 4), (200.0, 2), (1000.0, 2)], ids=["all", "some", "first"]
)
def test_a_sweep_keeps_to_its_time_and_says_how_far_it_is(
    each, num_measured, tmp_path, monkeypatch, caplog
):
    now = [0.0]

    def time_step(step, group):
        now[0] += each
        return 1.0, [1]

    monkeypatch.setattr(sweep, "time_step", time_step)
    monkeypatch.setattr(sweep, "_cuts", lambda *_: [(4,)])
    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])
    seen: list[tuple[int, int, str]] = []
    with caplog.at_level("INFO", "unet3d"):
        found = swept(settings(tmp_path), watch=lambda *told: seen.append(told))
    assert len(found.rows) == num_measured and found.num_left_out == 4 - num_measured
    assert {row.option.dims.mode for row in found.rows} == {"none", "model"}
    assert [told[:2] for told in seen] == [(index + 1, 4) for index in range(num_measured)]
    assert "up to 4 settings in about 5 min" in caplog.text
    assert "none, on cpu, 1 micro-batch: 1000.0 ms" in caplog.text


@pytest.fixture
def seconds(monkeypatch):
    """Return fake times of steps by mode, None: out of memory; no step is run."""
    times: dict[str, float | None] = {"none": 0.3, "data": 0.2, "spatial": 0.1}

    def launch(arguments, folder, **options):
        command, option, path, record_option, record = arguments
        assert (command, option, record_option) == ("plan", "--config", "--step-record")
        parallel = load_config(Path(path)).parallel
        assert options["num_ranks"] == len(parallel.devices or ()) == 2
        assert (options["max_restarts"], options["on_gpus"]) == (0, False)
        took = times[parallel.mode]
        peaks = [] if took is None else [5] * options["num_ranks"]
        Path(record).write_text(json.dumps([took, peaks]))
        if took is None:
            raise Unet3dError("rank 1 ran out of memory")

    def time_step(step, group):
        if times["none"] is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return times["none"] * step.layout.num_micro_batches, [5]

    monkeypatch.setattr(sweep, "launch", launch)
    monkeypatch.setattr(sweep, "time_step", time_step)
    return times


def test_every_mode_is_measured_and_the_fastest_is_taken(tmp_path, seconds):
    config = settings(tmp_path, *ANY)
    network = plan_without_data(config)
    assert choose_mode(config, network)[0].mode == "none"
    found = swept(config)
    modes = [(row.option.dims.mode, row.seconds, row.peak_bytes) for row in found.rows]
    expected = [("none", 0.3, [5]), ("none", 0.6, [5])]
    assert modes == [*expected, ("data", 0.2, [5, 5]), ("spatial", 0.1, [5, 5])]
    assert found.best() is found.best(found.asked) is found.rows[3]
    assert len(list(found.remember().iterdir())) == 3
    chosen, line = choose_mode(config, network)
    assert chosen.mode == "spatial"
    assert "measured 100 ms a step against 300 on one" in line
    seconds["spatial"] = None  # out of memory
    found = swept(config)
    assert [row.seconds for row in found.rows] == [0.3, 0.6, 0.2, None]
    assert found.best() is found.rows[2]
    # Nothing is known about another batch size.
    larger = settings(tmp_path, *ANY, "training.batch_size=4")
    assert choose_mode(larger, plan_without_data(larger))[0].mode == "none"


@pytest.mark.usefixtures("seconds")
def test_one_device_is_measured_beside_the_mode_that_is_asked_for(tmp_path, monkeypatch):
    found = swept(settings(tmp_path, *ANY, "parallel.mode=data"))
    assert [row.option.dims.mode for row in found.rows] == ["none", "none", "data"]
    assert found.best(found.asked) is found.rows[2]

    def fail(*_, **__):
        raise Unet3dError("rank 1 was killed by SIGKILL")

    monkeypatch.setattr(sweep, "launch", fail)
    with pytest.raises(Unet3dError, match="SIGKILL"):
        swept(settings(tmp_path, *ANY))


def test_the_command_compares_modes(tmp_path, seconds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    shape = ("--shape", "16,16,16", "--batch-size", "2", "--devices", "cpu,cpu")
    options = words(tmp_path)
    assert run("plan", "--measure", *shape, *options, "--json", "times.json") == 0
    out = capsys.readouterr().out
    table = out[out.index("Measured training steps") : out.index("The fastest is")]
    assert max(map(len, table.splitlines())) <= 80
    assert "spatial over 2 CPU processes" in out and "3.00x" in out
    assert "100.0 ms a step against 300.0 on one device" in " ".join(out.split())
    assert (tmp_path / "tuning.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((tmp_path / "times.json").read_text())
    assert [row["parallel"] for row in record["rows"]] == ["none", "none", "data", "spatial"]
    seconds |= {"none": None, "data": None, "spatial": None}
    assert run("plan", "--measure", *shape, *options, "--overwrite") == 1
    out, err = capsys.readouterr()
    assert out.count("out of memory") == 4
    assert "all measured settings ran out of memory" in err.splitlines()[-1]


def fail_for(monkeypatch: pytest.MonkeyPatch, num_stages: int, num_micro_batches: int) -> None:
    """Let steps with at most these stages and micro-batches run out of memory."""
    forward_backward = NetworkExecutor.forward_backward

    def failing(self: NetworkExecutor, *arguments: Any, **more: Any) -> Any:
        terms = forward_backward(self, *arguments, **more)
        if len(self.stages) <= num_stages and self.num_micro_batches <= num_micro_batches:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB.")
        return terms

    monkeypatch.setattr(NetworkExecutor, "forward_backward", failing)


@pytest.mark.nightly
def test_running_out_of_memory_is_a_row_and_a_plan_predicts_what_training_takes(
    tmp_path, capsys, monkeypatch
):
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
    table = re.split("The fastest|One device", out[out.index("Measured training steps") :])[0]
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("out of memory") == 1
    assert [row["seconds"] is None for row in record["rows"]].count(True) == 1
    (chosen,) = (row for row in record["rows"] if row["chosen"])
    assert f"{1000 * chosen['seconds']:.1f}" in table and "*" in table
    monkeypatch.setattr(placements, "largest_size", lambda *_: (8, 8, 8))  # saves time
    assert run("plan", *shape, *options, "--json", path, "--overwrite") == 0
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


@pytest.mark.nightly
def test_a_plan_predicts_the_balanced_cut_that_training_makes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(placements, "largest_size", lambda *_: (8, 8, 8))  # saves time
    dataset, path = write_msd(tmp_path / "data", 2, (8, 8, 8)), tmp_path / "plan.json"
    few = ("training.epochs=1", "training.steps_per_epoch=1", "data.num_workers=0")
    file = tmp_path / "settings.yaml"
    file.write_text(settings(tmp_path, "parallel.cuts=time", *few).to_yaml())
    arguments = ("--config", file, "--micro-batches", 2)
    assert run("plan", dataset, *arguments, "--json", path) == 0
    assert "--micro-batches 2 --set parallel.cuts=time: up to" in capsys.readouterr().out
    with without_pictures():
        assert run("train", dataset, *arguments, "--quiet", "--output", tmp_path / "run") == 0
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    (asked,) = (way for way in json.loads(path.read_text())["ways"] if way["asked"])
    for planned, trained in zip(asked["slots"], record["slots"], strict=True):
        assert planned["blocks"] == trained["blocks"]
        assert planned["predicted"] == trained["predicted"]


LARGE = ("patches.size=128,128,128", "model.base_channels=32", "model.num_levels=5")
ON_GPUS = ("parallel.devices=0,1", "training.precision=auto", *LARGE)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        # On CPUs predicted and measured memory are equal.
        pytest.param((), 0.0, marks=pytest.mark.nightly, id="CPU"),
        pytest.param(ON_GPUS, 0.1, marks=pytest.mark.multigpu, id="GPUs"),
    ],
)
def test_ranks_take_the_steps(changes, tolerance, tmp_path):
    found = swept(settings(tmp_path, *ANY, *changes))
    assert [row.option.dims.mode for row in found.rows] == ["none", "none", "data", "spatial"]
    for row in found.rows:
        assert 0 < row.seconds < 60
        shards = [
            shard
            for _ in range(row.option.dims.num_replicas)
            for shard in predict_shards(row.option.step)
        ]
        predicted = [shard.memory[0].peak_bytes for shard in shards]
        assert list(row.peak_bytes) == pytest.approx(predicted, rel=tolerance)


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_is_a_row(tmp_path):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / total, 0)
    config = settings(tmp_path, *ALONE[:1], "parallel.devices=0", *LARGE, "training.batch_size=8")
    try:
        found = swept(config)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    fits = [row.seconds is not None for row in found.rows]
    assert fits[0] is False and fits[-1] is True


@pytest.fixture
def alone(tmp_path):
    few = ["patches.size=16,16,16", "model.base_channels=4", "model.num_levels=2"]
    here = ["parallel.mode=none", "parallel.devices=cpu", f"data.cache={tmp_path}"]
    return load_config(None, [*few, *here, "training.precision=float32"])


def test_a_step_takes_time_and_what_was_predicted(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # the command sets it; this restores it
    network, path = plan_without_data(alone), tmp_path / "step.json"
    settings = tmp_path / "settings.yaml"
    settings.write_text(alone.to_yaml())
    assert run("plan", "--config", settings, "--step-record", path) == 0
    took, peaks = json.loads(path.read_text())
    assert 0 < took < 60
    dims, memory = placed(alone.parallel, "none", (CPU,)), {CPU: 2**30}
    settled = network.settled(alone)
    (option,) = timed_options(settled, network, (dims,), memory)
    assert peaks == [option.prediction.memory[0].peak_bytes]


def test_a_rank_without_memory_says_so(alone, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sweep, "parallelize", fail)
    path = tmp_path / "step.json"
    with pytest.raises(DoesNotFitError, match="rank 0 ran out of memory"):
        measure_rank(alone, plan_without_data(alone), path)
    assert json.loads(path.read_text()) == [None, []]


def test_a_time_is_that_of_steps_that_do_all_the_work_and_change_nothing(monkeypatch):
    calls: list[str] = []
    models = []
    forward_backward, take = NetworkExecutor.forward_backward, sweep.Optimization.step

    def forward(self, image, target, *more, **others):
        assert image.shape == (2, 2, 16, 16, 16) and target.shape == (2, 16, 16, 16)
        if not models:
            before = {name: value.clone() for name, value in self.module.state_dict().items()}
            models.append((self.module, before))
        calls.append("forward and backward")
        return forward_backward(self, image, target, *more, **others)

    def step(self, learning_rate):
        calls.append("step")
        take(self, learning_rate)

    monkeypatch.setattr(NetworkExecutor, "forward_backward", forward)
    monkeypatch.setattr(sweep.Optimization, "step", step)
    found = sweep.time_step(make_step((CPU,)), Group(Ranks()))
    num_steps = 2 + sweep.NUM_TIMED_STEPS  # one creates optimizer state, one counts memory
    assert calls == ["forward and backward", "step"] * num_steps
    assert 0 < found[0] < 60
    ((model, before),) = models
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
