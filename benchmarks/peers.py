"""The networks that are compared, each trained as its own users train it.

All have one input channel, three classes, the same channels at each level and the same input. All
take the same loss (``unet3d.model.dice_cross_entropy``, which is faster and leaner than the peers'
own) and the same optimizer (SGD with Nesterov momentum, gradients clipped), so that what differs is
the network and how it is run:

* ``ours``: the network and executor of this package, bfloat16, channels-last;
* ``nnunet``: ``PlainConvUNet`` of dynamic-network-architectures with nnU-Net's settings (two
  convolutions a level with bias, InstanceNorm, LeakyReLU; no deep supervision), float16 with a
  gradient scaler, ``cudnn.benchmark``; nnU-Net compiles it by default;
* ``dynunet``, ``basicunet``: MONAI's, bfloat16, ``cudnn.benchmark``. ``BasicUNet`` always has five
  levels and so takes the first five channels.

On a CPU ours runs in bfloat16 where the processor has it in hardware, and ``nnunet`` in float32, as
nnU-Net itself does: it lowers the precision on GPUs only.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from unet3d.config import ModelSettings, Offload, Recompute, Shape, TrainingSettings
from unet3d.model import Topology, UNet3d, dice_cross_entropy, plan_topology
from unet3d.model.optimizer import (
    Optimization,
)
from unet3d.parallel import Layout, parallelize, resolve_precision, stage_runner
from unet3d.parallel.memory_format import memory_format
from unet3d.parallel.precision import (
    autocast_dtype,
)

NUM_CLASSES = 3

BASIC_LEVELS = 5


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A network and a way to run it."""

    key: str
    """As it is named on the command line."""
    network: Literal["ours", "nnunet", "dynunet", "basicunet"]
    """Which."""
    precision: str = "auto"
    """On a GPU; ``auto`` is the best that it has."""
    cpu_precision: str = "float32"
    """On a CPU."""
    compiled: bool = False
    """Whether by ``torch.compile``."""
    recompute: Recompute = "norm"
    """What our network recomputes in backward."""
    offload: Offload = "none"
    """What it offloads to host memory."""
    recorded: bool = True
    """Whether it may replay its launches as a CUDA graph."""
    channels_first: bool = False
    """Whether the memory format is channels-first wherever it runs."""
    keeps_host_memory: bool | None = None
    """Whether its process keeps the host memory that it frees; None: as its own command line does,
    which ours does."""

    def memory_format(self, device: torch.device, dtype: torch.dtype) -> torch.memory_format:
        """Return the memory format of a stage."""
        if self.channels_first:
            return torch.contiguous_format
        return memory_format(device, dtype)


VARIANTS = (
    Variant(key="ours", network="ours", cpu_precision="auto"),
    Variant(key="ours-float32", network="ours", precision="float32"),
    Variant(key="ours-first", network="ours", cpu_precision="auto", channels_first=True),
    Variant(key="ours-float32-first", network="ours", precision="float32", channels_first=True),
    Variant(key="ours-returning", network="ours", cpu_precision="auto", keeps_host_memory=False),
    Variant(key="ours-unrecorded", network="ours", recorded=False),
    Variant(key="ours-off", network="ours", recompute="off"),
    Variant(key="ours-level", network="ours", recompute="level"),
    Variant(key="ours-offload", network="ours", offload="skips"),
    Variant(key="nnunet-compiled", network="nnunet", precision="float16", compiled=True),
    Variant(key="nnunet-eager", network="nnunet", precision="float16"),
    Variant(key="nnunet-keeping", network="nnunet", precision="float16", keeps_host_memory=True),
    Variant(
        key="nnunet-bfloat16", network="nnunet", precision="bfloat16", cpu_precision="bfloat16"
    ),
    Variant(key="dynunet-compiled", network="dynunet", precision="bfloat16", compiled=True),
    Variant(key="dynunet-eager", network="dynunet", precision="bfloat16"),
    Variant(key="basicunet-compiled", network="basicunet", precision="bfloat16", compiled=True),
    Variant(key="basicunet-eager", network="basicunet", precision="bfloat16"),
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained on: random patches of one size."""

    size: Shape
    """Voxels along X, Y, Z."""
    batch_size: int
    """Patches in a step."""
    channels: tuple[int, ...]
    """Of each level."""

    @property
    def topology(self) -> Topology:
        """Our network for it."""
        settings = ModelSettings(channels=self.channels, deep_supervision=False)
        return plan_topology(settings, self.size, (1.0, 1.0, 1.0), 1, NUM_CLASSES)


def find_variants(keys: str) -> list[Variant]:
    """Return the variants of a comma-separated list, in its order.

    Raises:
        SystemExit: One is unknown.
    """
    known = {variant.key: variant for variant in VARIANTS}
    unknown = [key for key in keys.split(",") if key not in known]
    if unknown:
        raise SystemExit(
            f"there is no variant {', '.join(unknown)}; choose from {', '.join(known)}"
        )
    return [known[key] for key in keys.split(",")]


def make_network(variant: Variant, problem: Problem) -> nn.Module:
    """Build a network on the default device.

    Raises:
        ImportError: Its package is not installed.
        ValueError: It cannot be built with these channels.
    """
    if variant.network == "ours":
        return UNet3d(problem.topology)
    makers: dict[str, Callable[[Problem], nn.Module]] = {
        "nnunet": _nnunet,
        "dynunet": _dynunet,
        "basicunet": _basicunet,
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


def _basicunet(problem: Problem) -> nn.Module:
    from monai.networks.nets import BasicUNet

    channels = problem.channels[:BASIC_LEVELS]
    if len(channels) < BASIC_LEVELS:
        raise ValueError(f"BasicUNet has {BASIC_LEVELS} levels, not {len(channels)}")
    network: nn.Module = BasicUNet(
        spatial_dims=3, in_channels=1, out_channels=NUM_CLASSES, features=(*channels, channels[0])
    )
    return network


def count(variant: Variant, problem: Problem) -> dict[str, int]:
    """Return parameters, and the operations of one forward pass of one patch.

    Args:
        variant: Which network.
        problem: Size and channels.

    Returns:
        ``num_parameters`` and ``num_operations``: a multiplication and an addition are two.
    """
    with torch.device("meta"):
        network = make_network(variant, problem)
        image = torch.empty(1, 1, *problem.size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(image)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"num_parameters": num_parameters, "num_operations": counter.get_total_flops()}


class Trainee:
    """A network on its device or devices, with a batch and an optimizer."""

    def __init__(self, variant: Variant, problem: Problem, devices: Sequence[torch.device]) -> None:
        """Build everything; nothing is compiled or run yet.

        Args:
            variant: Which network, and how it is run.
            problem: The batch.
            devices: One; for ours, several put a stage on each.
        """
        on_gpu = any(device.type == "cuda" for device in devices)
        wanted = variant.precision if on_gpu else variant.cpu_precision
        self.precision = resolve_precision(wanted, devices)
        lowered = autocast_dtype(self.precision)
        torch.backends.cudnn.benchmark = variant.network != "ours"
        torch.manual_seed(0)
        network = make_network(variant, problem)
        settings = TrainingSettings()
        self._executor: Any = None
        first = last = devices[0]
        if isinstance(network, UNet3d):
            layout = Layout(
                devices=tuple(devices),
                autocast=lowered,
                recompute=variant.recompute,
                offload=variant.offload,
                cuda_graphs="auto" if variant.recorded else "off",
            )
            with patch.object(stage_runner, "memory_format", variant.memory_format):
                self._executor = parallelize(network, layout)
            first, last = self._executor.input_device, self._executor.output_device
        else:
            network.to(first)
        self._module = network
        self._network = torch.compile(network) if variant.compiled else network
        self._autocast = torch.autocast(first.type, lowered) if lowered else nullcontext()
        self._optimization = Optimization(network, settings, self.precision)
        self._learning_rate = settings.learning_rate
        self._image = torch.randn(problem.batch_size, 1, *problem.size, device=first)
        self._target = torch.randint(
            NUM_CLASSES, (problem.batch_size, *problem.size), dtype=torch.uint8, device=last
        )

    def step(self) -> Tensor:
        """Train one step: forward, loss, backward, clipping, optimizer.

        Returns:
            The loss, on its device.
        """
        if self._executor is not None:
            terms = self._executor.forward_backward(
                self._image, self._target, dice_cross_entropy, self._optimization.scale
            )
        else:
            with self._autocast:
                logits = self._network(self._image)
            terms = dice_cross_entropy(logits, self._target)
            torch.autograd.backward(self._optimization.scaler.scale(terms.total))
        self._optimization.step(self._learning_rate)
        loss: Tensor = terms.total.detach()
        return loss

    def window(self) -> Tensor:
        """Predict the logits of the batch.

        Returns:
            Shape (N, K, X, Y, Z).
        """
        if self._executor is not None:
            logits: Tensor = self._executor.predict(self._image)
            return logits
        self._module.eval()
        with torch.inference_mode(), self._autocast:
            logits = self._network(self._image)
        self._module.train()
        return logits
