import functools
import itertools
import logging
import random
from pathlib import Path
from typing import Literal

import pytest
import torch

from unet3d.config import Balance, ModelSettings, Recompute, TrainingSettings, load_config
from unet3d.errors import ConfigError, DeviceError
from unet3d.kernels import recompute as remake
from unet3d.memory.meter import MemoryMeter
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
from unet3d.parallel import Layout, choose_cuts, parallelize
from unet3d.parallel.balance import cuts as balance
from unet3d.parallel.balance.cuts import memory_cost, time_cost
from unet3d.parallel.partition import StageCost, cheapest_cuts, default_cuts
from unet3d.parallel.schedule import SCHEDULES, most_alive
from unet3d.planning.memory_estimate import Step, predict_memory

CPU, OTHER = torch.device("cpu"), torch.device("meta")
SIZE = (32, 32, 32)


def make_model(**options: object) -> UNet3d:
    settings = ModelSettings(
        **{"deep_supervision": False, "base_channels": 4, "num_levels": 3, **options}
    )
    return UNet3d(plan_topology(settings, SIZE, (1.0, 1.0, 1.0), 1, 2))


def dearest(cost: StageCost, cuts: tuple[int, ...], num_blocks: int) -> float:
    ends = itertools.pairwise((0, *cuts, num_blocks))
    return max(cost(stage, *run) for stage, run in enumerate(ends))


def best_of_all(cost: StageCost, num_blocks: int, num_stages: int) -> float:
    choices = itertools.combinations(range(1, num_blocks), num_stages - 1)
    return min(dearest(cost, cuts, num_blocks) for cuts in choices)


@pytest.mark.parametrize("seed", range(20))
def test_costs_that_depend_on_the_stage_and_do_not_add_up(seed: int) -> None:
    generator = random.Random(seed)
    num_blocks = generator.randint(2, 9)
    table = {
        (stage, start, end): generator.random()
        for stage in range(num_blocks)
        for start in range(num_blocks)
        for end in range(start + 1, num_blocks + 1)
    }
    for num_stages in range(1, num_blocks + 1):

        def cost(stage: int, start: int, end: int) -> float:
            return table[stage, start, end]

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
@pytest.mark.parametrize("seed", range(5))
def test_time_is_balanced_on_each_stages_own_device(
    num_devices: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(seed)
    model = make_model()
    num_blocks = len(model.blocks())
    seconds = {
        device: [generator.random() for _ in range(num_blocks + 1)] for device in (CPU, OTHER)
    }
    asked = fake_times(monkeypatch, seconds)
    devices = tuple(generator.choice([CPU, OTHER]) for _ in range(num_devices))
    layout = Layout(devices=devices, cuts=None, num_micro_batches=2)
    cuts = choose_cuts(
        model, layout=layout, balance="time", size=SIZE, batch_size=5, num_states=1, folder=tmp_path
    )
    assert sorted(map(str, asked)) == sorted(str((device, 3)) for device in set(devices))

    def total(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, num_blocks + 1)  # the loss is with the last block
        return max(
            sum(seconds[device][a:b])
            for device, (a, b) in zip(devices, itertools.pairwise(bounds), strict=True)
        )

    best = min(map(total, itertools.combinations(range(1, num_blocks), num_devices - 1)))
    assert total(cuts) == pytest.approx(best)


def test_a_dear_block_and_a_dear_loss_pull_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    names = [block.name for block in model.blocks()]
    ones = [1.0] * len(names)
    layout = Layout(devices=(CPU, CPU))
    fake_times(monkeypatch, {CPU: [*ones, 0.0]})
    assert choose_cuts(
        model, layout=layout, balance="time", size=SIZE, batch_size=1, num_states=1, folder=tmp_path
    ) == (6,)
    fake_times(monkeypatch, {CPU: [20.0, *ones[1:], 0.0]})
    assert choose_cuts(
        model, layout=layout, balance="time", size=SIZE, batch_size=1, num_states=1, folder=tmp_path
    ) == (1,)
    fake_times(monkeypatch, {CPU: [*ones, 8.0]})
    with caplog.at_level(logging.INFO):
        assert choose_cuts(
            model,
            layout=layout,
            balance="time",
            size=SIZE,
            batch_size=1,
            num_states=1,
            folder=tmp_path,
        ) == (10,)
    assert f"balanced by time: cut before {names[10]} (parallel.cuts=10)" in caplog.text
    assert "10000.0 ms (50%), 10000.0 ms (50%)" in caplog.text


@pytest.mark.parametrize(
    ("num_devices", "batch_size", "num_micro_batches", "options"),
    [
        (2, 1, 1, {}),
        (2, 5, 2, {"deep_supervision": True}),
        (3, 4, 4, {"num_levels": 2}),
        (4, 4, 4, {"num_levels": 2}),
        (4, 5, 2, {"deep_supervision": True}),
    ],
    ids=str,
)
def test_memory_is_balanced_as_well_as_can_be(
    num_devices: int,
    batch_size: int,
    num_micro_batches: int,
    options: dict[str, object],
    tmp_path: Path,
) -> None:
    model = make_model(**options)
    layout = Layout(devices=(CPU,) * num_devices, cuts=None, num_micro_batches=num_micro_batches)
    cuts = choose_cuts(
        model,
        layout=layout,
        balance="memory",
        size=SIZE,
        batch_size=batch_size,
        num_states=1,
        folder=tmp_path,
    )
    cost = functools.cache(memory_cost(model, layout, SIZE, batch_size, 1))
    num_blocks = len(model.blocks())
    assert dearest(cost, cuts, num_blocks) == best_of_all(cost, num_blocks, num_devices)
    assert not list(tmp_path.iterdir())  # nothing is measured


def measured_peaks(cuts: tuple[int, ...] | None, num_micro_batches: int) -> list[int]:
    torch.manual_seed(0)
    executor = parallelize(
        make_model(), Layout(devices=(CPU, CPU), cuts=cuts, num_micro_batches=num_micro_batches)
    )
    meter = MemoryMeter(executor.slots, executor.module)
    executor.observer = meter
    image, target = torch.randn(2, 1, *SIZE), torch.zeros(2, *SIZE, dtype=torch.uint8)
    executor.forward_backward(image, target, dice_cross_entropy)
    meter.note_gradients()
    measured = meter.read(torch.optim.SGD(executor.module.parameters()))
    return [measured[slot.index].peak_bytes for slot in executor.slots]


def test_balancing_memory_lowers_the_largest_peak(tmp_path: Path) -> None:
    """Of one micro-batch: the default leaves the decoder with most of what is kept."""
    layout = Layout(devices=(CPU, CPU), cuts=None, num_micro_batches=1)
    cuts = choose_cuts(
        make_model(),
        layout=layout,
        balance="memory",
        size=SIZE,
        batch_size=2,
        num_states=1,
        folder=tmp_path,
    )
    default, chosen = measured_peaks(None, 1), measured_peaks(cuts, 1)
    assert max(chosen) < max(default)
    assert max(chosen) / min(chosen) < max(default) / min(default)


@pytest.mark.parametrize(
    ("cuts", "num_micro_batches", "schedule", "recompute"),
    [
        *(((6,), 4, "1f1b", recompute) for recompute in ("norm", "level", "off")),
        *(((4, 8), 4, "1f1b", recompute) for recompute in ("norm", "level", "off")),
        ((), 1, "1f1b", "level"),
        ((1,), 1, "1f1b", "norm"),
        ((9,), 4, "all-forward", "off"),
        ((9,), 4, "all-forward", "norm"),
    ],
)
def test_the_sum_over_blocks_is_about_what_a_whole_step_allocates(
    cuts: tuple[int, ...],
    num_micro_batches: int,
    schedule: Literal["1f1b", "all-forward"],
    recompute: Recompute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step runs on fake tensors, so these GPUs need not exist."""
    monkeypatch.setattr(remake, "MIN_ELEMENTS", 0)
    topology = plan_topology(
        ModelSettings(base_channels=8, num_levels=3, deep_supervision=False),
        (64, 64, 64),
        (1.0, 1.0, 1.0),
        1,
        3,
    )
    gpus = tuple(torch.device("cuda", index) for index in range(len(cuts) + 1))
    layout = Layout(
        devices=gpus,
        cuts=cuts,
        num_micro_batches=num_micro_batches,
        autocast=torch.bfloat16,
        schedule=schedule,
        recompute=recompute,
    )
    step = Step(
        topology=topology,
        layout=layout,
        size=(64, 64, 64),
        batch_size=4,
        settings=TrainingSettings(),
        precision="bfloat16",
    )
    predicted = predict_memory(step, counts_reserved=False)
    allocated = [slot.peak_bytes for slot in predicted.memory.values()]
    model = UNet3d(topology)
    cost = memory_cost(model, layout, (64, 64, 64), 4, 1)
    ends = itertools.pairwise((0, *cuts, len(model.blocks())))
    summed = [cost(stage, *run) for stage, run in enumerate(ends)]
    # Of three stages the last also reads what the first made, which comes earlier than is summed.
    tolerance = 0.02 if len(cuts) < 2 else 0.12
    assert summed == pytest.approx(allocated, rel=tolerance)
    assert max(summed) == pytest.approx(max(allocated), rel=tolerance)


def test_micro_batches_in_flight_move_the_cut_forward(tmp_path: Path) -> None:
    """With 1F1B the first of two stages keeps two micro-batches, so it gets fewer blocks."""
    model = make_model()
    (one,), (several,) = (
        choose_cuts(
            model,
            layout=Layout(devices=(CPU, CPU), cuts=None, num_micro_batches=count),
            balance="memory",
            size=SIZE,
            batch_size=4,
            num_states=1,
            folder=tmp_path,
        )
        for count in (1, 4)
    )
    assert several < one


def test_micro_batches_under_way_are_those_of_the_timetables() -> None:
    alive = most_alive(SCHEDULES["1f1b"], 8, 3)
    # A stage keeps as many as there are stages from it to the end, and what it sends on waits at
    # the next until its turn comes.
    assert [alive[stage][stage] for stage in range(3)] == [3, 2, 1]
    assert [alive[0][1], alive[1][2]] == [3, 2]
    assert most_alive(SCHEDULES["1f1b"], 1, 3) == [[1, 1, 1]] * 3
    assert most_alive(SCHEDULES["all-forward"], 8, 2) == [[8, 8], [8, 8]]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_default_looks_at_neither(num_devices: int, tmp_path: Path) -> None:
    model = make_model()
    layout = Layout(devices=(CPU,) * num_devices)
    cuts = choose_cuts(
        model,
        layout=layout,
        balance="encoder-decoder",
        size=SIZE,
        batch_size=1,
        num_states=1,
        folder=tmp_path,
    )
    assert cuts == default_cuts(model, num_devices)


@pytest.mark.parametrize("how", ["encoder-decoder", "time", "memory"])
def test_more_devices_than_blocks_are_refused(
    how: Balance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(num_levels=2)
    num_blocks = len(model.blocks())
    fake_times(monkeypatch, {CPU: [1.0] * (num_blocks + 1)})
    most = Layout(devices=(CPU,) * num_blocks)
    assert choose_cuts(
        model, layout=most, balance=how, size=SIZE, batch_size=1, num_states=1, folder=tmp_path
    ) == tuple(range(1, num_blocks))
    with pytest.raises(DeviceError, match=rf"{num_blocks + 1} devices for a network of .* blocks"):
        choose_cuts(
            model,
            layout=Layout(devices=(CPU,) * (num_blocks + 1)),
            balance=how,
            size=SIZE,
            batch_size=1,
            num_states=1,
            folder=tmp_path,
        )


def test_time_on_one_device_adds_up_to_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    fake_times(monkeypatch, {CPU: [1.0 + index for index in range(len(model.blocks()) + 1)]})
    cost = time_cost(model, Layout(devices=(CPU, CPU)), (16, 16, 16), 1, tmp_path)
    num_blocks = len(model.blocks())
    whole = cost(0, 0, num_blocks)
    assert cost(0, 0, 5) + cost(1, 5, num_blocks) == pytest.approx(whole)
    assert cost(0, 0, num_blocks - 1) < whole


def test_settings_that_balance_nothing_are_refused() -> None:
    for how in ("time", "memory"):
        with pytest.raises(ConfigError, match=f"parallel.balance is {how} but parallel.mode auto"):
            load_config(None, [f"parallel.balance={how}"])
        load_config(None, [f"parallel.balance={how}", "parallel.mode=model"])
    settings = load_config(None, ["parallel.cuts=7", "parallel.mode=model"])
    assert settings.parallel.cuts == (7,)  # as the log names it
    with pytest.raises(ConfigError, match="give encoder-decoder, time, memory or auto"):
        load_config(None, ["parallel.balance=fair", "parallel.mode=model"])


@pytest.mark.multigpu
def test_two_gpus_need_equal_memory(tmp_path: Path) -> None:
    topology = plan_topology(
        ModelSettings(deep_supervision=False), (128, 128, 128), (1.0, 1.0, 1.0), 1, 3
    )
    devices = (torch.device("cuda:0"), torch.device("cuda:1"))
    layout = Layout(devices=devices, cuts=None, num_micro_batches=1, autocast=torch.bfloat16)
    model = UNet3d(topology)
    cuts = choose_cuts(
        model,
        layout=layout,
        balance="memory",
        size=(128, 128, 128),
        batch_size=1,
        num_states=1,
        folder=tmp_path,
    )
    executor = parallelize(
        model, Layout(devices=devices, cuts=cuts, num_micro_batches=1, autocast=torch.bfloat16)
    )
    image = torch.randn(1, 1, 128, 128, 128, device=devices[0])
    target = torch.zeros(1, 128, 128, 128, dtype=torch.uint8, device=devices[1])
    for step in range(3):
        if step == 2:
            for device in devices:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
        executor.forward_backward(image, target, dice_cross_entropy)
    peaks = [torch.cuda.max_memory_allocated(device) for device in devices]
    assert max(peaks) <= 1.15 * min(peaks)
