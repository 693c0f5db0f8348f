"""One volume over several devices: each has the whole network and a slab of every map.

Slabs divide both memory and time by the number of devices. Stages divide neither: the peak is at
full resolution, and a batch of one cannot be pipelined. Each process drives one device, so slabs
work on several machines and with replicas. It replays its own CUDA graphs, which include the
messages.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unet3d.distributed.group import Group
from unet3d.errors import ConfigError
from unet3d.kernels.sharding import sharded
from unet3d.memory.meter import Observer, Slot
from unet3d.model import UNet3d
from unet3d.parallel.exchange import FlatExchange
from unet3d.parallel.executor import NetworkExecutor
from unet3d.parallel.losses import LossFunction
from unet3d.parallel.partition import make_stages
from unet3d.parallel.placement import Layout
from unet3d.parallel.precision import lowered_on
from unet3d.parallel.spatial.division import Division, SlabRule
from unet3d.parallel.spatial.network import SlabNetwork
from unet3d.parallel.spatial.shard import NoMessages, VolumeShard, gathered
from unet3d.parallel.step import place

MAX_CAPTURED = 2**27
"""Most elements of a micro-batch's image, in the largest slab, for a captured step. Without a
capture GPUs wait for the host between messages, however large the slabs are."""


class SpatialExecutor:
    """The slab of one device; see :class:`~unet3d.parallel.Executor`.

    All ranks of a replica compute the same loss: the loss of their volume. A loss function must be
    a :class:`unet3d.model.loss.SegmentationLoss`, or made of other sums over voxels that go through
    :func:`unet3d.kernels.sharding.sum_of_losses`.
    """

    def __init__(
        self,
        network: UNet3d,
        layout: Layout,
        group: Group | None = None,
        messages: NoMessages | None = None,
    ) -> None:
        """Move the network to the device; all ranks call it.

        Args:
            network: The network, with all its parameters in one precision.
            layout: The device, the slab, and how a batch is run; ``num_shards`` says how many
                devices share a volume.
            group: The ranks; the ranks of a replica are consecutive, in order of slabs. None:
                there are no other ranks.
            messages: Messages to the other slabs; None: the group's messages.

        Raises:
            ConfigError: The network's samples are not independent.
            DeviceError: The ranks' devices are of different kinds.
        """
        if not network.samples_are_independent:
            raise ConfigError(
                "batch normalisation would take its statistics from a part of each volume; use "
                "model.norm=instance or another --parallel than spatial"
            )
        self.module = network
        self.rule = SlabRule(topology=network.topology, num_shards=layout.num_shards)
        self.observer = Observer()
        self._layout = layout
        (device,) = layout.devices
        (stage,) = make_stages(network.blocks(), (device,), (), network.outputs())
        place(stage, lowered_on(device, layout.autocast))
        self.slots: Sequence[Slot] = (stage.slot,)
        self.input_device = self.output_device = device
        self._exchange = FlatExchange((stage,), group, layout.num_shards, messages)
        self._executors: dict[str, tuple[VolumeShard, NetworkExecutor]] = {}
        """Slab and executor of the last division in training, and of the last one in prediction."""

    def forward_backward(
        self,
        image: Tensor,
        target: Tensor,
        loss_fn: LossFunction,
        scale: float = 1.0,
        *,
        weight: float = 1.0,
        planes: int | None = None,
    ) -> Any:
        """Add one batch's gradients to the module's; see the protocol.

        This includes the mean over the ranks.

        Raises:
            DeviceError: The volume has too few planes.
            RankError: Another rank died or hangs.
        """
        x, y, z = image.shape[2:]
        division = self.rule.divide((x if planes is None else planes, y, z))
        shard, executor = self._divided("training", division)
        executor.observer = self.observer
        with sharded(shard):  # so the sums of a loss are those of the volume
            return executor.forward_backward(image, target, loss_fn, scale, weight=weight)

    @torch.no_grad()
    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return the logits of a whole image, the same in all ranks of a replica.

        Args:
            image: (N, C, X, Y, Z), the same in all ranks.
            precision: As in the protocol, the same in all ranks.

        Raises:
            DeviceError: The image has too few planes.
            RankError: Another rank died or hangs.
        """
        self.module.check_shape(image)
        x, y, z = image.shape[2:]
        division = self.rule.divide((x, y, z))
        shard, executor = self._divided("prediction", division)
        slab = division.slab(shard.index)
        own = image.narrow(2, slab.start, len(slab))
        with self._exchange.step():
            return shard.gather_map(executor.predict(own, precision), 0)

    def gather(self, values: Tensor) -> Tensor:
        """Return values of all slabs of the replica, (num_shards, ...); all ranks call it.

        On a GPU they are sent on the stream of the steps, which must be the current one.

        Args:
            values: Values of this slab, on its device; the same shape in all ranks.

        Raises:
            RankError: Another rank died or hangs.
        """
        with self._exchange.errors():
            return gathered(values, self.rule.num_shards, self._exchange.messages)

    def _divided(self, use: str, division: Division) -> tuple[VolumeShard, NetworkExecutor]:
        """Return the slab of a division and its executor, new if the division has changed."""
        if use in self._executors and self._executors[use][0].division == division:
            return self._executors[use]
        self._executors.pop(use, None)  # frees the captured step
        shard = VolumeShard(self._layout.shard, division, self._exchange.messages)
        # In proportion to the slab, so that all ranks decide alike, even if their slabs differ.
        own_planes = len(division.slab(shard.index))
        max_captured = MAX_CAPTURED * own_planes // division.most_planes()
        executor = NetworkExecutor(
            SlabNetwork(self.module, shard),
            replace(self._layout, cuts=()),
            lambda stages: self._exchange,
            max_captured,
        )
        self._executors[use] = shard, executor
        return shard, executor
