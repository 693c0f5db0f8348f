"""Cuts that balance time or memory, against all cuts that there are."""

import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch

from tests.steps import CPU, GPUS, SMALL, WIDE, make_step, predicted
from unet3d.config import load_config
from unet3d.errors import ConfigError, DeviceError
from unet3d.model import UNet3d
from unet3d.parallel.partition import default_cuts
from unet3d.planning import step_time
from unet3d.planning.block_work import count_work
from unet3d.planning.cuts import choose_cuts
from unet3d.planning.memory_estimate import Step
from unet3d.planning.step_time import CPU_CORE, H200, num_cores

TINY = SMALL.model_copy(update={"num_levels": 2})


def stages(step: Step, num_cuts: int) -> list[tuple[int, ...]]:
    num_blocks = len(UNet3d(step.topology).blocks())
    return list(itertools.combinations(range(1, num_blocks), num_cuts))


@pytest.mark.parametrize("devices", [GPUS[:2], GPUS[:3], (CPU, GPUS[0]), (GPUS[0], CPU)], ids=str)
def test_the_slowest_stage_is_as_fast_as_possible(devices, monkeypatch):
    monkeypatch.setattr(step_time, "convolves_by_hand", lambda device, dtype: False)
    step = make_step(devices, (64, 64, 64), 5, 2, "bfloat16", WIDE)
    work = count_work(step.topology, step.size, 3, 2)  # the larger micro-batch
    cores = num_cores()
    rates = {
        "cuda": (H200.operations_per_second, H200.bytes_per_second),
        "cpu": (cores * CPU_CORE.operations_per_second, cores * CPU_CORE.bytes_per_second),
    }

    def slowest(cuts):
        ends = zip(devices, itertools.pairwise((0, *cuts, len(work))), strict=True)
        return max(
            math.fsum(
                block.num_operations / rates[device.type][0]
                + block.moved_bytes / rates[device.type][1]
                for block in work[slice(*run)]
            )
            for device, run in ends
        )

    best = min(map(slowest, stages(step, len(devices) - 1)))
    assert slowest(choose_cuts(step, "time")) == pytest.approx(best)


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "options"),
    [
        (2, 4, {}),
        pytest.param(2, 1, {}, marks=pytest.mark.nightly),
        pytest.param(2, 4, {"recompute": "level"}, marks=pytest.mark.nightly),
        pytest.param(3, 4, {}, marks=pytest.mark.nightly),
        pytest.param(3, 1, {}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_fullest_stage_needs_as_little_as_any(num_stages, num_micro_batches, options):
    """The steps run on fake tensors, so these GPUs need not exist."""
    step = make_step(
        GPUS[:num_stages], (64, 64, 64), 4, num_micro_batches, "bfloat16", TINY, **options
    )

    def fullest(cuts):
        cut = replace(step, layout=replace(step.layout, cuts=cuts))
        memory = predicted(cut).memory.values()
        return max(slot.peak_bytes for slot in memory)

    best = min(map(fullest, stages(step, num_stages - 1)))
    assert fullest(choose_cuts(step, "memory")) <= 1.07 * best


def test_the_choice_is_said(caplog):
    step = make_step(GPUS[:2], (32, 32, 32), 4, 4, "bfloat16", TINY)
    names = [block.name for block in UNet3d(step.topology).blocks()]
    for balance, unit in (("time", " ms"), ("memory", " MiB")):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            (cut,) = choose_cuts(step, balance)
        (record,) = caplog.records
        line = record.getMessage()
        assert line.startswith(
            f"balanced by {balance}: cut before {names[cut]} (parallel.cuts={cut})"
        )
        assert line.count(unit) == 2


def test_the_default_looks_at_neither_and_too_many_stages_are_refused():
    for num_devices in (1, 2, 3):
        step = make_step((CPU,) * num_devices)
        model = UNet3d(step.topology)
        assert choose_cuts(step, "encoder-decoder") == default_cuts(model, step.layout)
    too_many = make_step((torch.device("cpu"),) * 99)
    for balance in ("encoder-decoder", "time", "memory"):
        with pytest.raises(DeviceError, match="99 devices for a network of .* blocks"):
            choose_cuts(too_many, balance)


def test_settings_that_balance_nothing_are_refused():
    for how in ("time", "memory"):
        with pytest.raises(ConfigError, match=f"cuts is .{how}. but parallel.mode auto"):
            load_config(None, [f"parallel.cuts={how}"])
        load_config(None, [f"parallel.cuts={how}", "parallel.mode=model"])
    settings = load_config(None, ["parallel.cuts=7", "parallel.mode=model"])
    assert settings.parallel.cuts == (7,)  # as the log names it
    with pytest.raises(ConfigError, match="give a list of .*auto, encoder-decoder, time or memory"):
        load_config(None, ["parallel.cuts=fair", "parallel.mode=model"])
