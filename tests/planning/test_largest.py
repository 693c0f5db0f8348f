"""The largest patch that fits: found, and not a voxel too large."""

import math
from dataclasses import replace

import pytest

from tests.steps import CPU, WIDE, make_step
from unet3d.config import Shape
from unet3d.planning import largest
from unet3d.planning.largest import largest_size
from unet3d.planning.memory_estimate import MemoryEstimate, Step, predict_memory


@pytest.mark.parametrize(
    ("size", "mib"), [((16, 16, 16), 100), ((64, 64, 32), 3), ((8, 16, 48), 100)], ids=str
)
def test_the_largest_size_fits_and_the_next_does_not(size: Shape, mib: int) -> None:
    step = make_step((CPU, CPU), size=size)
    memory = {CPU: mib * 1024**2}
    found = largest_size(step, memory)
    assert found is not None
    stride = step.topology.total_stride
    units = [voxels // one for voxels, one in zip(found, stride, strict=True)]
    assert [unit * one for unit, one in zip(units, stride, strict=True)] == list(found)
    shape_units = [voxels / one for voxels, one in zip(size, stride, strict=True)]
    scale = max(units) / max(shape_units)
    assert all(
        abs(u - max(1, s * scale)) <= 0.5 + 1e-9 for u, s in zip(units, shape_units, strict=True)
    )
    assert predict_memory(replace(step, size=found), counts_reserved=False).load(memory) <= 1
    x, y, z = (
        max(1, round(s * (max(units) + 1) / max(shape_units))) * one
        for s, one in zip(shape_units, stride, strict=True)
    )
    assert math.prod((x, y, z)) > math.prod(found)
    assert predict_memory(replace(step, size=(x, y, z)), counts_reserved=False).load(memory) > 1


def test_nothing_fits_where_the_parameters_alone_do_not() -> None:
    assert largest_size(make_step((CPU,)), {CPU: 10_000}) is None


def test_what_was_predicted_is_not_predicted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, memory = make_step((CPU,)), {CPU: 4 * 1024**2}
    known = predict_memory(step)
    asked: list[Shape] = []

    def predict(step: Step, **options: bool) -> MemoryEstimate:
        asked.append(step.size)
        return predict_memory(step, **options)

    monkeypatch.setattr(largest, "predict_memory", predict)
    found = largest_size(step, memory)
    first, *others = asked
    assert first == step.size
    asked.clear()
    assert largest_size(step, memory, known) == found
    assert asked == others
    asked.clear()
    assert largest_size(replace(step, batch_size=1), memory, known) != found  # of another step
    assert asked[0] == step.size


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_share_a_larger_volume(num_shards: int) -> None:
    memory = {CPU: 2 * 1024**3}
    one = largest_size(make_step((CPU,), model=WIDE), memory)
    step = make_step((CPU,), model=WIDE, num_shards=num_shards)
    found = largest_size(step, memory)
    assert one is not None and found is not None
    assert math.prod(found) > 0.7 * num_shards * math.prod(one)
    assert predict_memory(replace(step, size=found)).load(memory) <= 1


def test_a_volume_has_planes_for_all_shards() -> None:
    step = make_step((CPU,), (128, 8, 8), num_shards=60)
    assert largest_size(step, {CPU: 10_000}) is None
    found = largest_size(step, {CPU: 1024**3})
    assert found is not None and found[0] >= 60
