"""The devices of replicas, stages and slabs, from settings, machine and ranks."""

import os
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import torch

from unet3d.config import Config, Offload, ParallelSettings, Recompute
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError, counted
from unet3d.memory.gpus import NEEDS, check_count
from unet3d.memory.meter import Slot as Slot
from unet3d.parallel.device_groups import (
    Devices,
    Machine,
    check_thread_devices,
    default_names,
    divided,
    listed,
    names_of_ranks,
)
from unet3d.parallel.precision import autocast_dtype

CAPTURE_SWITCH = "UNET3D_CUDA_GRAPHS"
"""Environment variable: 0 launches every step without CUDA graphs, for debugging."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one network is divided over devices."""

    devices: Devices
    """One device for each stage; a single one runs the whole network."""
    cuts: tuple[int, ...] | None = None
    """Index in the block list at which each stage but the first starts; None: the default."""
    num_micro_batches: int = 1
    """Portions that a training batch is divided into, along N."""
    autocast: torch.dtype | None = None
    """Lower precision, for stages whose device has it in hardware; None: the network's own."""
    recompute: Recompute = "norm"
    """Tensors that backward recomputes instead of keeping them."""
    offload: Offload = "none"
    """Tensors that GPUs offload to host memory until they are needed."""
    captures: bool = True
    """Whether steps of small volumes on GPUs are captured as CUDA graphs, if memory suffices."""
    num_replicas: int = 1
    """Number of replicas that share a batch; a replica is one network or one group of slabs."""
    num_shards: int = 1
    """Number of slabs along X that each volume is divided into; each has a rank and a device."""
    shard: int = 0
    """Index of this process's slab."""

    @classmethod
    def of(cls, config: Config, dims: "ParallelDims", precision: str) -> "Layout":
        """Return how settings divide the network of one replica.

        Args:
            config: Settings of cuts, micro-batches and memory.
            dims: The devices and ranks.
            precision: Resolved precision, such as ``bfloat16``; never ``auto``.
        """
        return cls(
            devices=dims.devices,
            cuts=config.parallel.cut_blocks,
            num_micro_batches=config.training.num_micro_batches,
            autocast=autocast_dtype(precision),
            recompute=config.memory.recompute,
            offload=config.memory.offload,
            captures=os.environ.get(CAPTURE_SWITCH) != "0",
            num_replicas=dims.num_replicas,
            num_shards=dims.num_shards,
            shard=dims.shard_of(dims.rank),
        )


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """How training or prediction is divided: replicas, stages or slabs, and their devices.

    :meth:`resolve` makes it, and refuses conflicts between settings, devices and ranks.
    """

    mode: Literal["none", "data", "spatial", "model"]
    """The parallel mode."""
    replicas: tuple[Devices, ...]
    """The devices of each replica on this machine, one for each stage or shard."""
    num_replicas: int
    """Number of replicas on all machines together."""
    num_shards: int = 1
    """Slabs that each volume is divided into; each has a process."""
    own: int = 0
    """Rank of this process on its machine; each replica, or each slab, has a process."""
    rank: int = 0
    """Rank of this process on all machines."""
    uses_threads: bool = False
    """Whether one process drives all replicas, with ``nn.DataParallel``."""
    gather_device: torch.device | None = None
    """With threads, the device where logits are gathered; None: the first device."""

    @classmethod
    def resolve(
        cls,
        settings: ParallelSettings,
        machine: Machine | None = None,
        ranks: Ranks | None = None,
    ) -> "ParallelDims":
        """Resolve the settings on a machine, for one of several ranks.

        Mode auto becomes none on one device, spatial on several devices of one kind, else model.
        Training chooses its mode earlier.

        Args:
            settings: Mode, devices and replicas.
            machine: The devices that exist; None: this machine's.
            ranks: The rank of this process; None: it is the only process, or starts the others.

        Raises:
            DeviceError: A device is unknown or absent, or their number does not suit the mode.
            ConfigError: The number of replicas does not match the number of ranks.
        """
        machine = machine or Machine.here()
        if ranks is not None and ranks.world_size > 1:
            return cls._of_ranks(settings, machine, ranks)
        names = settings.devices
        if names is None:
            names = default_names(settings, machine)
        devices = tuple(machine.device(name) for name in names)
        if settings.data_parallel is not False:
            return cls._of_threads(settings, machine, devices)
        mode = _possible_mode(devices) if settings.mode == "auto" else settings.mode
        check_count(mode, names, settings.replicas)
        num_replicas = len(devices) if mode == "data" else settings.replicas
        replicas = divided(devices, num_replicas, "replicas")
        if mode in NEEDS and len(replicas[0]) < 2:
            raise DeviceError(
                f"devices {listed(devices)} give each of {num_replicas} replicas one device, but "
                f"parallel mode {mode} {NEEDS[mode]}; name more devices, or fewer --replicas"
            )
        dims = cls(mode=mode, replicas=replicas, num_replicas=num_replicas)
        return dims._sharded(len(replicas[0])) if mode == "spatial" else dims

    @classmethod
    def _of_threads(
        cls, settings: ParallelSettings, machine: Machine, devices: Devices
    ) -> "ParallelDims":
        output = settings.data_parallel
        gather = machine.device(output) if isinstance(output, str) else None
        check_thread_devices(devices, gather)
        return cls(
            mode="data",
            replicas=tuple((device,) for device in devices),
            num_replicas=len(devices),
            uses_threads=True,
            gather_device=gather,
        )

    @classmethod
    def _of_ranks(
        cls, settings: ParallelSettings, machine: Machine, ranks: Ranks
    ) -> "ParallelDims":
        if settings.data_parallel is not False:
            raise ConfigError(
                f"parallel.data_parallel=true runs in one process, but there are "
                f"{ranks.world_size}; leave it out under torchrun"
            )
        mode = settings.mode
        if mode == "auto" or mode == "none":  # neither divides work over several ranks
            mode = "spatial"
        names = settings.devices or names_of_ranks(mode, machine, ranks.local_world_size)
        devices = tuple(machine.device(name) for name in names)
        groups = divided(devices, ranks.local_world_size, "ranks of this machine")
        own = groups[ranks.local_rank]
        if (len(own) > 1) != (mode == "model"):
            raise DeviceError(
                f"rank {ranks.rank} has {len(own)} of the devices {','.join(names)}, but a rank of "
                f"parallel mode {settings.mode} needs "
                f"{'at least two' if mode == 'model' else 'exactly one'}"
            )
        dims = cls(
            mode=mode,
            replicas=groups,
            num_replicas=ranks.world_size,
            own=ranks.local_rank,
            rank=ranks.rank,
        )
        if mode == "spatial":
            num_shards = _num_shards(settings, ranks)
            return replace(dims, num_replicas=settings.replicas)._sharded(num_shards)
        if settings.replicas not in (1, ranks.world_size):
            raise ConfigError(
                f"parallel.replicas is {settings.replicas} but {ranks.world_size} ranks were "
                "started, each of which drives one replica; leave parallel.replicas out"
            )
        return dims

    def _sharded(self, num_shards: int) -> "ParallelDims":
        """Group the processes so that each group divides a volume, with a slab in each process."""
        devices = self.all_devices
        if len({device.type for device in devices}) > 1:
            raise DeviceError(
                f"devices {listed(devices)} are of different kinds, which cannot share a volume "
                "with --parallel spatial; name devices of one kind, or use --parallel model"
            )
        divided(devices, len(devices), "slabs")
        first = self.rank - self.own
        groups = groupby(range(len(devices)), lambda index: (first + index) // num_shards)
        return replace(
            self,
            replicas=tuple(tuple(devices[index] for index in group) for _, group in groups),
            num_shards=num_shards,
        )

    @property
    def all_devices(self) -> Devices:
        """The devices of this machine's processes, in order."""
        return tuple(device for devices in self.replicas for device in devices)

    @property
    def devices(self) -> Devices:
        """The devices of this process: of its stages, of its slab, or of all threads."""
        if self.uses_threads:
            return self.all_devices
        return (self.all_devices[self.own],) if self.num_shards > 1 else self.replicas[self.own]

    @property
    def num_stages(self) -> int:
        """Number of stages that the network is cut into."""
        return 1 if self.uses_threads else len(self.devices)

    @property
    def world_size(self) -> int:
        """Number of processes on all machines together."""
        return 1 if self.uses_threads else self.num_replicas * self.num_shards

    @property
    def num_processes(self) -> int:
        """Processes of this machine: one per replica, one per slab, or one for all threads."""
        if self.uses_threads:
            return 1
        return len(self.all_devices) if self.num_shards > 1 else len(self.replicas)

    def replica_of(self, rank: int) -> int:
        """Return the replica of a process, given its rank on all machines."""
        return rank // self.num_shards

    def shard_of(self, rank: int) -> int:
        """Return the index of a process's slab, given its rank on all machines."""
        return rank % self.num_shards

    @property
    def predicts_memory(self) -> bool:
        """Whether one replica's memory can be predicted alone; threads also copy and gather."""
        return not self.uses_threads

    def share_of(self, batch_size: int) -> int:
        """Return the largest number of samples of a batch that a replica gets."""
        return -(-batch_size // self.num_replicas)

    def check_batch(self, batch_size: int) -> str | None:
        """Return a warning if replicas get no sample of a batch, else None."""
        idle = self.num_replicas - batch_size
        if idle <= 0:
            return None
        return (
            f"a batch of {batch_size} leaves {idle} of {self.num_replicas} replicas without work; "
            f"use --batch-size {self.num_replicas} or more, or fewer --devices"
        )


def _possible_mode(devices: Devices) -> Literal["none", "spatial", "model"]:
    """Return a mode that these devices can run in."""
    if len(devices) == 1:
        return "none"
    gpus = [device for device in devices if device.type == "cuda"]
    is_alike = len({device.type for device in devices}) == 1 and len(gpus) == len(set(gpus))
    return "spatial" if is_alike else "model"


def _num_shards(settings: ParallelSettings, ranks: Ranks) -> int:
    """Return the number of ranks that share a volume."""
    num_shards, rest = divmod(ranks.world_size, settings.replicas)
    if rest or num_shards < 2:
        raise ConfigError(
            f"{ranks.world_size} ranks were started, which cannot be divided into "
            f"{counted(settings.replicas, 'group')} of two or more (parallel.replicas); start "
            f"{2 * settings.replicas} ranks or a multiple, or change parallel.replicas"
        )
    return num_shards
