"""What the shards of a volume gather beside their steps, such as statistics of its patches."""

import pytest
import torch

from tests.plain_network import make_topology
from tests.shards import ThreadMessages, run_shards
from unet3d.model import UNet3d
from unet3d.parallel import Layout
from unet3d.parallel.spatial.executor import SpatialExecutor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_shard_has_the_numbers_of_all_in_their_order(dtype: torch.dtype) -> None:
    def gathered(index: int, messages: ThreadMessages) -> torch.Tensor:
        layout = Layout(devices=(torch.device("cpu"),), num_shards=3, shard=index)
        executor = SpatialExecutor(UNet3d(make_topology()), layout, messages=messages)
        own = torch.tensor([[index, 0.25], [-index, 7]], dtype=dtype)
        return executor.gather(own.T[0])  # not contiguous

    expected = torch.tensor([[0, 0], [1, -1], [2, -2]], dtype=dtype)
    for found in run_shards(3, gathered):
        assert found.dtype == dtype and torch.equal(found, expected)
