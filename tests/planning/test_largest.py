"""The largest patch that fits: found, and not a voxel too large."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.steps import CPU, make_step, predicted
from unet3d.config import ModelSettings
from unet3d.planning import largest
from unet3d.planning.largest import largest_fitting, largest_size

FEW = ModelSettings(channels=(8, 16), deep_supervision=False)


@pytest.mark.parametrize(
    ("size", "mib"), [((16, 16, 16), 100), ((64, 64, 32), 3), ((8, 16, 48), 100)], ids=str
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


def test_what_was_predicted_is_not_predicted_again(monkeypatch):
    step, memory = make_step((CPU,), model=FEW), {CPU: 4 * 1024**2}
    known = predicted(step)
    found, of_one = largest_size(step, memory), largest_size(replace(step, batch_size=1), memory)
    assert largest_size(replace(step, batch_size=1), memory, known) == of_one != found

    def predict(other):
        assert other.size != step.size
        return predicted(other)

    monkeypatch.setattr(largest, "predict_memory", predict)
    assert largest_size(step, memory, known) == found


def test_shards_share_a_larger_volume():
    memory = {CPU: 2**30}
    one = largest_size(make_step((CPU,), model=FEW), memory)
    step = make_step((CPU,), model=FEW, num_shards=3)
    found = largest_size(step, memory)
    assert math.prod(found) > 0.7 * 3 * math.prod(one)
    assert predicted(replace(step, size=found).fullest()).load(memory) <= 1


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
