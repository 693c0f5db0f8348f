"""The ways to place a training on devices, and the memory that each may use."""

import pytest
import torch

from tests.steps import predicted
from unet3d.config import Config, load_config
from unet3d.errors import ConfigError, DeviceError
from unet3d.parallel import ParallelDims
from unet3d.parallel.spatial.division import SlabRule
from unet3d.planning import placements
from unet3d.planning.memory_estimate import predict_shards
from unet3d.planning.network_plan import NetworkPlan, plan_without_data
from unet3d.planning.placements import (
    PlacementOption,
    memory_of,
    placed,
    possible_dims,
    timed_options,
)

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", index) for index in range(8))
MIB = 1024**2

pytestmark = pytest.mark.usefixtures("launched")


def planned(*changes: str) -> tuple[Config, NetworkPlan]:
    few = ("patches.size=32,32,32", "training.precision=bfloat16")
    config = load_config(None, [*few, *changes])
    return config, plan_without_data(config)


def ways(devices: tuple[torch.device, ...], *changes: str) -> list[tuple[str, int, int]]:
    """Return mode, replicas and shards of every possible way."""
    return [
        (dims.mode, dims.num_replicas, dims.num_shards)
        for dims in possible_dims(*planned(*changes), devices)
    ]


SPATIAL = "parallel.mode=spatial"
THIN = ("patches.size=4,64,64", "model.num_levels=3", "training.batch_size=2")
ONE, WHOLE = ("none", 1, 1), ("spatial", 1, 8)
FOURTHS = [("spatial", 1, 4), ("spatial", 2, 2)]


@pytest.mark.parametrize(
    ("devices", "changes", "found"),
    [
        (GPUS, ("training.batch_size=7",), [ONE, WHOLE, ("spatial", 2, 4), ("spatial", 4, 2)]),
        (GPUS[:4], ("training.batch_size=4",), [ONE, ("data", 4, 1), *FOURTHS]),
        # A requested number of replicas is kept.
        (GPUS, (SPATIAL, "training.batch_size=8", "parallel.replicas=4"), [("spatial", 4, 2)]),
        (GPUS, (SPATIAL, "training.batch_size=8", "parallel.replicas=8"), [("data", 8, 1)]),
        # With a batch of two on six GPUs, three groups can only be stages.
        (GPUS[:6], (SPATIAL, "training.batch_size=2", "parallel.replicas=3"), [("model", 3, 1)]),
        # Each shard of a volume needs planes.
        (GPUS[:4], THIN, [ONE, *FOURTHS]),
        (GPUS, THIN, [ONE, ("spatial", 2, 4)]),
        # Stages are left, if there are at least as many blocks as devices.
        ((GPUS[0], CPU), (), [ONE, ("model", 1, 1)]),
        ((GPUS[0], GPUS[0]), (), [ONE, ("model", 1, 1)]),
        (GPUS[:2], ("model.norm=batch",), [ONE, ("model", 1, 1)]),
        (tuple(torch.device("cuda", i) for i in range(64)), ("training.batch_size=1",), [ONE]),
    ],
)
def test_what_is_possible_depends_on_settings_and_devices(devices, changes, found):
    assert ways(devices, *changes) == found


def test_a_mode_that_does_not_suit_the_devices_is_refused():
    config, _ = planned()
    dims = placed(config.parallel, "spatial", GPUS[:6], 3)
    assert (dims.num_replicas, dims.num_shards) == (3, 2)
    assert dims.replicas == (GPUS[:2], GPUS[2:4], GPUS[4:6])
    with pytest.raises(DeviceError, match="divided equally among 4"):
        placed(config.parallel, "spatial", GPUS[:6], 4)


def option(dims: ParallelDims, memory: dict[torch.device, int], *changes: str) -> PlacementOption:
    config, network = planned("training.batch_size=4", *changes)
    (found,) = timed_options(config, network, (dims,), memory)
    return found


def test_the_smallest_device_decides():
    config, _ = planned()
    memory = {gpu: (index + 2) * MIB for index, gpu in enumerate(reversed(GPUS))}
    every = placed(config.parallel, "spatial", GPUS)
    assert option(every, memory).limits == {GPUS[0]: 2 * MIB}
    assert option(placed(config.parallel, "data", GPUS[:4]), memory).limits == {GPUS[0]: 6 * MIB}
    stages = placed(config.parallel, "model", GPUS[:4], 2)
    assert option(stages, memory).limits == {GPUS[0]: 7 * MIB, GPUS[1]: 6 * MIB}


def test_processes_on_a_cpu_share_its_memory():
    config, _ = planned()
    memory, precision = {CPU: 12 * MIB}, "training.precision=float32"  # every CPU has it
    alone = placed(config.parallel, "none", (CPU,))
    assert option(alone, memory, precision).limits == {CPU: 12 * MIB}
    for mode, count in (("data", 1), ("spatial", 1), ("spatial", 2)):
        dims = placed(config.parallel, mode, (CPU,) * 4, count)
        assert option(dims, memory, precision).limits == {CPU: 3 * MIB}
    stages = placed(config.parallel, "model", (CPU,) * 4, 2)
    assert option(stages, memory, precision).limits == {
        CPU: 6 * MIB
    }  # one process has two of these devices


@pytest.mark.nightly
def test_an_option_is_the_step_of_one_process():
    config, _ = planned()
    dims = placed(config.parallel, "spatial", GPUS[:6], 2)
    found = option(dims, dict.fromkeys(GPUS, 1024 * MIB))
    layout = found.step.layout
    assert (layout.devices, layout.num_shards) == ((GPUS[0],), 3)
    division = SlabRule(topology=found.step.topology, num_shards=3).divide((32, 32, 32))
    assert len(division.slab(layout.shard)) == division.most_planes()
    assert (found.step.batch_size, found.step.size) == (2, (32, 32, 32))
    # The largest slab stands for all: no slab needs noticeably more.
    peaks = [shard.memory[0].peak_bytes for shard in predict_shards(found.step)]
    assert len(peaks) == 3
    assert max(peaks) == pytest.approx(found.prediction.memory[0].peak_bytes, rel=0.01)
    assert found.prediction.memory == predicted(found.step).memory
    assert found.load > 1 and found.largest() is None  # a GPU needs 1.5 GiB besides the tensors
    assert option(dims, dict.fromkeys(GPUS, 1024 * 2 * MIB)).load <= 1


def test_memory_of_devices_that_are_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="cuda:0 is not on this machine"):
        memory_of(GPUS[:2], None)
    assert memory_of(GPUS[:2], 5) == {GPUS[0]: 5, GPUS[1]: 5}
    assert memory_of((CPU, CPU), 5) == {CPU: 5}
    both = memory_of((CPU, GPUS[0]), 5)  # the given memory is for the GPU
    assert both[GPUS[0]] == 5 and both[CPU] > 5
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(placements, "device_bytes", lambda device: 7)
    assert memory_of(GPUS[:2], None) == {GPUS[0]: 7, GPUS[1]: 7}  # assumed to be alike
