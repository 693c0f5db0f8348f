"""How long steps are predicted to take: against what was measured, and how it changes."""

import pytest

from tests.steps import CPU, GPUS, LARGE, WIDE, make_step
from unet3d.config import ModelSettings
from unet3d.errors import DeviceError
from unet3d.model import UNet3d
from unet3d.planning import step_time
from unet3d.planning.memory_estimate import Step
from unet3d.planning.step_time import count_parameters, count_work
from unet3d.planning.step_time import step_seconds as seconds


def on_gpu(edge: int, batch_size: int = 1, **more: object) -> Step:
    """Return a step of the standard network on a cube, on a GPU."""
    model = LARGE if edge >= 128 else ModelSettings(base_channels=32, deep_supervision=False)
    return make_step(GPUS[:1], (edge,) * 3, batch_size, precision="bfloat16", model=model, **more)


# Measured: ``benchmarks/results/spatial-2026-11-23.json``.
@pytest.mark.parametrize(
    ("edge", "one_ms", "two_ms"),
    [(128, 10.4, 8.4), (256, 68.9, 39.1), (384, 230.0, 123.4), (512, 557.4, 293.7)],
)
def test_gpus_take_what_h200_took(edge, one_ms, two_ms):
    assert 1000 * seconds(on_gpu(edge)) == pytest.approx(one_ms, rel=0.03)
    assert 1000 * seconds(on_gpu(edge, num_shards=2)) == pytest.approx(two_ms, rel=0.03)


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


def test_large_volumes_go_by_the_number_of_gpus():
    for count in (2, 4, 8):
        small, large = (
            seconds(on_gpu(edge)) / seconds(on_gpu(edge, num_shards=count)) for edge in (256, 1024)
        )
        assert small < large and 0.93 * count < large < 1.07 * count


def test_small_volumes_are_not_worth_messages_and_the_largest_slab_counts():
    assert seconds(on_gpu(32, num_shards=2)) > seconds(on_gpu(32))
    captured, launched = (
        seconds(on_gpu(128, num_shards=4, cuda_graphs=graphs)) for graphs in ("auto", "off")
    )
    assert launched > captured + 0.001
    # 32 units of 8 planes: ten slabs are of four or three.
    assert seconds(on_gpu(256, num_shards=10)) > 0.99 * seconds(on_gpu(256, num_shards=8))
    assert seconds(on_gpu(256, num_shards=11)) < 0.9 * seconds(on_gpu(256, num_shards=10))


def test_replicas_take_a_share_of_the_batch_each():
    one, two = seconds(on_gpu(128, 4)), seconds(on_gpu(128, 2, num_replicas=2))
    assert 1.7 < one / two < 2
    # Two H200, 2 x 2 patches of 128^3, with the buckets of DDP: 20.0 ms (docs/distributed.md).
    assert 1000 * two == pytest.approx(20.0, rel=0.06)


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
    # Input and result once in each of three passes, the map eight times for its norm.
    assert second.moved_bytes == 2 * (3 * (32 + 32) + 8 * 32) * voxels
    assert sum(block.num_norms for block in work) == 18
    assert count_parameters(topology) == sum(p.numel() for p in UNet3d(topology).parameters())


def test_what_saves_memory_and_batch_dice_take_time():
    for option, most in (({"recompute": "level"}, 1.35), ({"offload": "skips"}, 2.0)):
        assert 1.05 < seconds(on_gpu(256, **option)) / seconds(on_gpu(256)) < most
    # With micro-batches batch Dice passes forward once more.
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
