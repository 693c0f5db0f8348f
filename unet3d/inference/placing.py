"""Where trained networks predict: the precision, and the executors of this process."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from unet3d.config import ParallelSettings
from unet3d.distributed.group import Group
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.inference.networks import Networks
from unet3d.inference.window_network import (
    Predict,
    Replayed,
    WindowNetwork,
    mirrored_mean,
    replicated,
)
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
from unet3d.runs.checkpoint import Checkpoint
from unet3d.torch_private import groups_besides_default

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """The one network that a training has on its devices."""

    executor: Executor
    """The network, in evaluation mode."""
    precision: str
    """What it predicts in, which need not be what it is trained in."""
    is_shared: bool = False
    """Whether other ranks compute slabs of the same windows."""
    index: ClassVar[int] = 0
    is_replayable: ClassVar[bool] = False
    """Not where memory is scarce: a training has its own beside it."""

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The network's, alone."""
        return (self.executor,)

    @property
    def predicts(self) -> tuple[Predict, ...]:
        """What computes windows with it."""
        return (lambda image: self.executor.predict(image, self.precision),)

    def use(self, index: int) -> None:
        """Leave the network where it is: there is no other."""


class PlacedNetworks:
    """Networks on the devices of this process, one of them at a time; several ranks have slabs.

    In mode data each device has a replica of it. The weights of the next network are copied over
    those of the one before, as folds of one data set allow, so that the CUDA graph of a replica
    serves all of them; a network of another topology or type is placed in its stead.

    Ranks with slabs all do the same: place, use and compute the same networks in the same order.
    """

    def __init__(
        self,
        networks: Networks,
        parallel: ParallelSettings,
        group: Group,
        precisions: Sequence[str] = (),
    ) -> None:
        """Place the first network; ``precisions`` say what each computes in (none: ``auto``)."""
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
        self.is_shared = group.size > 1
        """Whether other ranks compute slabs of the same windows."""
        self.index = 0
        """Number of the network that is placed."""
        self._weights: dict[int, dict[str, Tensor]] = {}
        """Of each network that was copied over another one."""
        self._groups: list[dist.ProcessGroup] = []
        """Between the ranks, of the network that is placed."""
        self.executors: tuple[Executor, ...] = ()
        """Those of the replicas; none, if there was no room for them."""
        self.predicts: tuple[Predict, ...] = ()
        """What computes windows with each; logits are valid until the next call."""
        for precision in dict.fromkeys(self._precisions):
            self._log_devices(precision)
        self._place(0)

    @property
    def is_replayable(self) -> bool:
        """Whether this process alone has the network, and all of each replica on one GPU."""
        devices = [{slot.device for slot in one.slots} for one in self.executors]
        return not self.is_shared and all([one.type for one in of] == ["cuda"] for of in devices)

    @property
    def precision(self) -> str:
        """Number type of the network that is placed."""
        return self._precisions[self.index]

    def use(self, index: int) -> None:
        """Place another network, by its number, or do nothing where it is placed."""
        if index == self.index and self.executors:
            return
        before, self.index = self.index, index
        if self.executors and self._kind(before) == self._kind(index):
            for executor in self.executors:
                self._load_into(executor, index)
        else:
            self._make_room()
            self._place(index)  # if it has no place, the next call tries again

    def _place(self, index: int) -> None:
        before = groups_besides_default()
        network = self._networks[index]
        self.executors = tuple(self._executor(network, index, home) for home in self._homes)
        self._groups = [group for group in groups_besides_default() if group not in before]
        replays = self.is_replayable
        self.predicts = tuple(
            Replayed(one) if replays else WindowNetwork.of(one).predict for one in self.executors
        )

    def _make_room(self) -> None:
        """Leave the devices, on which two networks need not have a place, and the ranks' groups."""
        devices = [slot.device for one in self.executors for slot in one.slots]
        self.executors = self.predicts = ()
        if self._groups:
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            self._group.exchange(None)  # no rank waits for a message any more
            for group in self._groups:
                dist.destroy_process_group(group)

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
        )
        try:
            executor = parallelize(network.build_model(), layout, group if self.is_shared else None)
        except torch.OutOfMemoryError as error:
            names = ", ".join(map(str, dict.fromkeys(devices)))
            raise DoesNotFitError(
                f"the network does not fit on {names} beside what others hold there; use other "
                "devices, or more of them"
            ) from error
        executor.module.eval()
        return executor

    def _load_into(self, executor: Executor, index: int) -> None:
        """Copy the weights of a network of the same kind; to GPUs while the host goes on."""
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

    def _precision_of(self, network: Checkpoint, setting: str) -> str:
        trained, devices = network.config.training.precision, self._dims.all_devices
        wanted = wanted_precision(setting, network.dtype, trained, devices)
        here = [device for home in self._homes for device in home]
        return resolve_precision(wanted, here, self._group.exchange, "inference.precision")

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


Placed = PlacedNetworks | TrainedNetwork


def window_network(placed: Placed, index: int, axes: Sequence[int]) -> WindowNetwork:
    """Return what computes windows with one of the networks, which is placed whenever it does.

    Each window is mirrored along ``axes``, of X, Y, Z, counted from 0.
    """

    def predict_with(replica: int) -> Predict:
        def predict(image: Tensor) -> Tensor:
            placed.use(index)
            return mirrored_mean(placed.predicts[replica], image, axes)

        return predict

    return replicated(
        [
            WindowNetwork.of(executor, predict_with(replica))
            for replica, executor in enumerate(placed.executors)
        ]
    )


def wanted_precision(
    setting: str, dtype: torch.dtype, trained: str, devices: Sequence[torch.device]
) -> str:
    """Return what a network is to compute in on the devices of all ranks; or ``auto``.

    ``setting`` is that of inference.precision, ``dtype`` that of the parameters, ``trained`` its
    training.precision. What was trained in float16 stays in its range, and float16 has more digits
    than bfloat16.
    """
    if dtype == torch.float64:
        return "float64"
    if setting != "auto" or trained == "bfloat16":  # which suits the devices of training
        return setting
    if trained == "float16":
        return trained if all(device.type == "cuda" for device in devices) else "float32"
    return trained
