"""How many messages shards exchange, how large, and how long these take."""

import math

import pytest
import torch

from tests.shards import run_shards
from tests.steps import CPU, make_step
from unet3d.model import UNet3d, dice_cross_entropy
from unet3d.parallel.spatial import division
from unet3d.parallel.spatial.division import SlabRule
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.planning.message_time import (
    GLOO,
    NVLINK,
    Links,
    Messages,
    gradient_seconds,
    links_between,
)
from unet3d.planning.step_time import count_work


def test_messages_take_what_two_h200_took():
    for num_bytes, microseconds in ((2**9, 12), (2**19, 18), (2**21, 25), (2**23, 60)):
        assert 1e6 * NVLINK.exchange(num_bytes) == pytest.approx(microseconds, rel=0.2)
    assert 1e6 * NVLINK.sum(640 * 4, 2) == pytest.approx(12, rel=0.03)
    assert 1e3 * NVLINK.sum(125e6, 2) == pytest.approx(0.44, rel=0.01)
    assert NVLINK.sum(125e6, 2) < NVLINK.sum(125e6, 8) < 2 * NVLINK.sum(125e6, 2)
    assert NVLINK.gather(1e8, 2) < NVLINK.gather(1e8, 8) < 2 * NVLINK.gather(1e8, 2)
    # Launched ones take longer.
    assert links_between(False, True) is NVLINK
    assert links_between(True, True) is links_between(True, False) is GLOO
    assert links_between(False, False).exchange(1024) > 3 * NVLINK.exchange(1024)


@pytest.mark.parametrize(
    ("min_divided", "num_shards", "num_samples"), [(0, 2, 1), (8 * 8 * 8 * 8, 3, 2), (2**20, 2, 2)]
)
def test_as_many_are_counted_as_are_sent(min_divided, num_shards, num_samples, monkeypatch):
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

    topology = make_step((CPU,), size).topology
    slabs = SlabRule(topology=topology, num_shards=num_shards).divide(size)
    levels = [b.level for b in count_work(topology, size, 1, 2) for _ in range(b.num_norms)]
    messages = Messages(division=slabs, topology=topology, size=size, element_bytes=4)
    logs = run_shards(num_shards, work)
    assert [len(log) for log in logs] == [messages.count(levels)] * num_shards
    amounts = {
        one: [amount for kind, amount in logs[1] if kind == one]
        for one in ("swap", "gather", "sum")
    }
    swapped, gathered, summed = sum(amounts["swap"]), max(amounts["gather"]), max(amounts["sum"])
    if slabs.num_divided == topology.num_levels:
        gathered = summed = 0  # but for moments, whose time is that of any message
    for latency, planes, sums, expected in (
        (1, math.inf, math.inf, len(logs[1])),
        (0, 1, math.inf, swapped + (num_shards - 1) * gathered),
        (0, math.inf, 1, 2 * (num_shards - 1) / num_shards * summed * 4),
    ):
        links = Links(latency_seconds=latency, planes_per_second=planes, sums_per_second=sums)
        found = messages.seconds(levels, links, num_samples)
        assert found == pytest.approx(expected, abs=1e-2)


def test_gradients_go_by_the_bytes_of_the_network():
    seconds = gradient_seconds(31_200_000, 2, NVLINK)
    assert 1e3 * seconds == pytest.approx(0.44, rel=0.01)
    assert gradient_seconds(31_200_000, 4, GLOO) > 100 * seconds
