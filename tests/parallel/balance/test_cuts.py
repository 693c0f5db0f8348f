import functools
import itertools
import logging
import random

import pytest
import torch

from tests.plain_network import make_topology
from tests.steps import GPUS, SMALL, make_step
from unet3d.config import load_config
from unet3d.errors import ConfigError, DeviceError
from unet3d.kernels import recompute as remake
from unet3d.model import UNet3d
from unet3d.parallel import Layout, choose_cuts
from unet3d.parallel.balance import cuts as balance
from unet3d.parallel.balance.cuts import memory_cost
from unet3d.parallel.partition import default_cuts
from unet3d.parallel.schedule import most_alive
from unet3d.planning.memory_estimate import predict_memory

CPU, OTHER = torch.device("cpu"), torch.device("meta")
SIZE = (16, 16, 8)


def make_model(**options):
    return UNet3d(make_topology(**options))


def chosen(folder, balance, model=None, batch_size=1, **layout):
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


def cheapest(cost, num_blocks, num_stages):
    """Return what the dearest stage costs with the best of all cuts."""
    choices = itertools.combinations(range(1, num_blocks), num_stages - 1)
    return min(dearest(cost, cuts, num_blocks) for cuts in choices)


def dearest(cost, cuts, num_blocks):
    ends = itertools.pairwise((0, *cuts, num_blocks))
    return max(cost(stage, *run) for stage, run in enumerate(ends))


def fake_times(monkeypatch, seconds):
    """Let blocks take these times; return the devices and sample counts that are asked for."""
    asked = []

    def block_seconds(model, device, size, num_samples, *rest):
        asked.append((device, num_samples))
        return tuple(seconds[device])

    monkeypatch.setattr(balance, "block_seconds", block_seconds)
    return asked


@pytest.mark.parametrize("num_devices", [2, 4])
def test_time_is_balanced_on_each_stages_own_device(num_devices, tmp_path, monkeypatch):
    generator, model = random.Random(0), make_model()
    num_blocks = len(model.blocks())
    for _ in range(5):
        seconds = {
            device: [generator.random() for _ in range(num_blocks + 1)] for device in (CPU, OTHER)
        }
        asked = fake_times(monkeypatch, seconds)
        devices = tuple(generator.choice([CPU, OTHER]) for _ in range(num_devices))
        cuts = chosen(tmp_path, "time", model, 5, devices=devices, num_micro_batches=2)
        assert sorted(map(str, asked)) == sorted(str((device, 3)) for device in set(devices))

        def cost(stage, start, end):  # the loss is with the last block
            return sum(seconds[devices[stage]][start : end + (end == num_blocks)])  # noqa: B023

        best = cheapest(cost, num_blocks, num_devices)
        assert dearest(cost, cuts, num_blocks) == pytest.approx(best)
    too_many = (CPU,) * (num_blocks + 1)
    with pytest.raises(DeviceError, match=rf"{num_blocks + 1} devices for a network of .* blocks"):
        chosen(tmp_path, "time", model, devices=too_many)


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
    [(2, 5, 2, {"deep_supervision": True}), (4, 4, 4, {"num_levels": 2})],
    ids=str,
)
def test_memory_is_balanced_as_well_as_can_be(
    num_devices, batch_size, num_micro_batches, options, tmp_path
):
    model = make_model(**options)
    spread = {"devices": (CPU,) * num_devices, "num_micro_batches": num_micro_batches}
    cuts = chosen(tmp_path, "memory", model, batch_size, **spread)
    cost = functools.cache(memory_cost(model, Layout(cuts=None, **spread), SIZE, batch_size, 1))
    num_blocks = len(model.blocks())
    assert dearest(cost, cuts, num_blocks) == cheapest(cost, num_blocks, num_devices)
    assert not list(tmp_path.iterdir())  # nothing is measured


@pytest.mark.parametrize(
    ("cuts", "num_micro_batches", "recompute"),
    [
        ((6,), 4, "norm"),
        ((6,), 4, "level"),
        ((4, 8), 4, "norm"),
        ((1,), 1, "norm"),
        ((9,), 4, "off"),
    ],
)
def test_the_sum_over_blocks_is_about_what_a_whole_step_allocates(
    cuts, num_micro_batches, recompute, monkeypatch
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
        recompute=recompute,
    )
    predicted = predict_memory(step)
    allocated = [slot.peak_bytes for slot in predicted.memory.values()]
    model = UNet3d(step.topology)
    cost = memory_cost(model, step.layout, (64, 64, 64), 4, 1)
    ends = itertools.pairwise((0, *cuts, len(model.blocks())))
    summed = [cost(stage, *run) for stage, run in enumerate(ends)]
    # Of three stages the last also reads what the first made, which comes earlier than is summed.
    assert summed == pytest.approx(allocated, rel=0.02 if len(cuts) < 2 else 0.12)


def test_micro_batches_under_way_are_those_of_the_timetables():
    alive = most_alive(8, 3)
    # A stage keeps as many as there are stages from it to the end, and what it sends on waits at
    # the next until its turn comes.
    assert [alive[stage][stage] for stage in range(3)] == [3, 2, 1]
    assert [alive[0][1], alive[1][2]] == [3, 2]
    assert most_alive(1, 3) == [[1, 1, 1]] * 3


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_default_looks_at_neither(num_devices, tmp_path):
    cuts = chosen(tmp_path, "encoder-decoder", devices=(CPU,) * num_devices)
    assert cuts == default_cuts(make_model(), num_devices)


def test_settings_that_balance_nothing_are_refused():
    for how in ("time", "memory"):
        with pytest.raises(ConfigError, match=f"balance is .{how}. but parallel.mode auto"):
            load_config(None, [f"parallel.balance={how}"])
        load_config(None, [f"parallel.balance={how}", "parallel.mode=model"])
    settings = load_config(None, ["parallel.cuts=7", "parallel.mode=model"])
    assert settings.parallel.cuts == (7,)  # as the log names it
    with pytest.raises(ConfigError, match="give encoder-decoder, time, memory or auto"):
        load_config(None, ["parallel.balance=fair", "parallel.mode=model"])
