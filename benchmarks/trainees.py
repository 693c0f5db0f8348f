"""The networks to train: ours in every mode, nnU-Net's and MONAI's.

All networks have one input channel, three classes, the same channels at each level and the same
random batch. All take the same loss (``unet3d.model.dice_cross_entropy``, which is faster and
leaner than the peers' own) and the same optimizer (SGD with Nesterov momentum, gradients clipped),
so only the network and its execution differ:

* ``ours``: the network and executor of this package, bfloat16, channels-last;
* ``nnunet``: ``PlainConvUNet`` of dynamic-network-architectures with nnU-Net's settings (two
  convolutions a level with bias, InstanceNorm, LeakyReLU; no deep supervision), float16 with a
  gradient scaler, ``cudnn.benchmark``; nnU-Net compiles it by default;
* ``dynunet``: MONAI's ``DynUNet``, bfloat16, ``cudnn.benchmark``.

On a CPU ours runs in bfloat16 if the processor is faster in it, and ``nnunet`` in float32, as
nnU-Net itself does: it lowers the precision on GPUs only.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from common import devices_named
from torch import Tensor, nn

from unet3d.config import ModelSettings, Offload, Recompute, Shape, TrainingSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.inference.window_network import Replayed
from unet3d.model import Topology, UNet3d, dice_cross_entropy, plan_topology
from unet3d.model.optimizer import Optimization
from unet3d.parallel import (
    DataParallelExecutor,
    Executor,
    Layout,
    autocast_dtype,
    image_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.planning.memory_estimate import Step
from unet3d.planning.step_time import time_cuts

NUM_CLASSES = 3

Kind = Literal["stages", "slabs", "threads"]


class Trainee(Protocol):
    """A network on its device or devices, with a batch and an optimizer."""

    precision: str
    """Number type of its computation."""

    def step(self) -> Tensor:
        """Train one step: forward, loss, backward, clipping, optimizer; return the loss."""

    def window(self) -> Tensor:
        """Predict the logits of the batch, shape (N, K, X, Y, Z)."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The patches to train on, random and of one size, and the channels of the network."""

    size: Shape
    """Voxels along X, Y, Z."""
    batch_size: int
    """Patches in a step."""
    channels: tuple[int, ...]
    """Channels of each level."""
    model: dict[str, Any] = field(default_factory=dict)
    """Other settings of our network."""

    @property
    def topology(self) -> Topology:
        """The topology of our network for this problem."""
        settings = ModelSettings(channels=self.channels, deep_supervision=False, **self.model)
        return plan_topology(settings, self.size, (1.0, 1.0, 1.0), 1, NUM_CLASSES)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return image and target, the same ones every time, on the host."""
        generator = torch.Generator().manual_seed(0)
        image = torch.randn((self.batch_size, 1, *self.size), generator=generator)
        shape = (self.batch_size, *self.size)
        return image, torch.randint(NUM_CLASSES, shape, generator=generator, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How our network is trained on some devices."""

    problem: Problem
    """The patches and the network; the batch is for all replicas together."""
    devices: tuple[str, ...]
    """Devices of the first replica, then of the second, and so on."""
    kind: Kind = "stages"
    """How devices of a replica share the work: each has a stage of the network, a slab of each
    volume, or a copy of the network that ``nn.DataParallel`` runs in a thread."""
    num_replicas: int = 1
    """Copies of the network; each is one rank, or with slabs several."""
    num_micro_batches: int = 1
    """Micro-batches of a replica's batch."""
    cuts: tuple[int, ...] | None = None
    """First block of each stage but the first; None: the default cuts."""
    balances_time: bool = False
    """Whether cuts give stages of the same time, instead."""
    precision: str = "auto"
    """Precision of training; ``auto`` is the best that the devices have."""
    recompute: Recompute = "norm"
    """Maps that backward recomputes."""
    offload: Offload = "none"
    """Maps that are kept in host memory."""
    captures: bool = True
    """Whether steps may be recorded and replayed."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Name of the optimizer."""

    @property
    def num_shards(self) -> int:
        """Slabs of each volume."""
        return len(self.devices) // self.num_replicas if self.kind == "slabs" else 1

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self.num_replicas * self.num_shards

    def layout(self, rank: int, devices: tuple[torch.device, ...]) -> Layout:
        """Return the layout of one rank."""
        count = len(devices) // self.num_ranks
        return Layout(
            devices=devices[rank * count : (rank + 1) * count],
            cuts=self.cuts,
            num_micro_batches=self.num_micro_batches,
            autocast=autocast_dtype(resolve_precision(self.precision, devices)),
            recompute=self.recompute,
            offload=self.offload,
            captures=self.captures,
            num_replicas=self.num_replicas,
            num_shards=self.num_shards,
            shard=rank % self.num_shards,
        )

    def planned(self, rank: int = 0) -> Step:
        """Return the step of one rank, for the planner."""
        devices = devices_named(self.devices)
        step = Step(
            topology=self.problem.topology,
            layout=self.layout(rank, devices),
            size=self.problem.size,
            batch_size=self.problem.batch_size // self.num_replicas,
            settings=TrainingSettings(optimizer=self.optimizer),
            precision=resolve_precision(self.precision, devices),
        )
        if not self.balances_time:
            return step
        return replace(step, layout=replace(step.layout, cuts=time_cuts(step)))


class OurTrainee:
    """Our network, as one rank trains it."""

    def __init__(self, way: Way, group: Group | None = None) -> None:
        """Build everything; nothing is compiled or run yet.

        Args:
            way: How it is trained.
            group: The ranks; None: this process alone.
        """
        self.group = group or Group(Ranks())
        rank = self.group.ranks.rank
        step = way.planned(rank)
        self.precision, layout = step.precision, step.layout
        torch.backends.cudnn.benchmark = False  # a peer in this process may have asked for it
        if layout.devices[0].type == "cuda":
            torch.cuda.set_device(layout.devices[0])
        torch.manual_seed(0)
        model = UNet3d(step.topology)
        self.cuts = layout.cuts
        self.executor: Executor = (
            DataParallelExecutor(model, layout.devices, None, layout.autocast)
            if way.kind == "threads"
            else parallelize(model, layout, self.group if self.group.size > 1 else None)
        )
        self.optimization = Optimization(model, step.settings, step.precision)
        self._rate = step.settings.learning_rate
        self._planes = step.size[0] if layout.num_shards > 1 else None
        self._num_done = 0
        samples = slice(*(step.batch_size * (rank // way.num_shards + i) for i in (0, 1)))
        image, target = (tensor[samples] for tensor in way.problem.batch())
        image = image.to(image_dtype(model))
        self._whole = image  # the executor divides it into slabs
        if layout.num_shards > 1:
            first = sum(
                replace(step, layout=replace(layout, shard=other)).own_size[0]
                for other in range(layout.shard)
            )
            slab = slice(first, first + step.own_size[0])
            image, target = image[:, :, slab], target[:, slab]
        self._image = image.to(self.executor.input_device)
        self._target = target.to(self.executor.output_device)
        is_one_gpu = len(way.devices) == 1 and layout.devices[0].type == "cuda"
        self._predict: Any = Replayed(self.executor) if is_one_gpu else self.executor.predict

    def step(self) -> Tensor:
        """Train one step, with the messages that ranks send one another in training."""
        self.group.note(self._num_done, f"step {self._num_done}")
        terms = self.executor.forward_backward(
            self._image,
            self._target,
            dice_cross_entropy,
            self.optimization.scale,
            planes=self._planes,
        )
        self.optimization.step(self._rate)
        self.group.all_reduce_flags(0, False)
        self._num_done += 1
        loss: Tensor = terms.total.detach()
        return loss

    def window(self) -> Tensor:
        """Predict the logits of the replica's samples, as whole volumes even with slabs.

        A single GPU replays a graph from the second call on, as in ``unet3d predict``.
        """
        self._whole = self._whole.to(self.executor.input_device)
        logits: Tensor = self._predict(self._whole)
        return logits


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A network and a way to run it on one device."""

    key: str
    """Its name on the command line."""
    network: Literal["ours", "nnunet", "dynunet"]
    """Whose network it is."""
    precision: str = "auto"
    """Precision on a GPU; ``auto`` is the best that it has."""
    cpu_precision: str = "float32"
    """Precision on a CPU."""
    compiled: bool = False
    """Whether ``torch.compile`` compiles the network."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of :class:`Way`, if the network is ours."""

    def way(self, problem: Problem, devices: tuple[str, ...], kind: Kind = "stages") -> Way:
        """Return how our network is trained on one or several devices."""
        precision = self.cpu_precision if "cpu" in devices else self.precision
        return Way(
            problem=problem,
            devices=devices,
            kind=kind if len(devices) > 1 else "stages",
            precision=precision,
            **self.options,
        )


VARIANTS = (
    Variant(key="ours", network="ours", cpu_precision="auto"),
    Variant(key="ours-float32", network="ours", precision="float32"),
    Variant(
        key="ours-unrecorded", network="ours", cpu_precision="auto", options={"captures": False}
    ),
    Variant(key="ours-off", network="ours", cpu_precision="auto", options={"recompute": "off"}),
    Variant(key="ours-level", network="ours", cpu_precision="auto", options={"recompute": "level"}),
    Variant(key="ours-offload", network="ours", options={"offload": "skips"}),
    Variant(key="nnunet-compiled", network="nnunet", precision="float16", compiled=True),
    Variant(key="nnunet-eager", network="nnunet", precision="float16"),
    Variant(
        key="nnunet-bfloat16", network="nnunet", precision="bfloat16", cpu_precision="bfloat16"
    ),
    Variant(key="dynunet-compiled", network="dynunet", precision="bfloat16", compiled=True),
    Variant(key="dynunet-eager", network="dynunet", precision="bfloat16"),
)


def variants_named(text: str) -> list[Variant]:
    """Return the variants of a comma-separated list, in its order.

    Raises:
        ValueError: One is unknown.
    """
    known = {variant.key: variant for variant in VARIANTS}
    unknown = [key for key in text.split(",") if key not in known]
    if unknown:
        raise ValueError(f"no variant {', '.join(unknown)}; choose from {', '.join(known)}")
    return [known[key] for key in text.split(",")]


def make_trainee(variant: Variant, problem: Problem, device: str) -> Trainee:
    """Build a network on a device, ready to train."""
    if variant.network == "ours":
        return OurTrainee(variant.way(problem, (device,)))
    return PeerTrainee(variant, problem, *devices_named((device,)))


def make_network(variant: Variant, problem: Problem) -> nn.Module:
    """Build a network on the default device.

    Raises:
        ImportError: Its package is not installed.
    """
    makers: dict[str, Callable[[Problem], nn.Module]] = {
        "ours": lambda problem: UNet3d(problem.topology),
        "nnunet": _nnunet,
        "dynunet": _dynunet,
    }
    return makers[variant.network](problem)


def _nnunet(problem: Problem) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    topology = problem.topology
    network: nn.Module = PlainConvUNet(
        input_channels=1,
        n_stages=topology.num_levels,
        features_per_stage=topology.channels,
        conv_op=nn.Conv3d,
        kernel_sizes=[(3, 3, 3)] * topology.num_levels,
        strides=topology.strides,
        n_conv_per_stage=[2] * topology.num_levels,
        num_classes=NUM_CLASSES,
        n_conv_per_stage_decoder=[2] * (topology.num_levels - 1),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=False,
    )
    return network


def _dynunet(problem: Problem) -> nn.Module:
    from monai.networks.nets import DynUNet

    topology = problem.topology
    network: nn.Module = DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=NUM_CLASSES,
        kernel_size=[(3, 3, 3)] * topology.num_levels,
        strides=topology.strides,
        upsample_kernel_size=topology.strides[1:],
        filters=topology.channels,
    )
    return network


class PeerTrainee:
    """A peer's network on one device."""

    def __init__(self, variant: Variant, problem: Problem, device: torch.device) -> None:
        """Build everything; nothing is compiled or run yet."""
        wanted = variant.precision if device.type == "cuda" else variant.cpu_precision
        self.precision = resolve_precision(wanted, [device])
        lowered = autocast_dtype(self.precision)
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        self._module = make_network(variant, problem).to(device)
        self._network = torch.compile(self._module) if variant.compiled else self._module
        self._autocast = torch.autocast(device.type, lowered) if lowered else nullcontext()
        settings = TrainingSettings()
        self._rate = settings.learning_rate
        self._optimization = Optimization(self._module, settings, self.precision)
        self._image, self._target = (tensor.to(device) for tensor in problem.batch())

    def step(self) -> Tensor:
        """Train one step."""
        with self._autocast:
            logits = self._network(self._image)
        terms = dice_cross_entropy(logits, self._target)
        torch.autograd.backward(self._optimization.scaler.scale(terms.total))
        self._optimization.step(self._rate)
        loss: Tensor = terms.total.detach()
        return loss

    def window(self) -> Tensor:
        """Predict the logits of the batch."""
        self._module.eval()
        with torch.inference_mode(), self._autocast:
            logits: Tensor = self._network(self._image)
        self._module.train()
        return logits
