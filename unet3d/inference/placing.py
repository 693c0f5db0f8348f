"""Where trained networks predict: the precision, and the executor of this process."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from unet3d.config import ParallelSettings
from unet3d.distributed.group import Group
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.inference.computing_precision import wanted_precision
from unet3d.inference.networks import Networks
from unet3d.inference.replaying import ReplayedNetwork
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.model import BlockNetwork, Topology
from unet3d.parallel import (
    Executor,
    Layout,
    ParallelDims,
    Slot,
    autocast_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.precision import precision_on
from unet3d.runs.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """The one network that a training has on its devices, in the place of :class:`PlacedNetworks`.

    Ranks that have other slabs of it join for each image, so nobody follows.
    """

    executor: Executor
    """The network, in evaluation mode."""
    precision: str
    """What it predicts in, which need not be what it is trained in."""
    index: ClassVar[int] = 0
    is_replayable: ClassVar[bool] = False
    """Not where memory is scarce: a training has its own beside it."""

    @property
    def replicas(self) -> tuple[Self]:
        """The network, which predicts alone."""
        return (self,)

    @property
    def input_device(self) -> torch.device:
        """The device where images are expected."""
        return self.executor.input_device

    @property
    def output_device(self) -> torch.device:
        """The device where logits are returned."""
        return self.executor.output_device

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of this process."""
        return self.executor.slots

    def predict(self, image: Tensor) -> Tensor:
        """Return logits (N, K, X, Y, Z) in that precision.

        Args:
            image: The windows (N, C, X, Y, Z), on the input device.
        """
        return self.executor.predict(image, self.precision)

    def use(self, index: int) -> None:
        """Leave the network where it is: there is no other."""

    def follow(self) -> None:
        """Return at once."""

    def end(self) -> None:
        """Return at once."""


class PlacedNetworks:
    """Networks on the devices of this process, one of them at a time; several ranks have slabs.

    In mode data each device has a replica of it.

    The weights of the next network are copied over those of the one before, as folds of one
    data set allow, so that the CUDA graph of a replica serves all of them; a network of another
    topology or type is placed in its stead.
    """

    def __init__(
        self,
        networks: Networks,
        parallel: ParallelSettings,
        group: Group,
        precisions: Sequence[str] = (),
    ) -> None:
        """Place the first network; all ranks call it.

        Args:
            networks: Networks trained in any mode.
            parallel: Where to run; it need not be where they were trained.
            group: The ranks, connected; each has a slab of every window.
            precisions: What each computes in, or ``auto``; none: all of them that.

        Raises:
            DeviceError: A device does not exist, or has too little memory.
            ConfigError: The mode needs ranks that are not there.
            CheckpointError: The parameters do not belong to the network.
        """
        self._networks = networks
        self._group = group
        self._cuts = parallel.cut_blocks
        self._dims = dims = ParallelDims.resolve(parallel, ranks=group.ranks)
        if dims.num_shards != group.size:
            raise ConfigError(
                f"parallel mode {dims.mode} over {len(dims.all_devices)} devices needs a process "
                "for each, which unet3d predict starts; here, use parallel mode model"
            )
        self._homes = dims.replicas if dims.mode == "data" else (dims.devices,)
        """The devices of each replica in this process."""
        wanted = precisions or ["auto"] * len(networks)
        self._precisions = [
            self._precision_of(network, precision)
            for network, precision in zip(networks.described, wanted, strict=True)
        ]
        self.index = 0
        """Number of the network that is placed."""
        self._weights: dict[int, dict[str, Tensor]] = {}
        """Of each network that was copied over another one."""
        self._alone: tuple[Executor, ...] = ()
        self._replicas: tuple[Executor | ReplayedNetwork | SharedExecutor, ...] = ()
        self._shared: SharedExecutor | None = None
        for precision in dict.fromkeys(self._precisions):
            self._log_devices(precision)
        if group.size == 1:
            self._place_alone(0)
        else:
            self._shared = SharedExecutor(self, group, parallel.timeout_seconds)
            self._replicas = (self._shared,)

    @property
    def executor(self) -> Executor | SharedExecutor:
        """The first replica's; of several ranks, what the first one predicts with."""
        return self._shared or self._alone[0]

    @property
    def replicas(self) -> tuple[Executor | ReplayedNetwork | SharedExecutor, ...]:
        """What predicts; logits are valid until the next call."""
        if not self._replicas:
            raise RuntimeError("no network is placed")
        return self._replicas

    @property
    def is_replayable(self) -> bool:
        """Whether this process alone has the network, and all of each replica on one GPU."""
        devices = [{slot.device for slot in replica.slots} for replica in self._alone]
        return bool(devices) and all([one.type for one in of] == ["cuda"] for of in devices)

    @property
    def precision(self) -> str:
        """Number type of the network that is placed."""
        return self._precisions[self.index]

    def use(self, index: int) -> None:
        """Place another network; of several ranks, only the first one calls it.

        Args:
            index: Its number.

        Raises:
            DeviceError: A device has too little memory.
            CheckpointError: The file cannot be read, or its parameters do not belong to it.
        """
        if index == self.index and (self._alone or self._shared is not None):
            return
        before, self.index = self.index, index
        if self._shared is not None:
            self._shared.use(index)
        elif not self._alone or not all(
            self.load_into(replica, before, index) for replica in self._alone
        ):
            self._alone = self._replicas = ()  # two of them need not have a place there
            self._place_alone(index)  # if it has no place, the next call tries again

    def follow(self) -> None:
        """Take part in what the first rank predicts, until it ends; all other ranks call it.

        Raises:
            RankError: Another rank died or hangs.
            Interrupted: This rank was asked to stop, or another one.
        """
        if self._shared is not None:
            self._shared.follow()

    def end(self) -> None:
        """Let the ranks go that follow; only the first rank calls it.

        Raises:
            RankError: One of them died.
        """
        if self._shared is not None:
            self._shared.end()

    def make(self, index: int, replica: int = 0) -> Executor:
        """Return an executor of a network; of several ranks, all call it.

        Args:
            index: The network's number.
            replica: Number of the replica in this process.

        Raises:
            DoesNotFitError: A device has too little memory.
            CheckpointError: The parameters do not belong to the network.
        """
        layout = self._layout(index, self._homes[replica])
        executor = _executor(self._networks[index].build_model(), layout, self._group)
        executor.module.eval()
        return executor

    def _place_alone(self, index: int) -> None:
        self._alone = tuple(self.make(index, replica) for replica in range(len(self._homes)))
        replays = self.is_replayable
        self._replicas = tuple(ReplayedNetwork(one) if replays else one for one in self._alone)

    def load_into(self, executor: Executor, before: int, index: int) -> bool:
        """Give a placed network the weights of another one, if nothing else is different.

        Args:
            executor: Of the network that is placed.
            before: That network's number.
            index: Number of the other one.

        Returns:
            Whether it has them now.
        """
        if self._kind(before) != self._kind(index):
            return False
        weights = self._weights_of(index)
        for name, tensor in executor.module.state_dict().items():
            tensor.copy_(weights[name], non_blocking=True)
        return True

    def _weights_of(self, index: int) -> dict[str, Tensor]:
        """Return weights in pinned memory for GPUs, which copy them while the host goes on."""
        if index not in self._weights:
            on_gpu = any(device.type == "cuda" for home in self._homes for device in home)
            self._weights[index] = {
                name: tensor.pin_memory() if on_gpu else tensor
                for name, tensor in self._networks[index].model.items()
            }
        return self._weights[index]

    def _kind(self, index: int) -> tuple[Topology, torch.dtype, str]:
        network = self._networks.described[index]
        return network.topology, network.dtype, self._precisions[index]

    def _precision_of(self, network: Checkpoint, setting: str) -> str:
        trained, devices = network.config.training.precision, self._dims.all_devices
        wanted = wanted_precision(setting, network.dtype, trained, devices)
        here = [device for home in self._homes for device in home]
        return resolve_precision(wanted, here, self._group.exchange, "inference.precision")

    def _layout(self, index: int, devices: tuple[torch.device, ...]) -> Layout:
        dims = self._dims
        return Layout(
            devices=devices,
            cuts=self._cuts,
            autocast=autocast_dtype(self._precisions[index]),
            num_shards=dims.num_shards,
            shard=dims.shard_of(self._group.ranks.rank),
        )

    def _log_devices(self, precision: str) -> None:
        dims, num_replicas = self._dims, len(self._homes)
        how = f", each window in {dims.num_shards} slabs" if dims.num_shards > 1 else ""
        if num_replicas > 1:
            how = f", windows dealt to {num_replicas} replicas"
        logger.info(
            "computing %s%s",
            " and ".join(
                f"on {device} in {precision_on(device, precision)}"
                for device in dict.fromkeys(dims.all_devices)
            ),
            how,
        )


def _executor(model: BlockNetwork, layout: Layout, group: Group) -> Executor:
    try:
        return parallelize(model, layout, group if group.size > 1 else None)
    except torch.OutOfMemoryError as error:
        devices = ", ".join(map(str, dict.fromkeys(layout.devices)))
        raise DoesNotFitError(
            f"the network does not fit on {devices} beside what others hold there; use other "
            "devices, or more of them"
        ) from error
