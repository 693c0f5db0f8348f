"""A device's slab of a volume, and the messages between the devices that share one."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unet3d.kernels.maps import Halo
from unet3d.parallel.spatial.division import Division

_DENSE = torch.contiguous_format

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""PyTorch 2.13 renamed it and warns about the old name."""


class Swap(NamedTuple):
    """Tensors that two devices exchange: contiguous, of one shape and type."""

    received: Tensor
    """The tensor that is received."""
    sent: Tensor
    """The tensor that is sent."""


class NoMessages:
    """No-op messages between the devices of a volume, for predicting memory.

    All devices of a volume call each method.
    """

    def swap(self, neighbours: Mapping[int, Swap]) -> None:
        """Exchange tensors with neighbours, given by their numbers."""

    def gather(self, received: Tensor, sent: Tensor) -> None:
        """All-gather bytes in the order of the devices; all send the same number."""

    def sum(self, values: Tensor) -> None:
        """All-reduce contiguous values, float32 or float64, in place."""


class GroupMessages(NoMessages):
    """Messages of a process group, a process for each device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the processes whose devices share a volume, in the order of their slabs."""
        self._group = group
        self._takes_lists = group.name() == "nccl"

    def swap(self, neighbours: Mapping[int, Swap]) -> None:
        """Exchange tensors with neighbours."""
        swaps = [neighbours[rank] for rank in sorted(neighbours)]
        size = self._group.size()
        if self._takes_lists:  # sent from the memory of the planes
            nothing = swaps[0].sent.new_empty(0)
            pairs = [neighbours.get(rank, Swap(nothing, nothing)) for rank in range(size)]
            received, sent = [pair.received for pair in pairs], [pair.sent for pair in pairs]
            dist.all_to_all(received, sent, group=self._group)
            return
        packed = torch.cat([as_bytes(swap.sent) for swap in swaps])
        unpacked = torch.empty_like(packed)
        counts = [neighbours[r].sent.nbytes if r in neighbours else 0 for r in range(size)]
        dist.all_to_all_single(unpacked, packed, counts, counts, group=self._group)
        parts = torch.split(unpacked, [swap.received.nbytes for swap in swaps])
        for swap, part in zip(swaps, parts, strict=True):
            as_bytes(swap.received).copy_(part)

    def gather(self, received: Tensor, sent: Tensor) -> None:
        """All-gather."""
        _gather(received, sent, group=self._group)

    def sum(self, values: Tensor) -> None:
        """All-reduce."""
        dist.all_reduce(values, group=self._group)


class VolumeShard:
    """A slab of one volume; see :class:`unet3d.kernels.sharding.Shard`."""

    def __init__(self, index: int, division: Division, messages: NoMessages) -> None:
        """Take a slab."""
        self.index = index
        self.count = division.num_shards
        self.division = division
        self._messages = messages
        self._planes = len(division.slab(index))

    def of_volume(self, number: int) -> int:
        """Scale this slab's number of planes or voxels to the whole volume; see the protocol."""
        return number * self.division.planes() // self._planes

    def of_largest(self, number: int) -> int:
        """Scale this slab's number of planes or voxels to the largest slab; see the protocol."""
        return number * self.division.most_planes() // self._planes

    def exchange(self, first: Tensor, last: Tensor) -> Halo:
        """Give planes to the neighbours and return theirs; see the protocol."""
        planes = {self.index - 1: first, self.index + 1: last}
        swaps = {
            neighbour: Swap(torch.empty_like(plane, memory_format=_DENSE), plane.contiguous())
            for neighbour, plane in planes.items()
            if 0 <= neighbour < self.count
        }
        if swaps:
            self._messages.swap(swaps)
        before, behind = (swaps.get(neighbour) for neighbour in planes)
        return before and before.received, behind and behind.received

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all slabs; see the protocol."""
        return gathered(values, self.count, self._messages)

    def gather_map(self, x: Tensor, level: int) -> Tensor:
        """Return a whole map from the slabs of all devices."""
        slabs = [self.division.slab(shard, level) for shard in range(self.count)]
        most = max(map(len, slabs))
        n, c, own, y, z = x.shape
        sent = x.new_empty((n, most, y, z, c))
        sent[:, :own].copy_(x.permute(0, 2, 3, 4, 1))
        received = self.gather(sent)
        parts = [part[:, : len(slab)] for part, slab in zip(received, slabs, strict=True)]
        return torch.cat(parts, 1).permute(0, 4, 1, 2, 3)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all slabs; see the protocol."""
        exact = torch.promote_types(values.dtype, torch.float32)
        total = values.to(exact, memory_format=torch.contiguous_format, copy=True)
        self._messages.sum(total)
        return total.to(values.dtype)


def gathered(values: Tensor, num_shards: int, messages: NoMessages) -> Tensor:
    """Return the values of all devices of a volume, (num_shards, ...); all devices call it."""
    values = values.contiguous()
    received = values.new_empty((num_shards, *values.shape))
    messages.gather(as_bytes(received), as_bytes(values))
    return received


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes."""
    return x.view(-1).view(torch.uint8)
