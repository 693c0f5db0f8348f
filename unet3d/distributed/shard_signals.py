"""The signal that asks to stop, agreed on by ranks that would otherwise leave one another waiting.

Ranks with the slabs of one volume compute it together. A signal reaches each of them at another
moment; so they ask one another before each volume, and either all of them compute it or none does.
"""

import torch
import torch.distributed as dist

from unet3d.distributed.group import Group


class ShardSignals:
    """What the shards of a replica agree on; they are ranks that follow one another."""

    def __init__(self, group: Group, num_shards: int) -> None:
        """Connect the shards of each replica; all ranks call it."""
        self._group = group
        self._shards: dist.ProcessGroup | None = None
        if num_shards > 1:
            self._shards = group.new_subgroup(torch.device("cpu"), num_shards)

    def agree(self, stop: int) -> int:
        """Return the largest number that a shard of this replica has; all of them call it."""
        if self._shards is None:
            return stop
        flag = torch.tensor([stop])
        with self._group.translate_dist_errors():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._shards)
        return int(flag.item())
