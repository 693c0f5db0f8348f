"""The half of a U-Net that goes down."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from unet3d.model.blocks import Block, run_blocks
from unet3d.model.layers import ConvUnit, ResidualUnit
from unet3d.model.norms import Norm
from unet3d.model.topology import Topology

Kind = Callable[..., nn.Module]
"""Makes a unit."""


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
            kinds: list[Kind] = [partial(ConvUnit, feeds_convolution=True)] * num_units
            if topology.encoder == "residual":  # the first level needs a stem
                stem: list[Kind] = [ConvUnit] if level == 0 else []
                kinds = [*stem, *[ResidualUnit] * num_units]
            for kind in kinds:
                unit = kind(
                    in_channels=in_channels,
                    channels=channels,
                    stride=stride,
                    norm=norm_of(topology),
                    kernel=topology.kernel(level),
                )
                units.append(unit)
                stride, in_channels = (1, 1, 1), channels
            self.levels.append(nn.ModuleList(units))

    def blocks(self) -> tuple[Block, ...]:
        """Return one block for each unit, from level 0 down."""
        blocks: list[Block] = []
        source = "image"
        for level, units in enumerate(self.levels):
            for index, unit in enumerate(units_of(units)):
                name = f"encoder.{level}.{index}"
                blocks.append(
                    Block(name=name, module=unit, inputs=(source,), path="encoder", level=level)
                )
                source = blocks[-1].name
        return tuple(blocks)

    def outputs(self) -> tuple[str, ...]:
        """Return the name of each level's result, level 0 first."""
        return tuple(f"encoder.{i}.{len(units_of(u)) - 1}" for i, u in enumerate(self.levels))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map an image (N, C, X, Y, Z) to the features of each level, level 0 first."""
        features = run_blocks(self.blocks(), {"image": image}, self.outputs())
        return tuple(features[name] for name in self.outputs())


def norm_of(topology: Topology) -> Norm:
    """Return what follows the convolutions of a network.

    Args:
        topology: Of the network.
    """
    return Norm(kind=topology.norm, eps=topology.norm_eps, negative_slope=topology.negative_slope)


def units_of(level: nn.Module) -> list[nn.Module]:
    """Return the units of a level in order.

    Args:
        level: A list of them, as :class:`Encoder` and the decoder have.
    """
    return list(level.children())
