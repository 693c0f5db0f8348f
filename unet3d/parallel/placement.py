"""Where replicas and stages live: one validated statement of settings, machine and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from unet3d.config import Config, CudaGraphs, Offload, ParallelSettings, Recompute
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError
from unet3d.parallel.machine import Machine
from unet3d.parallel.precision import autocast_dtype

Devices = tuple[torch.device, ...]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one stage or replica.

    Two slots may name one device, as in ``cpu,cpu``.
    """

    index: int
    """Its number, from 0."""
    device: torch.device
    """The device it computes on."""
    blocks: tuple[str, ...]
    """Names of the blocks that it runs."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one network is spread over devices."""

    devices: Devices
    """One device for each stage; a single one runs the whole network."""
    cuts: tuple[int, ...] | None = None
    """Index in the block list at which each stage but the first starts; None: the default."""
    num_micro_batches: int = 1
    """Portions that a training batch is divided into, along N."""
    autocast: torch.dtype | None = None
    """Lower precision of the stages whose device has it, or None for the network's own."""
    schedule: Literal["1f1b", "all-forward"] = "1f1b"
    """The order in which the micro-batches run."""
    recompute: Recompute = "norm"
    """What is recomputed in backward instead of being kept."""
    offload: Offload = "none"
    """What GPUs keep in host memory while they do not need it."""
    cuda_graphs: CudaGraphs = "auto"
    """Whether steps on GPUs may be captured and replayed."""
    num_replicas: int = 1
    """How many ranks each have a network on such devices, and share a batch."""
    num_shards: int = 1
    """How many ranks share each volume."""
    shard: int = 0
    """Whose slab this process has."""

    @classmethod
    def of(cls, config: Config, dims: "ParallelDims", precision: str) -> "Layout":
        """Return how settings spread the network of one replica.

        Args:
            config: Cuts, micro-batches, schedule, and what is kept for backward.
            dims: The devices and ranks.
            precision: A resolved one, such as ``bfloat16``; never ``auto``.
        """
        return cls(
            devices=dims.devices,
            cuts=config.parallel.cuts,
            num_micro_batches=config.training.num_micro_batches,
            autocast=autocast_dtype(precision),
            schedule=config.parallel.schedule,
            recompute=config.memory.recompute,
            offload=config.memory.offload,
            cuda_graphs=config.parallel.cuda_graphs,
            num_replicas=dims.num_replicas,
        )


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """How a training or a prediction is spread: replicas, stages and the devices of each.

    It is made by :meth:`resolve`, which refuses every conflict between settings, devices and ranks.
    """

    mode: Literal["none", "model", "data"]
    """The parallel mode."""
    replicas: tuple[Devices, ...]
    """The devices of each replica on this machine, one for each stage."""
    num_replicas: int
    """Number of replicas on all machines together."""
    own: int = 0
    """Which of this machine's replicas belongs to this process."""
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

        Args:
            settings: Mode, engine, devices and replicas.
            machine: The devices that exist; None: those of this machine.
            ranks: The rank of this process; None: it is the only one, or starts the others.

        Raises:
            DeviceError: A device is unknown or absent, or their number does not suit the mode.
            ConfigError: The settings ask for another number of replicas than there are ranks.
        """
        machine = machine or Machine.here()
        if ranks is not None and ranks.world_size > 1:
            return cls._of_ranks(settings, machine, ranks)
        names = settings.devices
        if names is None:
            names = _default_names(settings, machine)
        devices = tuple(machine.device(name) for name in names)
        if settings.engine == "dataparallel":
            return cls._of_threads(settings, machine, devices)
        num_replicas = len(devices) if settings.mode == "data" else settings.replicas
        _check_count(settings, names)
        replicas = _divided(devices, num_replicas, "replicas")
        _check_stages(settings, devices, replicas)
        return cls(mode=settings.mode, replicas=replicas, num_replicas=num_replicas)

    @classmethod
    def _of_threads(
        cls, settings: ParallelSettings, machine: Machine, devices: Devices
    ) -> "ParallelDims":
        output = settings.output_device
        gather = None if output is None else machine.device(output)
        check_thread_devices(devices, gather)
        return cls(
            mode=settings.mode,
            replicas=tuple((device,) for device in devices),
            num_replicas=len(devices),
            uses_threads=True,
            gather_device=gather,
        )

    @classmethod
    def _of_ranks(
        cls, settings: ParallelSettings, machine: Machine, ranks: Ranks
    ) -> "ParallelDims":
        if settings.engine == "dataparallel":
            raise ConfigError(
                f"parallel.engine dataparallel is one process, but there are {ranks.world_size}; "
                "use parallel.engine=ddp under torchrun"
            )
        if settings.replicas not in (1, ranks.world_size):
            raise ConfigError(
                f"parallel.replicas is {settings.replicas} but {ranks.world_size} ranks were "
                "started, each of which drives one replica; leave parallel.replicas out"
            )
        num_ranks, names = ranks.local_world_size, settings.devices
        # A rank that names no mode has one device, as with mode data.
        has_stages = settings.mode == "model"
        if names is None:
            per_rank = max(2, machine.num_gpus // num_ranks) if has_stages else 1
            count = num_ranks * per_rank
            names = tuple(map(str, range(count))) if machine.num_gpus else ("cpu",) * count
        devices = tuple(machine.device(name) for name in names)
        replicas = _divided(devices, num_ranks, "ranks of this machine")
        own = replicas[ranks.local_rank]
        if (len(own) > 1) != has_stages:
            raise DeviceError(
                f"rank {ranks.rank} has {len(own)} of the devices {','.join(names)}, but parallel "
                f"mode {settings.mode} needs {'at least two' if has_stages else 'one'}"
            )
        return cls(
            mode="model" if has_stages else "data",
            replicas=replicas,
            num_replicas=ranks.world_size,
            own=ranks.local_rank,
        )

    @property
    def devices(self) -> Devices:
        """The devices that this process drives: one for each of its stages, or for each thread."""
        if self.uses_threads:
            return tuple(device for (device,) in self.replicas)
        return self.replicas[self.own]

    @property
    def num_stages(self) -> int:
        """How many devices share one network."""
        return len(self.replicas[self.own])

    @property
    def num_processes(self) -> int:
        """How many processes this machine runs, one for each replica that is not a thread."""
        return 1 if self.uses_threads else len(self.replicas)

    @property
    def predicts_memory(self) -> bool:
        """Whether a replica's step shows what its devices need; threads also copy and gather."""
        return not self.uses_threads

    def share_of(self, batch_size: int) -> int:
        """Return the largest number of samples that a replica has.

        Args:
            batch_size: Samples of all replicas together.
        """
        return -(-batch_size // self.num_replicas)

    def check_batch(self, batch_size: int) -> str | None:
        """Return a warning where replicas have no sample, or None.

        Args:
            batch_size: Samples of all replicas together.

        Raises:
            ConfigError: The replicas are threads, which must all have a sample.
        """
        idle = self.num_replicas - batch_size
        if idle <= 0:
            return None
        if self.uses_threads:
            raise ConfigError(
                f"a batch of {batch_size} gives {idle} of the {self.num_replicas} devices no "
                f"patch; use --batch-size {self.num_replicas} or more, or fewer --devices"
            )
        return (
            f"a batch of {batch_size} leaves {idle} of {self.num_replicas} replicas without work; "
            f"use --batch-size {self.num_replicas} or more"
        )


def check_thread_devices(devices: Sequence[torch.device], gather: torch.device | None) -> None:
    """Refuse devices that ``nn.DataParallel`` cannot use.

    Args:
        devices: The devices of the replicas.
        gather: The device where logits are gathered; None: the first.

    Raises:
        DeviceError: The devices are not different GPUs, or ``gather`` is not one of them.
    """
    named = _listed(devices)
    if any(device.type != "cuda" for device in devices) or len(set(devices)) != len(devices):
        raise DeviceError(
            f"parallel.engine dataparallel copies the network to GPUs, each named once, not to "
            f"{named}; use parallel.engine=ddp"
        )
    if gather is not None and gather not in devices:
        raise DeviceError(
            f"parallel.output_device is {gather}, which is none of {named}; name one of them"
        )


def _check_count(settings: ParallelSettings, names: Sequence[str]) -> None:
    listed = ",".join(names) or "none"
    if settings.mode == "none" and len(names) != 1:
        raise DeviceError(
            f"devices {listed} but parallel mode none uses one; "
            "add --parallel model or --parallel data, or name one device"
        )
    if settings.mode == "model" and len(names) < 2:
        raise DeviceError(
            f"parallel mode model needs a device for each of two stages or more, got {listed}; "
            "name two (one device may be named twice)"
        )


def _check_stages(
    settings: ParallelSettings, devices: Devices, replicas: Sequence[Devices]
) -> None:
    if settings.mode == "model" and len(replicas[0]) < 2:
        raise DeviceError(
            f"devices {_listed(devices)} give each of {settings.replicas} replicas one, but "
            "parallel mode model needs a device for each of two stages or more; name more "
            "devices, or fewer --replicas"
        )


def _divided(devices: Devices, num_groups: int, what: str) -> tuple[Devices, ...]:
    """Divide the devices in order; no GPU may be in two groups, because NCCL refuses that."""
    size, rest = divmod(len(devices), num_groups)
    named = _listed(devices)
    if rest or not size:
        raise DeviceError(f"devices {named} do not divide by {num_groups} {what}; name as many")
    groups = tuple(devices[i * size : (i + 1) * size] for i in range(num_groups))
    for stage in zip(*groups, strict=True):
        if len({device.type for device in stage}) > 1:
            raise DeviceError(
                f"devices {named} make replicas that differ: {' and '.join(map(str, stage))} "
                "cannot exchange gradients; name the same kinds in the same order for each"
            )
    gpus = [gpu for group in groups for gpu in set(group) if gpu.type == "cuda"]
    if len(gpus) != len(set(gpus)):
        raise DeviceError(
            f"devices {named} put two replicas on one GPU, which NCCL refuses; name each GPU once"
        )
    return groups


def _default_names(settings: ParallelSettings, machine: Machine) -> tuple[str, ...]:
    count, mode = machine.num_gpus, settings.mode
    if mode == "none":
        return ("0",) if count else ("cpu",)
    if mode == "data" and count:
        return tuple(map(str, range(count)))
    if count == 1:
        raise DeviceError(
            f"parallel mode {mode} spreads the network over devices, but this machine has "
            f"{machine.description}; name the devices, such as --devices 0,cpu"
        )
    num_devices = 2 * settings.replicas
    return tuple(map(str, range(num_devices))) if count else ("cpu",) * num_devices


def _listed(devices: Sequence[torch.device]) -> str:
    return ",".join(map(str, devices))
