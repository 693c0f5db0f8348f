"""How long steps are predicted to take: against what was measured, and how it changes."""

from dataclasses import replace

import pytest
import torch

from tests.steps import CPU, GPUS, LARGE, WIDE, make_step
from unet3d.config import ModelSettings, Shape
from unet3d.distributed import ranks
from unet3d.errors import DeviceError
from unet3d.model import UNet3d
from unet3d.planning import step_time
from unet3d.planning.memory_estimate import Step
from unet3d.planning.step_time import count_parameters, count_work, rates_of, step_seconds


def on_gpu(edge: int, batch_size: int = 1, **layout: object) -> Step:
    """Return a step of the standard network on a cube, on a GPU."""
    model = LARGE if edge >= 128 else ModelSettings(base_channels=32, deep_supervision=False)
    return make_step(GPUS[:1], (edge,) * 3, batch_size, precision="bfloat16", model=model, **layout)


def seconds(step: Step) -> float:
    predicted = step_seconds(step)
    assert predicted is not None
    return predicted


# Measured: ``benchmarks/results/spatial-2026-11-23.json``.
@pytest.mark.parametrize(
    ("edge", "milliseconds"), [(128, 10.4), (256, 68.9), (384, 230.0), (512, 557.4)]
)
def test_one_gpu_takes_what_an_h200_took(edge: int, milliseconds: float) -> None:
    assert 1000 * seconds(on_gpu(edge)) == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(
    ("edge", "milliseconds"), [(128, 8.4), (256, 39.1), (384, 123.4), (512, 293.7)]
)
def test_two_gpus_take_what_two_h200_took(edge: int, milliseconds: float) -> None:
    assert 1000 * seconds(on_gpu(edge, num_shards=2)) == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(
    ("channels", "edge", "precision", "milliseconds"),
    [
        ((32, 64, 128, 256, 320), 64, "bfloat16", 599),
        ((32, 64, 128, 256, 320), 96, "bfloat16", 1903),
        ((32, 64, 128, 256, 320), 96, "float32", 3398),
        ((8, 16, 32, 64), 40, "bfloat16", 44),
        ((4, 8), 64, "bfloat16", 53),
    ],
)
def test_a_cpu_takes_what_two_cores_took(
    channels: tuple[int, ...],
    edge: int,
    precision: str,
    milliseconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_time, "num_cores", lambda: 2)
    model = ModelSettings(channels=channels, deep_supervision=False)
    step = make_step((CPU,), (edge,) * 3, 1, precision=precision, model=model)
    assert 1000 * seconds(step) == pytest.approx(milliseconds, rel=0.1)


def test_large_volumes_go_by_the_number_of_gpus() -> None:
    ratios = {
        (edge, count): seconds(on_gpu(edge)) / seconds(on_gpu(edge, num_shards=count))
        for edge in (128, 256, 384, 1024)
        for count in (2, 4, 8)
    }
    for edge in (256, 384, 1024):
        assert ratios[edge, 2] < ratios[edge, 4] < ratios[edge, 8] < 8.5
    for count in (2, 4, 8):
        assert ratios[128, count] < ratios[256, count] < ratios[384, count] < ratios[1024, count]
        assert ratios[1024, count] > 0.93 * count
    assert 1.6 < ratios[256, 2] < 1.9


def test_small_volumes_are_not_worth_messages() -> None:
    assert seconds(on_gpu(32, num_shards=2)) > seconds(on_gpu(32))
    captured, launched = (
        seconds(on_gpu(128, num_shards=4, cuda_graphs=graphs)) for graphs in ("auto", "off")
    )
    assert launched > captured + 0.001


def test_the_largest_slab_counts() -> None:
    # 32 units of 8 planes: ten slabs are of four or three.
    assert seconds(on_gpu(256, num_shards=10)) > 0.99 * seconds(on_gpu(256, num_shards=8))
    assert seconds(on_gpu(256, num_shards=11)) < 0.9 * seconds(on_gpu(256, num_shards=10))


def test_replicas_take_a_share_of_the_batch_each() -> None:
    one, two = seconds(on_gpu(128, 4)), seconds(on_gpu(128, 2, num_replicas=2))
    assert 1.7 < one / two < 2
    # Two H200, 2 x 2 patches of 128^3: 21.5 ms (docs/benchmarks.md).
    assert 1000 * two == pytest.approx(21.5, rel=0.06)


def test_processes_share_the_cores_of_a_cpu() -> None:
    alone = seconds(make_step((CPU,), (64,) * 3, 2, model=WIDE))
    data = seconds(make_step((CPU,), (64,) * 3, 1, model=WIDE, num_replicas=2))
    shards = seconds(make_step((CPU,), (64,) * 3, 2, model=WIDE, num_shards=2))
    assert alone < data < 1.3 * alone
    assert alone < shards < 1.8 * alone


def test_more_cores_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step((CPU,), (64,) * 3, 1, model=WIDE)
    times = []
    for cores in (1, 4):
        monkeypatch.setattr(step_time, "num_cores", lambda cores=cores: cores)
        times.append(seconds(step))
    assert times[0] > 3 * times[1]
    assert ranks.num_cores() >= 1


def test_operations_and_weights_are_those_of_the_network() -> None:
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


def test_a_block_that_was_measured_takes_what_it_took() -> None:
    step = on_gpu(128)
    work = count_work(step.topology, step.size, 1, 2)
    rates = rates_of(GPUS[0], "bfloat16")
    twice = step_seconds(step, {block.name: 2.0 for block in work})
    assert twice is not None
    added = sum(block.seconds(rates) for block in work)
    assert twice - seconds(step) == pytest.approx(added)


@pytest.mark.parametrize("option", [{"recompute": "level"}, {"offload": "skips"}], ids=str)
def test_what_saves_memory_takes_time(option: dict[str, str]) -> None:
    assert 1.05 < seconds(on_gpu(256, **option)) / seconds(on_gpu(256)) < 1.35


def test_batch_dice_takes_a_forward_pass_more_with_micro_batches() -> None:
    for num_micro_batches, least, most in ((1, 1.0, 1.0), (4, 1.3, 1.34)):
        steps = [
            make_step(
                GPUS[:1], (128,) * 3, 4, num_micro_batches, model=LARGE, batch_dice=batch_dice
            )
            for batch_dice in (False, True)
        ]
        assert least <= seconds(steps[1]) / seconds(steps[0]) <= most


def test_stages_are_not_predicted() -> None:
    assert step_seconds(make_step(GPUS[:2], precision="bfloat16")) is None


@pytest.mark.parametrize("size", [(16, 16, 16), (8, 64, 64)], ids=str)
def test_too_few_planes_are_refused(size: Shape) -> None:
    step = make_step((torch.device("cuda", 0),), size)
    with pytest.raises(DeviceError, match="too few"):
        step_seconds(replace(step, layout=replace(step.layout, num_shards=17)))
