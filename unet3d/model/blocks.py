"""The modules that a U-Net is made of, and the list of blocks that a cut divides."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unet3d.config import Shape
from unet3d.kernels import instance_norm

Norm = Literal["instance", "group", "batch"]

NORM_EPS = 1e-5
NEGATIVE_SLOPE = 0.01
"""Of LeakyReLU, as in nnU-Net."""


@dataclass(frozen=True)
class Block:
    """One step of the network, and the unit that a cut can fall between.

    The blocks of a network are in an order in which they can run. Each reads tensors by name and
    writes one tensor under its own name; ``image`` is the network's input. So a list of blocks,
    or any run of it, says by itself which tensors it needs from outside: at a cut, those are what
    must travel.

    Attributes:
        name: Such as ``encoder.0.1`` (level, unit), ``decoder.2.up`` or ``head``.
        module: What runs; it owns its parameters alone.
        inputs: Names of the tensors that it reads, in the order of its arguments.
    """

    name: str
    module: nn.Module
    inputs: tuple[str, ...]


def run_blocks(
    blocks: Sequence[Block], tensors: dict[str, Tensor], keep: Iterable[str]
) -> dict[str, Tensor]:
    """Run blocks in order, letting go of each tensor after its last reader.

    Args:
        blocks: A run of a network's blocks.
        tensors: What they need from outside, by name; emptied, so that nothing here keeps a tensor
            that no block reads any more.
        keep: Names of the tensors to return.

    Returns:
        The kept tensors by name.
    """
    kept = set(keep)
    last_reader = {name: block.name for block in blocks for name in block.inputs}
    for block in blocks:
        tensors[block.name] = block.module(*(tensors[name] for name in block.inputs))
        for name in set(block.inputs):
            if last_reader[name] == block.name and name not in kept:
                del tensors[name]
    return {name: tensors.pop(name) for name in kept}


class InstanceNorm(nn.Module):
    """Instance normalisation, with the LeakyReLU that follows it, as one operation."""

    def __init__(self, channels: int, negative_slope: float) -> None:
        """Start as the plain normalisation.

        Args:
            channels: Of the feature map.
            negative_slope: Of LeakyReLU; 1 leaves the activation out.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) to the same shape."""
        return instance_norm(x, self.weight, self.bias, NORM_EPS, self.negative_slope)


def make_norm(norm: Norm, channels: int, activated: bool) -> nn.Sequential | InstanceNorm:
    """Return the normalisation that follows a convolution.

    Args:
        norm: ``instance`` and ``group`` treat each sample alone, ``batch`` does not.
        channels: Channels of the feature map.
        activated: Whether LeakyReLU follows.
    """
    if norm == "instance":
        return InstanceNorm(channels, NEGATIVE_SLOPE if activated else 1.0)
    if norm == "group":
        num_groups = next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
        layers: list[nn.Module] = [nn.GroupNorm(num_groups, channels, eps=NORM_EPS)]
    else:
        layers = [nn.BatchNorm3d(channels, eps=NORM_EPS)]
    if activated:
        layers.append(nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True))
    return nn.Sequential(*layers)


class ConvUnit(nn.Module):
    """3x3x3 convolution, normalisation, LeakyReLU.

    Several inputs are joined along the channels first.
    """

    def __init__(self, in_channels: int, channels: int, stride: Shape, norm: Norm) -> None:
        super().__init__()
        # No bias: the normalisation takes the mean away again.
        self.conv = nn.Conv3d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm = make_norm(norm, channels, activated=True)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) inputs to (N, channels, X', Y', Z')."""
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
        out: Tensor = self.norm(self.conv(x))
        return out


class ResidualUnit(nn.Module):
    """Two convolutions whose result is added to the input (He et al., arXiv 1512.03385)."""

    def __init__(self, in_channels: int, channels: int, stride: Shape, norm: Norm) -> None:
        super().__init__()
        self.first = ConvUnit(in_channels, channels, stride, norm)
        self.conv = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
        self.norm = make_norm(norm, channels, activated=False)
        self.activation = nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True)
        # As ResNet-D does (arXiv 1812.01187): averaging first, so that no voxel is skipped.
        pool = nn.AvgPool3d(stride, stride) if max(stride) > 1 else nn.Identity()
        project = (
            nn.Sequential(
                nn.Conv3d(in_channels, channels, 1, bias=False),
                make_norm(norm, channels, activated=False),
            )
            if in_channels != channels
            else nn.Identity()
        )
        self.shortcut = nn.Sequential(pool, project)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) to (N, channels, X', Y', Z')."""
        out: Tensor = self.activation(self.norm(self.conv(self.first(x))) + self.shortcut(x))
        return out


class Upsample(nn.ConvTranspose3d):
    """Transposed convolution whose kernel is its stride: each voxel becomes a small block."""

    def __init__(self, in_channels: int, channels: int, stride: Shape) -> None:
        super().__init__(in_channels, channels, kernel_size=stride, stride=stride)


class Head(nn.Conv3d):
    """1x1x1 convolution from features to logits."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes, kernel_size=1)
