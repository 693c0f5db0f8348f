"""Patch and batch that fit into a given memory, and the rules by which they are chosen."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.products import by_night
from tests.steps import CPU, make_step, predicted
from unet3d.config import Config, ModelSettings, Shape, load_config
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.model import plan_topology, unet
from unet3d.parallel import ParallelDims
from unet3d.patches.patches import padded_shape
from unet3d.planning import step_size
from unet3d.planning.network_plan import NetworkPlan, plan_fingerprint, plan_notes
from unet3d.planning.placements import timed_options
from unet3d.planning.step_size import (
    MIN_EDGE,
    cube_in_mm,
    largest_fitting,
    largest_size,
    shrinking_sizes,
    within_gpus,
)
from unet3d.preparation.preprocess import Fingerprint

pytestmark = pytest.mark.usefixtures("launched")

GIB = 1024**3
GPU = torch.device("cuda", 0)
ALONE = ParallelDims(mode="none", replicas=((GPU,),), num_replicas=1)
NARROW = ("model.base_channels=8", "model.num_levels=2")
"""Settings with which features take most of a step's memory, and predictions are quick."""


def fingerprint(shape: Shape, **more: Any) -> Fingerprint:
    given = {"spacing_mm": (1.0, 1.0, 1.0), "shapes": frozenset([shape]), "num_cases": 100, **more}
    return Fingerprint(shape=shape, **given)


def planned(
    data: Fingerprint | Shape, *changes: str, num_replicas: int = 1
) -> tuple[Config, NetworkPlan]:
    """Return settings and the plan for data, or for volumes of a shape."""
    config = load_config(None, [*NARROW, *changes])
    data = data if isinstance(data, Fingerprint) else fingerprint(data)
    return config, plan_fingerprint(config, data, 1, 3, num_replicas)


def needed_gib(config: Config, network: NetworkPlan, **changes: Any) -> float:
    """Return the memory that ``unet3d plan`` predicts on one GPU for this step, launched."""
    config = config.with_values({"training.precision": "bfloat16"})
    changed = NetworkPlan(**{**vars(network), **changes})
    (option,) = timed_options(config, changed, (ALONE,), {GPU: 80 * GIB})
    return option.prediction.needed_bytes()[GPU] / GIB


def limits_of(network: NetworkPlan) -> tuple[str, str]:
    """Return the reasons that limit the patch and the batch."""
    patch, batch = re.findall(r"(?:voxels|in a batch) \((.*?)\)", network.limits)
    return patch, batch


def said_gib(network: NetworkPlan) -> str:
    """Return the memory that the message names."""
    return network.limits.split(": ")[1].split(" of ")[0]


def test_the_patch_fits_and_the_next_larger_one_does_not():
    data = fingerprint((240, 200, 160))
    config, network = planned(data, "patches.memory_gib=1.8")

    def plan(size):
        return plan_topology(config.model, size, data.spacing_mm, 1, 3)

    assert (limits_of(network)[0], network.batch_size) == ("limited by memory", 2)
    assert said_gib(network) == f"{needed_gib(config, network):.1f}"
    assert needed_gib(config, network) <= 1.8
    sizes = list(shrinking_sizes(plan, data.shape, data.shape))
    larger = sizes[sizes.index(network.size) - 1]
    assert network.topology == plan(network.size)
    assert needed_gib(config, network, topology=plan(larger), sizes=frozenset([larger])) > 1.8


@pytest.mark.nightly
def test_what_is_set_stays_and_the_rest_is_planned_for_it():
    data = (240, 200, 160)
    _, free = planned(data, "patches.memory_gib=1.8")
    _, more = planned(data, "patches.memory_gib=1.8", "training.batch_size=6")
    assert more.batch_size == 6
    assert math.prod(more.size) < math.prod(free.size)
    assert limits_of(more) == ("limited by memory", "as set")
    config, large = planned(data, "patches.memory_gib=1.4", "patches.size=64,64,64")
    assert large.size == (64, 64, 64)
    assert limits_of(large) == ("as set", "limited by memory")
    one_more = {"batch_size": large.batch_size + 1}
    assert large.batch_size > 2
    assert needed_gib(config, large) <= 1.4 < needed_gib(config, large, **one_more)
    # If the patch is set and large, only a batch of one fits.
    _, single = planned(data, "patches.memory_gib=1.4", "patches.size=160,160,160")
    assert (single.size, single.batch_size) == ((160, 160, 160), 1)
    _, both = planned(data, "patches.size=160,160,160", "training.batch_size=9")
    assert (both.size, both.batch_size, both.limits) == ((160, 160, 160), 9, None)
    # Tensors kept for backward count.
    few = ("patches.memory_gib=1.4", "patches.size=64,64,64", "memory.recompute=off")
    config, kept = planned(data, *few)
    assert kept.batch_size < large.batch_size
    assert needed_gib(config, kept) <= 1.4 < needed_gib(config, large)


@pytest.mark.parametrize(
    ("num_cases", "changes", "num_replicas", "batch_size", "limit"),
    [
        # 5 % of 100 cases, each as large as a patch.
        (100, (), 1, 5, "limited by 5% of the data's voxels"),
        (10, (), 1, 2, "the smallest"),
        (100_000, (), 1, 32, "the largest that is planned"),
        (10, ("training.micro_batches=3",), 1, 3, "the smallest"),
        (
            100,
            ("training.micro_batches=2",),
            4,
            8,
            "a patch for each micro-batch of each replica",
        ),
    ],
)
def test_a_batch_is_limited_by_the_data_and_the_devices(
    num_cases, changes, num_replicas, batch_size, limit
):
    data = fingerprint((32, 32, 32), num_cases=num_cases)
    _, network = planned(data, *changes, num_replicas=num_replicas)
    assert network.size == (32, 32, 32)
    assert limits_of(network) == ("limited by the median volume", limit)
    assert network.batch_size == batch_size


@pytest.mark.parametrize(
    "changes",
    [(), *by_night((("training.batch_size=5",),), (("patches.size=40,40,40",),))],
)
def test_a_settled_plan_is_planned_as_the_same(changes):
    """So a resumed run has the network with which it began, and all ranks have the same."""
    data = fingerprint((90, 61, 50), spacing_mm=(1.0, 1.0, 2.5))
    config, network = planned(data, "patches.memory_gib=1.2", *changes)
    settled = network.settled(config)
    again = plan_fingerprint(settled, data, 1, 3, num_replicas=1)
    for name in ("topology", "sizes", "batch_size"):
        assert getattr(again, name) == getattr(network, name), name
    assert network.settled(settled) == settled
    # If the batch is set to the planned one, the patch is the same.
    batch = config.with_values({"training.batch_size": network.batch_size})
    assert plan_fingerprint(batch, data, 1, 3).sizes == network.sizes


@pytest.mark.nightly
def test_a_network_that_no_patch_suits_is_planned_at_its_smallest():
    _, network = planned((64, 48, 6), "patches.memory_gib=0.5", "model.num_levels=4")
    assert sorted(network.size) == [6, 8, 32]  # the network's levels need one axis with 32 voxels
    assert limits_of(network)[0] == "the smallest, though memory is exceeded"
    with pytest.raises(ConfigError, match="has 6 levels but a patch of 64x64x64 voxels gives 5"):
        planned((64, 64, 64), "model.num_levels=6")


def test_whole_volumes_stay_whole_and_their_batch_is_planned():
    data = fingerprint((40, 36, 32), num_cases=200, shapes=frozenset([(32, 40, 32), (48, 32, 32)]))
    config, network = planned(data, "patches.size=whole")
    # Along each axis a batch is as large as its largest volume, 48x40x32.
    assert network.batch_size == round(0.05 * 200 * 40 * 36 * 32 / (48 * 32 * 32))
    assert said_gib(network) == f"{needed_gib(config, network):.1f}"
    assert network.settled(config).patches.size == "whole"


def test_a_network_that_the_host_cannot_hold_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(unet, "shortage", lambda needed: f"needs {needed} bytes")
    with pytest.raises(DoesNotFitError, match="use fewer channels or levels"):
        planned((32, 32, 32))


def test_the_smallest_gpu_limits_the_memory():
    config = load_config()
    assert within_gpus(config, []) is config
    assert within_gpus(config, [80 * GIB, 12 * GIB]) is config
    assert within_gpus(config, [80 * GIB, 8 * GIB]).patches.memory_gib == 7.2
    settled = config.with_values({"patches.size": (32, 32, 32), "training.batch_size": 2})
    assert within_gpus(settled, [8 * GIB]) is settled
    batch = config.with_values({"patches.size": (32, 32, 32)})
    assert within_gpus(batch, [8 * GIB]).patches.memory_gib == 7.2
    less = config.with_values({"patches.memory_gib": 7.2})
    assert within_gpus(less, [8 * GIB]) is less


def test_notes_say_what_was_planned_and_why():
    config, network = planned(fingerprint((35, 50, 36), num_cases=260), "model.num_levels=4")
    (line,) = plan_notes(config, network)
    assert line.startswith(
        "patches of 40x56x40 voxels (limited by the median volume), 9 in a batch (limited by 5% of "
        "the data's voxels); predicted memory: 1."
    )
    assert line.endswith(" of 10 GiB (patches.memory_gib)")
    config, network = planned((64, 64, 64), "patches.size=31,32,32")
    rounded, line = plan_notes(config, network)
    assert rounded.startswith("patches.size 31x32x32 is rounded up to 32x32x32, multiples of")
    assert "(as set)" in line
    config, network = planned((64, 64, 64), "patches.size=32,32,32", "training.batch_size=2")
    assert plan_notes(config, network) == []


@pytest.mark.parametrize(
    ("shape", "spacing_mm", "num_voxels", "expected"),
    [
        ((512, 512, 512), (0.3, 0.3, 0.3), 64**3, (64, 64, 64)),
        ((512, 512, 20), (1, 1, 4), 64**3, (102, 102, 20)),
        ((50, 40, 30), (1, 1, 1), 64**3, (50, 40, 30)),
        ((1, 1, 4000), (1, 1, 1), 1000, (1, 1, 10)),
    ],
)
def test_a_cube_in_mm_is_clipped_to_the_volume(shape, spacing_mm, num_voxels, expected):
    assert cube_in_mm(shape, spacing_mm, num_voxels) == expected


def test_patches_shrink_where_they_are_largest_and_always_suit_their_network():
    rng = np.random.default_rng(0)
    for _ in range(15):
        shape: Any = tuple(int(size) for size in rng.integers(20, 300, 3))
        spacing_mm: Any = tuple(float(mm) for mm in rng.uniform(0.5, 4, 3))

        def plan(size, mm=spacing_mm):
            return plan_topology(ModelSettings(), size, mm, 1, 2)

        sizes = list(shrinking_sizes(plan, shape, shape))
        for size in sizes:
            assert all(n % s == 0 for n, s in zip(size, plan(size).total_stride, strict=True))
        for before, after in itertools.pairwise(sizes):
            assert math.prod(after) < math.prod(before)
            shares = [n / of for n, of in zip(before, shape, strict=True)]
            smaller = [axis for axis in range(3) if after[axis] < before[axis]]
            largest = shares.index(max(shares))
            if largest not in smaller:  # the network cannot use fewer voxels along it
                for fewer in range(MIN_EDGE, before[largest]):
                    x, y, z = (fewer if axis == largest else n for axis, n in enumerate(before))
                    padded = padded_shape((x, y, z), plan((x, y, z)).total_stride)
                    shrinks = padded[largest] < before[largest]
                    assert not (shrinks and math.prod(padded) < math.prod(before)), padded


FEW = ModelSettings(channels=(8, 16), deep_supervision=False)


@pytest.mark.parametrize(
    ("size", "mib"),
    [((64, 64, 32), 3), ((8, 16, 48), 100), *by_night(((16, 16, 16), 100))],
    ids=str,
)
def test_the_largest_size_fits_and_the_next_does_not(size, mib):
    step = make_step((CPU, CPU), size=size, model=FEW)
    memory = {CPU: mib * 1024**2}
    found = largest_size(step, memory)
    stride = step.topology.total_stride
    units = [voxels // one for voxels, one in zip(found, stride, strict=True)]
    assert [unit * one for unit, one in zip(units, stride, strict=True)] == list(found)
    shape_units = [voxels / one for voxels, one in zip(size, stride, strict=True)]

    def scaled(longest):
        return [max(1, units * longest / max(shape_units)) for units in shape_units]

    pairs = zip(units, scaled(max(units)), strict=True)
    assert all(abs(unit - wanted) <= 0.5 + 1e-9 for unit, wanted in pairs)
    assert predicted(replace(step, size=found)).load(memory) <= 1
    larger = zip(scaled(max(units) + 1), stride, strict=True)
    x, y, z = (round(wanted) * one for wanted, one in larger)
    assert math.prod((x, y, z)) > math.prod(found)
    assert predicted(replace(step, size=(x, y, z))).load(memory) > 1


@pytest.mark.nightly
def test_what_was_predicted_is_not_predicted_again(monkeypatch):
    step, memory = make_step((CPU,), model=FEW), {CPU: 4 * 1024**2}
    known = predicted(step)
    found, of_one = largest_size(step, memory), largest_size(replace(step, batch_size=1), memory)
    assert largest_size(replace(step, batch_size=1), memory, known) == of_one != found

    def predict(other):
        assert other.size != step.size
        return predicted(other)

    monkeypatch.setattr(step_size, "predict_memory", predict)
    assert largest_size(step, memory, known) == found


@pytest.mark.nightly
def test_a_volume_has_planes_for_all_shards_and_parameters_have_room():
    assert largest_size(make_step((CPU,)), {CPU: 10_000}) is None
    step = make_step((CPU,), (32, 8, 8), 1, model=FEW, num_shards=20)
    assert largest_size(step, {CPU: 10_000}) is None
    found = largest_size(step, {CPU: 16 * 1024**2})
    assert found[0] >= 20


def test_the_largest_that_fits_is_found_in_a_few_answers():
    rng = np.random.default_rng(0)
    for _ in range(300):
        weights = sorted(rng.uniform(1, 1000, rng.integers(1, 60)))
        fixed, slope = rng.uniform(0, 0.95), rng.uniform(0.0001, 0.05)
        loads = [fixed + slope * weight * rng.uniform(0.97, 1.03) for weight in weights]
        loads = list(np.maximum.accumulate(loads))
        asked: list[int] = []

        def load(index):
            asked.append(index)  # noqa: B023
            return loads[index]  # noqa: B023

        fitting = [index for index, one in enumerate(loads) if one <= 1]
        assert largest_fitting(weights, load) == (max(fitting) if fitting else None)
        assert len(set(asked)) == len(asked)
        assert len(asked) <= (1 if loads[-1] <= 1 else 12)
        first = int(rng.integers(len(weights)))
        asked.clear()
        assert largest_fitting(weights, load, first) == (max(fitting) if fitting else None)
        assert asked[0] == first and len(asked) <= 13
    assert largest_fitting([], lambda index: 0.0) is None
