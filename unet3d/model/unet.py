"""A 3D U-Net as a list of blocks: an encoder and a decoder, which share only tensors.

In the style of nnU-Net's networks (arXiv 1904.08128): two 3x3x3 convolutions per level, unless the
topology has other numbers or kernels, each with normalisation and LeakyReLU; strided convolution
down, transposed convolution up::

    image ─ encoder.0.0 ─ encoder.0.1 ──────── decoder.0.skip ─ decoder.0.0 ─ head
                               │                                    │
                          encoder.1.0 ─ encoder.1.1 ─ …             │
                                             │                      │
                                             …  ───────────────  decoder.1.1

nnU-Net concatenates skip and upsampled features before a convolution. Here each has its own half of
that convolution, and the results are added. This is the same function, but the concatenated tensor,
the largest of the network, never exists, and a cut may fall between the halves. Upsampling and the
following convolution are one block (``decoder.0.0``), as are the last unit and the head (``head``),
which avoids large intermediate maps, too (:func:`unet3d.kernels.upsampled_conv3x3x3`,
:func:`unet3d.kernels.instance_norm_head`).

This module never names a device. Which block runs where is decided by :mod:`unet3d.parallel`,
from :meth:`UNet3d.blocks`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from unet3d.errors import DoesNotFitError, VolumeError, counted
from unet3d.memory.host import shortage
from unet3d.model.fusing import deferring
from unet3d.model.layers import (
    Convolution,
    ConvUnit,
    Head,
    HeadUnit,
    ResidualUnit,
    Upsample,
    UpsampledUnit,
)
from unet3d.model.network import Block, BlockNetwork, run_blocks
from unet3d.model.topology import Topology


class Encoder(nn.Module):
    """The contracting path; its result at each level is that level's last unit."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.levels = nn.ModuleList()
        in_channels = topology.in_channels
        for level, (channels, stride) in enumerate(
            zip(topology.channels, topology.strides, strict=True)
        ):
            units: list[nn.Module] = []
            num_units = topology.num_units(level)
            kinds: list[Callable[..., nn.Module]] = [ResidualUnit] * num_units
            if topology.encoder == "plain":
                kinds = [partial(ConvUnit, feeds_convolution=True)] * num_units
            elif level == 0:  # which needs a stem
                kinds = [ConvUnit, *kinds]
            for kind in kinds:
                units.append(kind(topology, level, in_channels, stride))
                stride, in_channels = (1, 1, 1), channels
            self.levels.append(nn.ModuleList(units))

    def blocks(self) -> tuple[Block, ...]:
        """Return one block for each unit, from level 0 down."""
        blocks: list[Block] = []
        source = "image"
        for level, units in enumerate(self.levels):
            for index, unit in enumerate(_units_of(units)):
                name = f"encoder.{level}.{index}"
                blocks.append(
                    Block(name=name, module=unit, inputs=(source,), path="encoder", level=level)
                )
                source = blocks[-1].name
        return tuple(blocks)

    def outputs(self) -> tuple[str, ...]:
        """Return the name of each level's result, level 0 first."""
        return tuple(f"encoder.{i}.{len(_units_of(u)) - 1}" for i, u in enumerate(self.levels))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map an image (N, C, X, Y, Z) to the features of each level, level 0 first."""
        blocks = deferring(self.blocks(), self.outputs())
        features = run_blocks(blocks, {"image": image}, self.outputs())
        return tuple(features[name] for name in self.outputs())


class Decoder(nn.Module):
    """The expanding path and the heads; it knows the encoder's outputs by name only."""

    def __init__(self, topology: Topology, skips: tuple[str, ...]) -> None:
        """Build the decoder; ``skips`` names the encoder's result at each level, level 0 first."""
        super().__init__()
        self.skips = skips
        self.levels = nn.ModuleDict()
        for level in reversed(range(topology.num_levels - 1)):
            channels, lower = topology.channels[level : level + 2]
            stride, bias = topology.strides[level + 1], topology.upsampling_bias
            last = topology.num_decoder_units(level) - 1
            units = [
                ConvUnit(topology, level, channels, feeds_convolution=index < last)
                for index in range(last + 1)
            ]
            self.levels[str(level)] = nn.ModuleDict(
                {
                    "skip": Convolution(channels, channels, kernel=topology.kernel(level)),
                    "up": Upsample(lower, channels, stride, has_bias=bias),
                    "units": nn.ModuleList(units),
                }
            )
        self.heads = nn.ModuleList(
            Head(topology.channels[level], topology.num_classes)
            for level in range(topology.num_heads)
        )

    def _units_of(self, level: int) -> dict[str, nn.Module]:
        """Return a level's units by the names of their blocks, joined with upsampling and head.

        A wrapper that joins two modules is created in each call. It has only their parameters,
        which keep their names, also in a replica of nn.DataParallel and if a module is replaced.
        """
        parts: Any = self.levels[str(level)]
        units: list[Any] = _units_of(parts["units"])
        units[0] = UpsampledUnit(parts["up"], units[0])
        names = [f"decoder.{level}.{index}" for index in range(len(units))]
        if level == 0:
            units[-1] = HeadUnit(units[-1], cast(Head, self.heads[0]))
            names[-1] = _head_name(0)
        return dict(zip(names, units, strict=True))

    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks from the lowest level up, each head after its level."""
        blocks: list[Block] = []
        source = self.skips[-1]
        for name, parts in self.levels.items():
            level = int(name)
            here = partial(Block, path="decoder", level=level)
            skip = f"decoder.{level}.skip"
            blocks.append(here(name=skip, module=parts["skip"], inputs=(self.skips[level],)))  # type: ignore[index]
            inputs: tuple[str, ...] = (source, skip)
            for block_name, module in self._units_of(level).items():
                blocks.append(here(name=block_name, module=module, inputs=inputs))
                inputs = (block_name,)
            source = blocks[-1].name
            if 0 < level < len(self.heads):
                head, name = self.heads[level], _head_name(level)
                blocks.append(
                    Block(name=name, module=head, inputs=(source,), path="head", level=level)
                )
        return tuple(blocks)

    @torch.no_grad()
    def share_variance(self) -> None:
        """Initialise two added convolutions like one convolution over both inputs."""
        for parts in self.levels.values():
            for conv in (parts["skip"], parts["units"][0].conv):  # type: ignore[index]
                conv.weight.mul_(0.5**0.5)

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the logits, full resolution first."""
        return tuple(_head_name(level) for level in range(len(self.heads)))

    def forward(self, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Map the encoder's features to logits (N, K, X, Y, Z), full resolution first."""
        tensors = dict(zip(self.skips, features, strict=True))
        blocks = deferring(self.blocks(), self.outputs())
        logits = run_blocks(blocks, tensors, self.outputs())
        return tuple(logits[name] for name in self.outputs())


class UNet3d(BlockNetwork):
    """The whole network."""

    def __init__(self, topology: Topology) -> None:
        """Build the network on the default device, with He initialisation.

        Args:
            topology: Channels, strides and options.
        """
        super().__init__()
        self.topology = topology
        self.encoder = Encoder(topology)
        self.decoder = Decoder(topology, self.encoder.outputs())
        for module in self.modules():
            # Random numbers on meta have no effect, but PyTorch imports its compiler for them.
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, a=topology.negative_slope)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.decoder.share_variance()

    def blocks(self) -> tuple[Block, ...]:
        """Return every block in an order in which they can run: encoder, decoder, heads."""
        return (*self.encoder.blocks(), *self.decoder.blocks())

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the blocks that write logits, full resolution first."""
        return self.decoder.outputs()

    def preferred_cuts(self, num_stages: int) -> tuple[int, ...] | None:
        """Return the cut between encoder and decoder for two stages, None for more."""
        return (len(self.encoder.blocks()),) if num_stages == 2 else None

    def example_input(self) -> Tensor:
        """Return an image (1, C, X, Y, Z) on the meta device: 4 voxels at the lowest level."""
        size = (4 * stride for stride in self.topology.total_stride)
        return torch.empty(1, self.topology.in_channels, *size, device="meta")

    def check_shape(self, image: Tensor) -> None:
        """Refuse wrong channels, and sizes that strides do not divide or reduce to one voxel."""
        channels, *size = image.shape[1:]
        if channels != self.topology.in_channels:
            raise VolumeError(
                f"the image has {counted(channels, 'channel')}, but the network was built for "
                f"{self.topology.in_channels}"
            )
        strides = self.topology.total_stride
        if any(voxels % step for voxels, step in zip(size, strides, strict=True)):
            raise VolumeError(
                f"an image of {'x'.join(map(str, size))} voxels does not divide by the network's "
                f"strides {'x'.join(map(str, strides))}; pad it first"
            )
        if tuple(size) == strides:
            raise VolumeError(
                f"an image of {'x'.join(map(str, size))} voxels is one voxel at the network's "
                "lowest level, which cannot be normalised; pad it first"
            )

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Map an image to logits.

        Args:
            image: (N, C, X, Y, Z); each axis a multiple of the topology's total stride.

        Returns:
            Logits (N, K, X, Y, Z); in training with deep supervision a tuple of logits,
            full resolution first.
        """
        self.check_shape(image)
        logits: tuple[Tensor, ...] = self.decoder(self.encoder(image))
        return logits if self.training and len(logits) > 1 else logits[0]


def refuse_beyond_memory(topology: Topology) -> None:
    """Refuse a network whose weights the host cannot hold, before any are made."""
    with torch.device("meta"):
        needed = sum(weight.nbytes for weight in UNet3d(topology).parameters())
    lacking = shortage(needed)
    if lacking is not None:
        channels = ", ".join(map(str, topology.channels))
        raise DoesNotFitError(
            f"a network with {channels} channels {lacking}; use fewer channels or levels"
        )


def _head_name(level: int) -> str:
    return "head" if level == 0 else f"head.{level}"


def _units_of(level: nn.Module) -> list[nn.Module]:
    """Return the units of a level in order; replicas of nn.DataParallel have them as children."""
    return list(level.children())
