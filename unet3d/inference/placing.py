"""Where trained networks predict: the mode, the precision, and the executor of this process."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from unet3d.config import InferenceSettings, ParallelSettings, Shape
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.inference.computing_precision import wanted_precision
from unet3d.inference.networks import Networks
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.inference.windows import GPU_SHARE, bytes_of_voxel, computed_window
from unet3d.memory.record import device_bytes
from unet3d.model import BlockNetwork, Topology
from unet3d.parallel import (
    Executor,
    Layout,
    ParallelDims,
    autocast_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.precision import precision_on
from unet3d.parallel.spatial.division import SlabRule
from unet3d.runs.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

Window = Shape | Literal["auto", "whole"]


def choose_mode(
    settings: ParallelSettings,
    networks: Networks,
    inference: Sequence[InferenceSettings],
    ranks: Ranks,
) -> ParallelSettings:
    """Return the settings with a mode in place of ``auto``.

    Devices of one kind each take a replica, and a part of every batch of windows. Where windows are
    too large for one of them, or are whole volumes, each takes a slab of every window, if it has
    enough planes for them. Other devices take a stage of the network each.

    Args:
        settings: Mode and devices.
        networks: The networks.
        inference: Windows of each.
        ranks: The place of this process.

    Raises:
        ConfigError: Several ranks were started for a mode that runs in one.
        DeviceError: A device is unknown or absent.
    """
    if ranks.world_size > 1:
        if settings.mode not in ("auto", "data", "spatial"):
            raise ConfigError(
                f"{ranks.world_size} ranks were started, but --parallel {settings.mode} predicts "
                "in one process; use --parallel spatial, or do not use torchrun"
            )
        # In mode data each of them has scans of its own.
        of_ranks = "spatial" if settings.mode == "auto" else settings.mode
        return settings.model_copy(update={"mode": of_ranks})
    if settings.mode != "auto":
        return settings
    dims = ParallelDims.resolve(settings)
    mode = dims.mode
    if mode == "spatial":
        wanted = list(zip(networks.described, inference, strict=True))
        if all(_fits_each(network, one, dims.all_devices) for network, one in wanted):
            mode = "data"
        elif not all(
            _is_divisible(network, one.window, dims.num_shards) for network, one in wanted
        ):
            mode = "model"
    return settings.model_copy(update={"mode": mode})


def _fits_each(
    checkpoint: Checkpoint, settings: InferenceSettings, devices: Sequence[torch.device]
) -> bool:
    """Return whether windows have a size, of which a batch would not be too large for any device.

    What others hold of its memory does not count: asking for it would take some, for a process that
    may only start others.
    """
    wanted = checkpoint.patch_size if settings.window == "auto" else settings.window
    if wanted is None or wanted == "whole":
        return False
    topology = checkpoint.topology
    voxels = math.prod(computed_window(wanted, topology.total_stride))
    of_voxel = bytes_of_voxel(
        topology,
        checkpoint.dtype,
        len(devices),
        is_mirrored=bool(checkpoint.mirrored_axes(settings)),
    )
    needed = voxels * of_voxel
    return all(needed <= GPU_SHARE * device_bytes(device) for device in devices)


def _is_divisible(checkpoint: Checkpoint, window: Window, num_shards: int) -> bool:
    """Return whether windows have planes for all shards, as far as their size is known."""
    topology = checkpoint.topology
    if topology.norm == "batch":
        return False
    wanted = checkpoint.patch_size if window == "auto" else window
    if wanted is None or wanted == "whole":
        return True
    voxels = computed_window(wanted, topology.total_stride)
    return SlabRule(topology=topology, num_shards=num_shards).most_shards(voxels) >= num_shards


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """The one network that a training has on its devices, in the place of :class:`PlacedNetworks`.

    Ranks that have other slabs of it join for each image, so nobody follows.
    """

    executor: Executor
    """The network, in evaluation mode."""
    precision: str
    """What it computes in."""
    index: ClassVar[int] = 0
    is_replayable: ClassVar[bool] = False
    """Not where memory is scarce: a training has its own beside it."""

    @property
    def replicas(self) -> tuple[Executor]:
        """The network, which predicts alone."""
        return (self.executor,)

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
    data set allow; a network of another topology or type is placed in its stead.
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
        self._cuts = parallel.cuts
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
        self._alone: tuple[Executor, ...] = ()
        self._shared: SharedExecutor | None = None
        for precision in dict.fromkeys(self._precisions):
            self._log_devices(precision)
        if group.size == 1:
            self._alone = self._make_alone(0)
        else:
            self._shared = SharedExecutor(self, group, parallel.timeout_seconds)

    @property
    def executor(self) -> Executor | SharedExecutor:
        """What predicts; of several ranks, what the first one predicts with; the first replica."""
        return self.replicas[0]

    @property
    def replicas(self) -> tuple[Executor | SharedExecutor, ...]:
        """The same, and the other replicas."""
        replicas = self._alone if self._shared is None else (self._shared,)
        if not replicas:
            raise RuntimeError("no network is placed")
        return replicas

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
            self._alone = ()  # two of them need not have a place there
            self._alone = self._make_alone(index)  # if it has no place, the next call tries again

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

    def _make_alone(self, index: int) -> tuple[Executor, ...]:
        return tuple(self.make(index, replica) for replica in range(len(self._homes)))

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
        executor.module.load_state_dict(self._networks[index].model)
        return True

    def _kind(self, index: int) -> tuple[Topology, torch.dtype, str]:
        network = self._networks.described[index]
        return network.topology, network.dtype, self._precisions[index]

    def _precision_of(self, network: Checkpoint, setting: str) -> str:
        wanted = wanted_precision(network, setting, self._dims.all_devices)
        here = [device for home in self._homes for device in home]
        return resolve_precision(wanted, here, self._group.exchange)

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
