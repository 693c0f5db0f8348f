"""Predicted times of steps, against measured ones, and how they change."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.shards import run_shards
from tests.steps import CPU, GPUS, LARGE, WIDE, make_step
from unet3d.config import ModelSettings
from unet3d.errors import DeviceError
from unet3d.model import UNet3d, dice_cross_entropy
from unet3d.parallel.spatial import division
from unet3d.parallel.spatial.division import SlabRule
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.planning import step_time
from unet3d.planning.memory_estimate import Step
from unet3d.planning.step_time import (
    BESIDE_SECONDS,
    CPU_CORE,
    GLOO,
    H200,
    NVLINK,
    Links,
    count_work,
    links_between,
    long_on_cpu,
    message_seconds,
    num_cores,
    time_cuts,
)
from unet3d.planning.step_time import step_seconds as seconds


def on_gpu(edge: int, batch_size: int = 1, **more: object) -> Step:
    """Return a step of the standard network on a cube, on a GPU."""
    model = LARGE if edge >= 128 else ModelSettings(base_channels=32, deep_supervision=False)
    return make_step(GPUS[:1], (edge,) * 3, batch_size, precision="bfloat16", model=model, **more)


@pytest.fixture
def all_by_cudnn(monkeypatch):
    """A GPU without hand-written convolutions, as when most times were measured."""
    monkeypatch.setattr(step_time, "convolves_by_hand", lambda device, dtype: False)


# Measured: ``benchmarks/results/spatial-2026-11-23.json``.
@pytest.mark.usefixtures("all_by_cudnn")
@pytest.mark.parametrize(
    ("edge", "one_ms", "two_ms"),
    [(128, 10.4, 8.4), (256, 68.9, 39.1), (384, 230.0, 123.4), (512, 557.4, 293.7)],
)
def test_gpus_take_what_h200_took(edge, one_ms, two_ms):
    assert 1000 * seconds(on_gpu(edge)) == pytest.approx(one_ms, rel=0.05)
    assert 1000 * seconds(on_gpu(edge, num_shards=2)) == pytest.approx(two_ms, rel=0.05)


# Measured: ``benchmarks/results/hopper-h200-2026-11-27.json``.
@pytest.mark.parametrize(
    ("edge", "batch_size", "num_shards", "milliseconds"),
    [
        (128, 2, 1, 13.7),
        (128, 7, 1, 44.5),
        (256, 1, 1, 49.3),
        (384, 1, 1, 166.3),
        (256, 1, 2, 28.8),
        (384, 1, 2, 90.4),
    ],
)
def test_gpus_with_hand_written_convolutions(edge, batch_size, num_shards, milliseconds):
    step = on_gpu(edge, batch_size, num_shards=num_shards)
    assert 1000 * seconds(step) == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(
    ("channels", "edge", "precision", "milliseconds"),
    [
        ((32, 64, 128, 256, 320), 96, "bfloat16", 1903),
        ((32, 64, 128, 256, 320), 96, "float32", 3398),
        ((8, 16, 32, 64), 40, "bfloat16", 44),
        ((4, 8), 64, "bfloat16", 53),
    ],
)
def test_a_cpu_takes_what_two_cores_took(channels, edge, precision, milliseconds, monkeypatch):
    monkeypatch.setattr(step_time, "num_cores", lambda: 2)
    model = ModelSettings(channels=channels, deep_supervision=False)
    step = make_step((CPU,), (edge,) * 3, 1, precision=precision, model=model)
    assert 1000 * seconds(step) == pytest.approx(milliseconds, rel=0.1)


def times_as_fast(edge: int, count: int) -> float:
    return seconds(on_gpu(edge)) / seconds(on_gpu(edge, num_shards=count))


def test_large_volumes_go_by_the_number_of_gpus():
    for count in (2, 4, 8):
        small, large = (times_as_fast(edge, count) for edge in (256, 1024))
        assert small < large and 0.9 * count < large <= count


def test_small_volumes_are_not_worth_messages_and_the_largest_slab_counts():
    assert seconds(on_gpu(32, num_shards=2)) > seconds(on_gpu(32))
    captured, launched = (
        seconds(on_gpu(128, num_shards=4, captures=graphs)) for graphs in (True, False)
    )
    assert launched > captured + 0.001
    # 32 units of 8 planes: ten slabs have four or three units.
    assert seconds(on_gpu(256, num_shards=10)) > 0.99 * seconds(on_gpu(256, num_shards=8))
    assert seconds(on_gpu(256, num_shards=11)) < 0.9 * seconds(on_gpu(256, num_shards=10))


@pytest.mark.usefixtures("all_by_cudnn")
def test_replicas_take_a_share_of_the_batch_each():
    one, two = seconds(on_gpu(128, 4)), seconds(on_gpu(128, 2, num_replicas=2))
    assert 1.7 < one / two < 2
    # Two H200, 2 x 2 patches of 128^3, with the buckets of DDP: 20.0 ms (docs/results/devices.md).
    assert 1000 * two == pytest.approx(20.0, rel=0.06)


def test_a_training_that_takes_days_on_a_cpu_is_warned_of():
    step = make_step((CPU,), (128,) * 3, 2, precision="float32", model=LARGE)
    for epochs, unit in ((1000, "days"), (20, "hours")):
        long = replace(step, settings=step.settings.model_copy(update={"epochs": epochs}))
        hours = seconds(step) * epochs * 250 / 3600
        number = hours / 24 if unit == "days" else hours
        assert f"about {number:.0f} {unit} on a CPU ({epochs} epochs of 250" in long_on_cpu(long)
    brief = {"epochs": 1, "steps_per_epoch": 2}
    assert long_on_cpu(replace(step, settings=step.settings.model_copy(update=brief))) is None
    assert long_on_cpu(on_gpu(128)) is None


def test_processes_share_the_cores_of_a_cpu(monkeypatch):
    def on_cpu(batch_size, **layout):
        return seconds(make_step((CPU,), (64,) * 3, batch_size, model=WIDE, **layout))

    alone = on_cpu(2)
    assert alone < on_cpu(1, num_replicas=2) < 1.3 * alone
    assert alone < on_cpu(2, num_shards=2) < 1.8 * alone
    times = []
    for cores in (1, 4):
        monkeypatch.setattr(step_time, "num_cores", lambda cores=cores: cores)
        times.append(on_cpu(1))
    assert times[0] > 3 * times[1]


def test_operations_and_weights_are_those_of_the_network():
    topology = on_gpu(64).topology
    work = count_work(topology, (64, 64, 64), 2, 2)
    assert [block.name for block in work] == [block.name for block in UNet3d(topology).blocks()]
    (second,) = (block for block in work if block.name == "encoder.0.1")
    voxels = 2 * 64**3
    assert second.num_operations == 3 * 2 * 27 * 32 * 32 * voxels
    # Each of three passes reads input and writes result once; the norm adds passes over the map.
    assert second.moved_bytes == 2 * (3 * (32 + 32) + 8 * 32) * voxels
    assert sum(block.num_norms for block in work) == 18
    num_parameters = sum(parameter.numel() for parameter in UNet3d(topology).parameters())
    assert sum(block.num_parameters for block in work) == num_parameters


def test_what_saves_memory_and_batch_dice_take_time():
    for option, most in (({"recompute": "level"}, 1.35), ({"offload": "skips"}, 2.0)):
        assert 1.05 < seconds(on_gpu(256, **option)) / seconds(on_gpu(256)) < most
    level = {"recompute": "level"}  # offloads nothing
    assert seconds(on_gpu(256, **level, offload="skips")) == seconds(on_gpu(256, **level))
    # Batch Dice with micro-batches runs forward a second time.
    for num_micro_batches, least, most in ((1, 1.0, 1.0), (4, 1.3, 1.34)):
        plain, joined = (
            seconds(on_gpu(128, 4, num_micro_batches=num_micro_batches, batch_dice=batch_dice))
            for batch_dice in (False, True)
        )
        assert least <= joined / plain <= most


def test_stages_are_not_predicted_and_too_few_planes_are_refused():
    assert seconds(make_step(GPUS[:2], precision="bfloat16")) is None
    for size in ((16, 16, 16), (8, 64, 64)):
        with pytest.raises(DeviceError, match="too few"):
            seconds(make_step(GPUS[:1], size, num_shards=17))


def test_messages_take_what_two_h200_took():
    for num_bytes, microseconds in ((2**9, 12), (2**19, 18), (2**21, 25), (2**23, 60)):
        assert 1e6 * NVLINK.exchange(num_bytes) == pytest.approx(microseconds, rel=0.2)
    assert 1e6 * NVLINK.sum(640 * 4, 2) == pytest.approx(12, rel=0.03)
    assert 1e3 * NVLINK.sum(125e6, 2) == pytest.approx(0.44, rel=0.01)
    assert NVLINK.sum(125e6, 2) < NVLINK.sum(125e6, 8) < 2 * NVLINK.sum(125e6, 2)
    assert GLOO.sum(125e6, 4) > 100 * NVLINK.sum(125e6, 4)
    # Launched steps take longer.
    assert links_between(on_cpu=False, captured=True) == NVLINK
    assert links_between(on_cpu=False, captured=False).exchange(1024) > 3 * NVLINK.exchange(1024)


def test_messages_are_as_slow_as_the_link_that_was_measured():
    assert links_between(False, True, 380e9) == NVLINK  # a copy over NVLink of two H200
    pcie = links_between(False, True, 12e9)
    assert pcie.sum(125e6, 2) == pytest.approx(125e6 / 12e9, rel=0.01)
    assert pcie.exchange(12e6) == pytest.approx(1e-3, rel=0.02)
    assert links_between(True, True, 12e9) == links_between(True, False) == GLOO
    replicas, shards = on_gpu(128, 1, num_replicas=2), on_gpu(128, 2, num_shards=2)
    for step in (replicas, shards):
        assert seconds(step, 12e9) > seconds(step) + 0.009
        assert seconds(step, 400e9) == seconds(step)
    assert seconds(on_gpu(128), 12e9) == seconds(on_gpu(128))


@pytest.mark.parametrize(
    ("min_divided", "num_shards", "num_samples"), [(0, 2, 1), (8 * 8 * 8 * 8, 3, 2), (2**20, 2, 2)]
)
def test_as_many_messages_are_counted_as_are_sent(
    min_divided, num_shards, num_samples, monkeypatch
):
    """With all levels divided, all but one, and only the first."""
    monkeypatch.setattr(division, "MIN_DIVIDED_ELEMENTS", min_divided)
    size = (24, 16, 16)

    def work(shard, messages):
        step = make_step((CPU,), size, num_samples, num_shards=num_shards, shard=shard)
        executor = SpatialExecutor(UNet3d(step.topology), step.layout, messages=messages)
        image = torch.randn(num_samples, 2, *step.own_size)
        target = torch.zeros(num_samples, *step.own_size, dtype=torch.uint8)
        executor.forward_backward(image, target, dice_cross_entropy, planes=size[0])
        return messages.log

    step = make_step((CPU,), size, num_samples, num_shards=num_shards)
    slabs = SlabRule(topology=step.topology, num_shards=num_shards).divide(size)
    logs = run_shards(num_shards, work)
    assert {len(log) for log in logs} == {len(logs[0])}
    amounts = {
        one: [amount for kind, amount in logs[1] if kind == one]
        for one in ("swap", "gather", "sum")
    }
    swapped, gathered, summed = sum(amounts["swap"]), max(amounts["gather"]), max(amounts["sum"])
    if slabs.num_divided == step.topology.num_levels:
        gathered = summed = 0  # all but moments, whose time is that of any message
    for latency, planes, sums, expected in (
        (1, math.inf, math.inf, len(logs[1])),
        (0, 1, math.inf, swapped + (num_shards - 1) * gathered),
        (0, math.inf, 1, 2 * (num_shards - 1) / num_shards * summed * 4),
    ):
        links = Links(latency_seconds=latency, planes_per_second=planes, sums_per_second=sums)
        found = message_seconds(step, slabs, links, num_samples)
        assert found == pytest.approx(expected, abs=100 * BESIDE_SECONDS)


def test_the_cut_that_was_fastest_on_two_gpus_is_chosen():
    """Of the cuts before blocks 12 to 24, a step with the one before block 20 took least time."""
    step = make_step(GPUS[:2], (192, 192, 192), 8, 8, "bfloat16", LARGE)
    assert time_cuts(step) == (20,)


@pytest.mark.parametrize("devices", [GPUS[:2], GPUS[:3], (CPU, GPUS[0]), (GPUS[0], CPU)], ids=str)
def test_the_slowest_of_the_stages_is_as_fast_as_possible(devices, caplog):
    step = make_step(devices, (64, 64, 64), 5, 2, "bfloat16", WIDE)
    work = count_work(step.topology, step.size, 3, 2)  # the larger micro-batch
    cores = num_cores()
    rates = {
        "cuda": (H200.operations_per_second, H200.bytes_per_second, 270e9),
        "cpu": (
            *(cores * CPU_CORE.operations_per_second, cores * CPU_CORE.bytes_per_second),
            math.inf,
        ),
    }
    constant = {"cuda": H200.step_seconds / len(work), "cpu": CPU_CORE.step_seconds / len(work)}
    readers = {block.name: [block.name in other.inputs for other in work] for block in work}

    def slowest(cuts):
        ends = zip(devices, itertools.pairwise((0, *cuts, len(work))), strict=True)
        return max(
            math.fsum(
                constant[device.type]
                + block.num_operations / rates[device.type][0]
                + block.moved_bytes / rates[device.type][1]
                + block.made_bytes * any(readers[block.name][run[1] :]) / rates[device.type][2]
                for block in work[slice(*run)]
            )
            for device, run in ends
        )

    with caplog.at_level("INFO"):
        cuts = time_cuts(step)
    every = itertools.combinations(range(1, len(work)), len(devices) - 1)
    assert slowest(cuts) == pytest.approx(min(map(slowest, every)))
    (line,) = caplog.messages
    names = " and ".join(work[cut].name for cut in cuts)
    assert line.startswith(f"balanced by time: cut before {names} (parallel.cuts={cuts[0]}")
    assert line.count(" ms") == len(devices)
    assert time_cuts(make_step((CPU,))) == ()
