"""Messages between the devices of a volume."""

import torch

from tests.shards import run_shards
from unet3d.parallel.spatial.division import divide
from unet3d.parallel.spatial.shard import VolumeShard


def test_sums_and_values_of_all_are_known_to_all():
    uneven = divide(10, 3, (1, 2), 2)  # slabs of 4, 4 and 2 planes

    def work(index, messages):
        shard = VolumeShard(index, uneven, messages)
        value = torch.tensor([1.0, 10.0], dtype=torch.bfloat16) * (index + 1)
        return shard.sum(value), shard.gather(value)

    for total, values in run_shards(3, work):
        assert total.dtype == torch.bfloat16 and total.tolist() == [6, 60]
        assert values.tolist() == [[1, 10], [2, 20], [3, 30]]
