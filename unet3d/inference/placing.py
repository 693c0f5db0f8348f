"""Placement of trained networks: mode, precision, and the executors of this process."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unet3d.config import Config, ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.inference.networks import Networks
from unet3d.inference.window_network import (
    Predict,
    Replayed,
    WindowNetwork,
    mirrored_mean,
    replicated,
)
from unet3d.inference.windows import GPU_SHARE, bytes_of_voxel, computed_window, window_of
from unet3d.memory.record import device_bytes
from unet3d.model import Topology
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


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """The network that a training run has on its devices."""

    executor: Executor
    """The network, in evaluation mode."""
    precision: str
    """Number type of prediction, which may differ from the type of training."""
    is_shared: bool = False
    """Whether other ranks compute slabs of the same windows."""
    index: ClassVar[int] = 0
    is_replayable: ClassVar[bool] = False
    """Never: training needs the memory that a CUDA graph would take."""

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executor of the only network."""
        return (self.executor,)

    def use(self, index: int) -> None:
        """No-op, because there is no other network."""

    def window_network(self, index: int, axes: Sequence[int]) -> WindowNetwork:
        """Return the network for windows; see :meth:`PlacedNetworks.window_network`."""

        def predict(image: Tensor) -> Tensor:
            return self.executor.predict(image, self.precision)

        return WindowNetwork.of(self.executor, lambda image: mirrored_mean(predict, image, axes))


@dataclass(kw_only=True)
class _Place:
    """The executors on which networks of one kind take turns."""

    executors: tuple[Executor, ...]
    """One for each replica."""
    predicts: tuple[Predict, ...]
    """Each computes windows with an executor; logits are valid until the next call."""
    index: int
    """Index of the network whose weights are loaded."""


class PlacedNetworks:
    """Networks on the devices of this process; each of several ranks has a slab of a window.

    In mode data, each device has a replica. The weights of the next fold overwrite the weights of
    the previous fold, so the CUDA graph of a replica serves all folds. A network of another
    topology, parameter type or precision has its own executors.

    If there are several ranks, all place, use and compute the same networks in the same order.
    """

    def __init__(self, networks: Networks, parallel: ParallelSettings, group: Group) -> None:
        """Place the first network."""
        self._networks = networks
        self._group = group
        self._cuts = parallel.cut_blocks
        self._dims = dims = ParallelDims.resolve(parallel, ranks=group.ranks)
        if dims.num_shards != group.size:
            raise ConfigError(
                f"parallel mode {dims.mode} over {len(dims.all_devices)} devices needs a process "
                "for each device, which only unet3d predict starts; here, use parallel mode model"
            )
        self._homes = dims.replicas if dims.mode == "data" else (dims.devices,)
        """The devices of each replica in this process."""
        here = [device for home in self._homes for device in home]
        self._precisions = [
            resolve_precision(
                wanted_precision(network.dtype, network.config, dims.all_devices),
                here,
                group.exchange,
                "inference.precision",
            )
            for network in networks.described
        ]
        self.is_shared = group.size > 1
        """Whether other ranks compute slabs of the same windows."""
        self._weights: dict[int, dict[str, Tensor]] = {}
        """Weights, by index, of each network that was copied over another network."""
        for precision in dict.fromkeys(self._precisions):
            self._log_devices(precision)
        self._place = self._placed(0)
        self._places = {self._kind(0): self._place}

    @property
    def executors(self) -> tuple[Executor, ...]:
        """Executors of the network that was used last, one for each replica."""
        return self._place.executors

    @property
    def index(self) -> int:
        """Index of the network that was used last."""
        return self._place.index

    @property
    def is_replayable(self) -> bool:
        """Whether CUDA graphs can be used: no other rank takes part, and a replica has one GPU."""
        return not self.is_shared and all(
            [device.type for device in dict.fromkeys(home)] == ["cuda"] for home in self._homes
        )

    @property
    def precision(self) -> str:
        """Number type of the network that was used last."""
        return self._precisions[self.index]

    def use(self, index: int) -> None:
        """Load a network onto the devices, unless it is there."""
        kind = self._kind(index)
        if kind not in self._places:  # after an error for lack of memory, the next call retries
            self._places[kind] = self._placed(index)
        self._place = self._places[kind]
        if self._place.index != index:
            for executor in self.executors:
                self._load_into(executor, index)
            self._place.index = index

    def window_network(self, index: int, axes: Sequence[int]) -> WindowNetwork:
        """Return a network for windows, which loads its weights before it computes.

        Logits are averaged over mirror images along ``axes``, 0 to 2 for X, Y, Z.
        """

        def predict_with(replica: int) -> Predict:
            def predict(image: Tensor) -> Tensor:
                self.use(index)
                return mirrored_mean(self._place.predicts[replica], image, axes)

            return predict

        return replicated(
            [
                WindowNetwork.of(executor, predict_with(replica))
                for replica, executor in enumerate(self.executors)
            ]
        )

    def _placed(self, index: int) -> _Place:
        network = self._networks[index]
        executors = tuple(self._executor(network, index, home) for home in self._homes)
        replays = self.is_replayable
        return _Place(
            executors=executors,
            predicts=tuple(
                Replayed(one) if replays else WindowNetwork.of(one).predict for one in executors
            ),
            index=index,
        )

    def _executor(
        self, network: Checkpoint, index: int, devices: tuple[torch.device, ...]
    ) -> Executor:
        dims, group = self._dims, self._group
        layout = Layout(
            devices=devices,
            cuts=self._cuts,
            autocast=autocast_dtype(self._precisions[index]),
            num_shards=dims.num_shards,
            shard=dims.shard_of(group.ranks.rank),
            captures=False,  # there are no training steps to capture
        )
        try:
            executor = parallelize(network.build_model(), layout, group if self.is_shared else None)
        except torch.OutOfMemoryError as error:
            names = ", ".join(map(str, dict.fromkeys(devices)))
            raise DoesNotFitError(
                f"the network does not fit into the free memory of {names}; use other devices, or "
                "more of them"
            ) from error
        executor.module.eval()
        return executor

    def _load_into(self, executor: Executor, index: int) -> None:
        """Copy the weights of a network of the same kind; copies to GPUs do not block the host."""
        if index not in self._weights:
            on_gpu = any(device.type == "cuda" for home in self._homes for device in home)
            self._weights[index] = {
                name: tensor.pin_memory() if on_gpu else tensor
                for name, tensor in self._networks[index].model.items()
            }
        for name, tensor in executor.module.state_dict().items():
            tensor.copy_(self._weights[index][name], non_blocking=True)

    def _kind(self, index: int) -> tuple[Topology, torch.dtype, str]:
        network = self._networks.described[index]
        return network.topology, network.dtype, self._precisions[index]

    def _log_devices(self, precision: str) -> None:
        dims, num_replicas = self._dims, len(self._homes)
        how = f", each window in {dims.num_shards} slabs" if dims.num_shards > 1 else ""
        if num_replicas > 1:
            how = f", windows distributed over {num_replicas} replicas"
        logger.info(
            "computing %s%s",
            " and ".join(
                f"on {device} in {precision_on(device, precision)}"
                for device in dict.fromkeys(dims.all_devices)
            ),
            how,
        )


Placed = PlacedNetworks | TrainedNetwork


def choose_mode(settings: ParallelSettings, networks: Networks, ranks: Ranks) -> ParallelSettings:
    """Return the settings with a mode in place of ``auto``.

    Devices of one kind each take a replica, and a part of every batch of windows. If windows are
    too large for one device, or are whole volumes, each device takes a slab of every window, if
    there are enough planes. Devices of different kinds each take a stage of the network.
    """
    if ranks.world_size > 1:
        if settings.mode not in ("auto", "data", "spatial"):
            raise ConfigError(
                f"{ranks.world_size} ranks were started, but --parallel {settings.mode} predicts "
                "in one process; use --parallel spatial, or do not use torchrun"
            )
        # In mode data, each rank has scans of its own.
        of_ranks = "spatial" if settings.mode == "auto" else settings.mode
        return settings.model_copy(update={"mode": of_ranks})
    if settings.mode != "auto":
        return settings
    dims = ParallelDims.resolve(settings)
    mode = dims.mode
    if mode == "spatial":
        if all(_fits_each(network, dims.all_devices) for network in networks.described):
            mode = "data"
        elif not all(_is_divisible(network, dims.num_shards) for network in networks.described):
            mode = "model"
    return settings.model_copy(update={"mode": mode})


def _fits_each(network: Checkpoint, devices: Sequence[torch.device]) -> bool:
    """Return whether windows have a fixed size, and one is small enough for every device.

    Memory used by other processes is not counted: querying it would itself take GPU memory, in a
    process that may only start others.
    """
    window = window_of(network)
    if window == "whole":
        return False
    voxels = math.prod(computed_window(window, network.topology.total_stride))
    needed = voxels * bytes_of_voxel(network, len(devices))
    return all(needed <= GPU_SHARE * device_bytes(device) for device in devices)


def _is_divisible(network: Checkpoint, num_shards: int) -> bool:
    """Return whether windows, if their size is fixed, have enough planes for all shards."""
    topology, window = network.topology, window_of(network)
    if topology.norm == "batch":
        return False
    if window == "whole":
        return True
    voxels = computed_window(window, topology.total_stride)
    return SlabRule(topology=topology, num_shards=num_shards).most_shards(voxels) >= num_shards


def wanted_precision(dtype: torch.dtype, config: Config, devices: Sequence[torch.device]) -> str:
    """Return the number type for a network on the devices of all ranks, or ``auto``.

    A network that was trained in float16 predicts in it, too: its values fit into float16, which
    has more digits than bfloat16. Without GPUs it predicts in float32.
    """
    if dtype == torch.float64:
        return "float64"
    setting, trained = config.inference.precision, config.training.precision
    if setting != "auto" or trained == "bfloat16":  # bfloat16 may suit only training's devices
        return setting
    if trained == "float16":
        return trained if all(device.type == "cuda" for device in devices) else "float32"
    return trained
