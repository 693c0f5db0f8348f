import functools
import itertools
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.steps import GPUS, LARGE, SMALL, make_step
from unet3d.config import Balance, ModelSettings, load_config
from unet3d.errors import ConfigError, DeviceError
from unet3d.kernels import recompute as remake
from unet3d.memory.meter import MemoryMeter
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
from unet3d.parallel import Layout, choose_cuts, parallelize
from unet3d.parallel.balance import cuts as balance
from unet3d.parallel.balance.cuts import memory_cost, time_cost
from unet3d.parallel.partition import StageCost, cheapest_cuts, default_cuts
from unet3d.parallel.schedule import SCHEDULES, most_alive
from unet3d.planning.memory_estimate import predict_memory

CPU, OTHER = torch.device("cpu"), torch.device("meta")
SIZE = (32, 32, 32)


def make_model(**options: object) -> UNet3d:
    settings = ModelSettings(
        **{"deep_supervision": False, "base_channels": 4, "num_levels": 3, **options}
    )
    return UNet3d(plan_topology(settings, SIZE, (1.0, 1.0, 1.0), 1, 2))


def chosen(
    folder: Path, balance: Balance, model: UNet3d | None = None, batch_size: int = 1, **layout: Any
) -> tuple[int, ...]:
    """Return the cuts that are chosen, by default for two stages on CPUs."""
    return choose_cuts(
        make_model() if model is None else model,
        layout=Layout(**{"devices": (CPU, CPU), "cuts": None} | layout),
        balance=balance,
        size=SIZE,
        batch_size=batch_size,
        num_states=1,
        folder=folder,
    )


def dearest(cost: StageCost, cuts: tuple[int, ...], num_blocks: int) -> float:
    ends = itertools.pairwise((0, *cuts, num_blocks))
    return max(cost(stage, *run) for stage, run in enumerate(ends))


def best_of_all(cost: StageCost, num_blocks: int, num_stages: int) -> float:
    choices = itertools.combinations(range(1, num_blocks), num_stages - 1)
    return min(dearest(cost, cuts, num_blocks) for cuts in choices)


@pytest.mark.parametrize("num_blocks", range(2, 10))
def test_costs_that_depend_on_the_stage_and_do_not_add_up(num_blocks):
    generator = random.Random(num_blocks)
    table = {
        (stage, start, end): generator.random()
        for stage in range(num_blocks)
        for start in range(num_blocks)
        for end in range(start + 1, num_blocks + 1)
    }

    def cost(stage, start, end):
        return table[stage, start, end]

    for num_stages in range(1, num_blocks + 1):
        cuts = cheapest_cuts(cost, num_blocks, num_stages)
        assert len(cuts) == num_stages - 1
        assert dearest(cost, cuts, num_blocks) == best_of_all(cost, num_blocks, num_stages)


def fake_times(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[torch.device, list[float]]
) -> list[tuple[torch.device, int]]:
    """Let blocks take these times; return the devices and sample counts that are asked for."""
    asked = []

    def block_seconds(
        model: UNet3d, device: torch.device, size: object, num_samples: int, *rest: object
    ) -> tuple[float, ...]:
        asked.append((device, num_samples))
        return tuple(seconds[device])

    monkeypatch.setattr(balance, "block_seconds", block_seconds)
    return asked


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_time_is_balanced_on_each_stages_own_device(num_devices, tmp_path, monkeypatch):
    generator = random.Random(0)
    model = make_model()
    num_blocks = len(model.blocks())
    for _ in range(5):
        seconds = {
            device: [generator.random() for _ in range(num_blocks + 1)] for device in (CPU, OTHER)
        }
        asked = fake_times(monkeypatch, seconds)
        devices = tuple(generator.choice([CPU, OTHER]) for _ in range(num_devices))
        cuts = chosen(tmp_path, "time", model, 5, devices=devices, num_micro_batches=2)
        assert sorted(map(str, asked)) == sorted(str((device, 3)) for device in set(devices))

        def total(cuts):
            bounds = (0, *cuts, num_blocks + 1)  # the loss is with the last block
            ends = zip(devices, itertools.pairwise(bounds), strict=True)  # noqa: B023
            return max(sum(seconds[device][a:b]) for device, (a, b) in ends)  # noqa: B023

        best = min(map(total, itertools.combinations(range(1, num_blocks), num_devices - 1)))
        assert total(cuts) == pytest.approx(best)


def test_a_dear_block_and_a_dear_loss_pull_the_cut(tmp_path, monkeypatch, caplog):
    names = [block.name for block in make_model().blocks()]
    ones = [1.0] * len(names)
    with caplog.at_level(logging.INFO):
        for seconds, cut in (([*ones, 0.0], 6), ([20.0, *ones[1:], 0.0], 1), ([*ones, 8.0], 10)):
            fake_times(monkeypatch, {CPU: seconds})
            assert chosen(tmp_path, "time") == (cut,)
    assert f"balanced by time: cut before {names[10]} (parallel.cuts=10)" in caplog.text
    assert "10000.0 ms (50%), 10000.0 ms (50%)" in caplog.text


@pytest.mark.parametrize(
    ("num_devices", "batch_size", "num_micro_batches", "options"),
    [
        (2, 5, 2, {"deep_supervision": True}),
        (4, 4, 4, {"num_levels": 2}),
        pytest.param(4, 5, 2, {"deep_supervision": True}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_memory_is_balanced_as_well_as_can_be(
    num_devices, batch_size, num_micro_batches, options, tmp_path
):
    model = make_model(**options)
    spread = {"devices": (CPU,) * num_devices, "num_micro_batches": num_micro_batches}
    cuts = chosen(tmp_path, "memory", model, batch_size, **spread)
    layout = Layout(cuts=None, **spread)
    cost = functools.cache(memory_cost(model, layout, SIZE, batch_size, 1))
    num_blocks = len(model.blocks())
    assert dearest(cost, cuts, num_blocks) == best_of_all(cost, num_blocks, num_devices)
    assert not list(tmp_path.iterdir())  # nothing is measured


def measured_peaks(cuts: tuple[int, ...] | None) -> list[int]:
    executor = parallelize(make_model(), Layout(devices=(CPU, CPU), cuts=cuts))
    meter = MemoryMeter(executor.slots, executor.module)
    executor.observer = meter
    image, target = torch.randn(2, 1, *SIZE), torch.zeros(2, *SIZE, dtype=torch.uint8)
    executor.forward_backward(image, target, dice_cross_entropy)
    meter.note_gradients()
    measured = meter.read(torch.optim.SGD(executor.module.parameters()))
    return [measured[slot.index].peak_bytes for slot in executor.slots]


def test_balancing_memory_lowers_the_largest_peak(tmp_path):
    """Of one micro-batch: the default leaves the decoder with most of what is kept."""
    cuts = chosen(tmp_path, "memory", batch_size=2)
    default, balanced = measured_peaks(None), measured_peaks(cuts)
    assert max(balanced) < max(default)
    assert max(balanced) / min(balanced) < max(default) / min(default)
    # With 1F1B the first of two stages keeps two micro-batches, so it gets fewer blocks.
    assert chosen(tmp_path, "memory", batch_size=4, num_micro_batches=4) < cuts


@pytest.mark.parametrize(
    ("cuts", "num_micro_batches", "schedule", "recompute"),
    [
        ((6,), 4, "1f1b", "norm"),
        ((6,), 4, "1f1b", "level"),
        pytest.param((6,), 4, "1f1b", "off", marks=pytest.mark.nightly),
        ((4, 8), 4, "1f1b", "norm"),
        pytest.param((4, 8), 4, "1f1b", "level", marks=pytest.mark.nightly),
        pytest.param((4, 8), 4, "1f1b", "off", marks=pytest.mark.nightly),
        pytest.param((), 1, "1f1b", "level", marks=pytest.mark.nightly),
        ((1,), 1, "1f1b", "norm"),
        ((9,), 4, "all-forward", "off"),
        pytest.param((9,), 4, "all-forward", "norm", marks=pytest.mark.nightly),
    ],
)
def test_the_sum_over_blocks_is_about_what_a_whole_step_allocates(
    cuts, num_micro_batches, schedule, recompute, monkeypatch
):
    """The step runs on fake tensors, so these GPUs need not exist."""
    monkeypatch.setattr(remake, "MIN_ELEMENTS", 0)
    step = make_step(
        GPUS[: len(cuts) + 1],
        (64, 64, 64),
        4,
        num_micro_batches,
        "bfloat16",
        SMALL.model_copy(update={"base_channels": 8}),
        cuts=cuts,
        schedule=schedule,
        recompute=recompute,
    )
    predicted = predict_memory(step, counts_reserved=False)
    allocated = [slot.peak_bytes for slot in predicted.memory.values()]
    model = UNet3d(step.topology)
    cost = memory_cost(model, step.layout, (64, 64, 64), 4, 1)
    ends = itertools.pairwise((0, *cuts, len(model.blocks())))
    summed = [cost(stage, *run) for stage, run in enumerate(ends)]
    # Of three stages the last also reads what the first made, which comes earlier than is summed.
    assert summed == pytest.approx(allocated, rel=0.02 if len(cuts) < 2 else 0.12)


def test_micro_batches_under_way_are_those_of_the_timetables():
    alive = most_alive(SCHEDULES["1f1b"], 8, 3)
    # A stage keeps as many as there are stages from it to the end, and what it sends on waits at
    # the next until its turn comes.
    assert [alive[stage][stage] for stage in range(3)] == [3, 2, 1]
    assert [alive[0][1], alive[1][2]] == [3, 2]
    assert most_alive(SCHEDULES["1f1b"], 1, 3) == [[1, 1, 1]] * 3
    assert most_alive(SCHEDULES["all-forward"], 8, 2) == [[8, 8], [8, 8]]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_default_looks_at_neither(num_devices, tmp_path):
    cuts = chosen(tmp_path, "encoder-decoder", devices=(CPU,) * num_devices)
    assert cuts == default_cuts(make_model(), num_devices)


@pytest.mark.parametrize("how", ["encoder-decoder", "time", "memory"])
def test_more_devices_than_blocks_are_refused(how, tmp_path, monkeypatch):
    model = make_model(num_levels=2)
    num_blocks = len(model.blocks())
    fake_times(monkeypatch, {CPU: [1.0] * (num_blocks + 1)})
    cuts = chosen(tmp_path, how, model, devices=(CPU,) * num_blocks)
    assert cuts == tuple(range(1, num_blocks))
    with pytest.raises(DeviceError, match=rf"{num_blocks + 1} devices for a network of .* blocks"):
        chosen(tmp_path, how, model, devices=(CPU,) * (num_blocks + 1))


def test_time_on_one_device_adds_up_to_the_network(tmp_path, monkeypatch):
    model = make_model()
    fake_times(monkeypatch, {CPU: [1.0 + index for index in range(len(model.blocks()) + 1)]})
    cost = time_cost(model, Layout(devices=(CPU, CPU)), (16, 16, 16), 1, tmp_path)
    num_blocks = len(model.blocks())
    whole = cost(0, 0, num_blocks)
    assert cost(0, 0, 5) + cost(1, 5, num_blocks) == pytest.approx(whole)
    assert cost(0, 0, num_blocks - 1) < whole


def test_settings_that_balance_nothing_are_refused():
    for how in ("time", "memory"):
        with pytest.raises(ConfigError, match=f"parallel.balance is {how} but parallel.mode auto"):
            load_config(None, [f"parallel.balance={how}"])
        load_config(None, [f"parallel.balance={how}", "parallel.mode=model"])
    settings = load_config(None, ["parallel.cuts=7", "parallel.mode=model"])
    assert settings.parallel.cuts == (7,)  # as the log names it
    with pytest.raises(ConfigError, match="give encoder-decoder, time, memory or auto"):
        load_config(None, ["parallel.balance=fair", "parallel.mode=model"])


@pytest.mark.multigpu
def test_two_gpus_need_equal_memory(tmp_path):
    step = make_step(GPUS[:2], (128,) * 3, 1, precision="bfloat16", model=LARGE)
    model = UNet3d(step.topology)
    cuts = choose_cuts(
        model,
        layout=step.layout,
        balance="memory",
        size=step.size,
        batch_size=1,
        num_states=1,
        folder=tmp_path,
    )
    executor = parallelize(model, replace(step.layout, cuts=cuts))
    image = torch.randn(1, 2, *step.size, device=GPUS[0])
    target = torch.zeros(1, *step.size, dtype=torch.uint8, device=GPUS[1])
    for number in range(3):
        if number == 2:
            for device in GPUS[:2]:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
        executor.forward_backward(image, target, dice_cross_entropy)
    peaks = [torch.cuda.max_memory_allocated(device) for device in GPUS[:2]]
    assert max(peaks) <= 1.15 * min(peaks)
