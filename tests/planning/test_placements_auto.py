"""The placement that mode auto chooses on several devices, and the reasons that it reports."""

import logging
import math
from pathlib import Path

import pytest
import torch

from tests.products import by_night
from unet3d.config import Config, ParallelSettings, load_config
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DeviceError
from unet3d.planning import placements
from unet3d.planning.network_plan import plan_without_data
from unet3d.planning.placements import PlacementOption, choose_mode, possible_dims, timed_options
from unet3d.planning.tuning_cache import TunedConfig, remember_tuned

pytestmark = pytest.mark.usefixtures("launched")

GIB = 1024**3


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that the machine has eight GPUs of 80 GiB."""
    has = {"gib": 80.0, "link": math.inf}
    torch.backends.cudnn.version()  # its first call queries all GPUs
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(placements, "device_bytes", lambda device: int(has["gib"] * GIB))

    def measure_link(devices, are_here=True):
        is_known = are_here and len(set(devices)) > 1
        return has["link"] if is_known else None

    monkeypatch.setattr(placements, "measure_link", measure_link)
    return has


def chosen(cache: Path, *changes: str, ranks: Ranks | None = None) -> tuple[ParallelSettings, str]:
    config = settings(cache, *changes)
    return choose_mode(config, plan_without_data(config), ranks=ranks)


def settings(cache: Path, *changes: str) -> Config:
    few = ("training.precision=bfloat16", f"data.cache={cache}", "model.num_levels=3")
    return load_config(None, [*few, *changes])


def options_of(config: Config, num_gpus: int) -> list[PlacementOption]:
    """Return all possible ways to place a training, each with the time of a step."""
    network = plan_without_data(config)
    devices = tuple(torch.device("cuda", index) for index in range(num_gpus))
    memory = placements.memory_of(devices, None)
    return timed_options(config, network, possible_dims(config, network, devices), memory)


def placed(found: ParallelSettings) -> tuple[str, int, int]:
    """Return mode, groups and number of devices."""
    return found.mode, found.replicas, len(found.devices or ())


FOUR = "parallel.devices=0,1,2,3"
LARGE = "patches.size=256,256,256"
SMALL = "patches.size=32,32,32"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "changes", "found"),
    [
        (FOUR, (LARGE, "training.batch_size=1"), ("spatial", 1, 4)),
        (FOUR, (LARGE, "training.batch_size=4"), ("data", 1, 4)),
        # A replica has a patch for each micro-batch.
        (FOUR, (LARGE, "training.batch_size=4", "training.micro_batches=4"), ("spatial", 1, 4)),
        (FOUR, (SMALL, "training.batch_size=1"), ("none", 1, 1)),
        (FOUR, (LARGE, "training.batch_size=4", "parallel.replicas=2"), ("spatial", 2, 4)),
        ("parallel.devices=0,cpu", (LARGE,), ("model", 1, 2)),
        *by_night(
            (FOUR, (LARGE, "training.batch_size=2"), ("spatial", 2, 4)),
            ("parallel.devices=0,1", (LARGE, "model.norm=batch"), ("model", 1, 2)),
            (FOUR, ("patches.size=3,64,64", "training.batch_size=1"), ("model", 1, 4)),
            (FOUR, (LARGE, "training.batch_size=1", "parallel.replicas=2"), ("model", 2, 4)),
        ),
    ],
    ids=str,
)
def test_the_fastest_is_taken(devices, changes, found, tmp_path):
    choice, line = chosen(tmp_path, devices, *changes)
    assert placed(choice) == found
    words = {
        ("none", 1): "none, on cuda:0",
        ("data", 1): "data over 4 GPUs",
        ("spatial", 1): "spatial over 4 GPUs",
        ("spatial", 2): "2 replicas of spatial over 2 GPUs each",
    }.get(found[:2], "model over " + ",".join(choice.devices))
    assert line.startswith(f"parallel: {words}") and "\n" not in line


@pytest.mark.usefixtures("gpus")
def test_what_does_not_fit_is_not_taken(tmp_path, monkeypatch):
    changes = (FOUR, LARGE, "training.batch_size=4")
    loads = {("none", 1): 3.0, ("data", 4): 1.01, ("spatial", 1): 0.9, ("spatial", 2): 1.2}

    def load(option):
        return loads[option.dims.mode, option.dims.num_replicas]

    monkeypatch.setattr(PlacementOption, "load", property(load))
    found, line = chosen(tmp_path, *changes)
    assert placed(found) == ("spatial", 1, 4)
    assert line.endswith("; data over 4 GPUs would be faster but does not fit")
    loads["spatial", 1] = 1.02
    found, line = chosen(tmp_path, *changes)
    assert placed(found) == ("data", 1, 4)
    assert line.endswith("; no placement fits, this one comes closest")


def test_memory_decides_what_fits(gpus, tmp_path):
    changes = (FOUR, LARGE, "training.batch_size=1")
    assert placed(chosen(tmp_path, *changes)[0]) == ("spatial", 1, 4)
    gpus["gib"] = 3.0
    assert "no placement fits" in chosen(tmp_path, *changes)[1]
    gpus["gib"] = 4.0
    assert "no placement fits" not in chosen(tmp_path, *changes)[1]


@pytest.mark.usefixtures("gpus")
def test_measured_steps_replace_predicted_ones(tmp_path):
    changes = ("parallel.devices=0,1", LARGE, "training.batch_size=1")
    assert placed(chosen(tmp_path, *changes)[0])[0] == "spatial"
    config = settings(tmp_path, *changes)
    one, spatial = options_of(config, 2)

    def remember(option, seconds):
        tuned = TunedConfig(cuts=(), num_micro_batches=1, step_seconds=seconds, measured="")
        remember_tuned(config, option.step, tuned)

    remember(one, 2 * one.seconds)  # all other ways then take twice as long, too
    _, line = chosen(tmp_path, *changes)
    assert line.startswith(
        f"parallel: spatial over 2 GPUs: predicted {2000 * spatial.seconds:.0f} ms a step against "
        f"{2000 * one.seconds:.0f} on one"
    )
    remember(spatial, one.seconds)
    assert f"GPUs: measured {1000 * one.seconds:.0f} ms a step" in chosen(tmp_path, *changes)[1]
    remember(spatial, 3 * one.seconds)
    found, line = chosen(tmp_path, *changes)
    assert placed(found) == ("none", 1, 1)
    assert f"against {3000 * one.seconds:.0f} with spatial over 2 GPUs" in line


@pytest.mark.nightly
def test_a_slow_link_is_measured_said_and_not_used(gpus, tmp_path, caplog):
    two = ("parallel.devices=0,1", "patches.size=128,128,128", "training.batch_size=2")
    large = (*two[:1], "patches.size=192,192,192", "training.batch_size=1")
    for changes, mode in ((two, "data"), (large, "spatial")):
        gpus["link"] = 400e9
        fast, fast_line = chosen(tmp_path, *changes)
        assert fast.mode == mode
        gpus["link"] = 0.5e9
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found, line = chosen(tmp_path, *changes)
        assert placed(found) == ("none", 1, 1)
        assert "link: 0.5 GB/s measured between the GPUs" in caplog.messages
        # It does not change the time of one GPU.
        alone = fast_line.split(" against ")[1].split(" ")[0]
        assert f"predicted {alone} ms a step against" in line


def test_processes_on_one_cpu_are_no_gain(tmp_path):
    cpus = ("parallel.devices=cpu,cpu", SMALL, "training.precision=float32")
    found, line = chosen(tmp_path, *cpus)
    assert placed(found) == ("none", 1, 1)
    assert "against" in line and "CPU processes" in line


@pytest.mark.usefixtures("gpus")
def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(DeviceError, match="device '9' does not exist"):
        chosen(tmp_path, "parallel.devices=0,9")
    with pytest.raises(DeviceError, match="divided equally among 2"):
        chosen(tmp_path, "parallel.devices=0,1,2", "parallel.replicas=2")


@pytest.mark.parametrize(
    ("num_ranks", "changes", "found"),
    [
        (2, (SMALL,), ("data", 1)),
        (4, (SMALL, "training.batch_size=2", "parallel.replicas=2"), ("spatial", 2)),
        *by_night(
            (2, (SMALL, "model.norm=batch"), ("data", 1)),
            (4, ("patches.size=3,32,32", "training.batch_size=1"), ("data", 1)),
        ),
    ],
    ids=str,
)
def test_all_ranks_that_were_started_take_part(num_ranks, changes, found, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    few = ("training.precision=float32", "model.num_levels=2", "model.base_channels=4")
    for local_world_size in {num_ranks, num_ranks // 2}:  # on one machine, and on two
        ranks = Ranks(rank=0, world_size=num_ranks, local_rank=0, local_world_size=local_world_size)
        choice, _ = chosen(tmp_path, *few, *changes, ranks=ranks)
        assert (choice.mode, choice.replicas) == found
        assert choice.devices is None  # not set
