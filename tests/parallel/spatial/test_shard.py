"""What the devices of a volume tell one another."""

import torch

from tests.shards import run_shards
from unet3d.parallel.spatial.division import divide
from unet3d.parallel.spatial.shard import NoMessages, VolumeShard

UNEVEN = divide(10, 3, (1, 2), 2)
"""Slabs of 4, 4 and 2 planes."""


def test_sums_and_values_of_all_are_known_to_all():
    def work(index, messages):
        shard = VolumeShard(index, UNEVEN, messages)
        value = torch.tensor([1.0, 10.0], dtype=torch.bfloat16) * (index + 1)
        return shard.sum(value), shard.gather(value)

    for total, values in run_shards(3, work):
        assert total.dtype == torch.bfloat16
        assert total.tolist() == [6, 60]
        assert values.tolist() == [[1, 10], [2, 20], [3, 30]]


def test_numbers_of_a_slab_are_those_of_the_volume():
    shards = [VolumeShard(index, UNEVEN, NoMessages()) for index in range(3)]

    assert [shard.of_volume(4 * 7) for shard in shards[:2]] == [70, 70]
    assert shards[2].of_volume(2 * 7) == 70
    assert [
        shard.of_largest(planes * 7) for shard, planes in zip(shards, (4, 4, 2), strict=True)
    ] == [28] * 3
