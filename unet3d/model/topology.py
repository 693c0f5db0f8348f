"""The shape of the network: channels and strides of each level, from spacing and patch size."""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from unet3d.config import Channels, ModelSettings, Shape, Spacing
from unet3d.errors import ConfigError
from unet3d.plain_data import PLAIN, at_most

MAX_LEVELS = 6
MIN_VOXELS = 4
"""No axis is halved below this many voxels."""

Stride = Annotated[int, Field(ge=1, le=4, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Everything that fixes the parameters of a :class:`~unet3d.model.unet.UNet3d`."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    in_channels: Channels
    """Channels of the image."""
    num_classes: Annotated[int, Field(ge=1, le=2**16, strict=True)]
    """Channels of the logits, the background included."""
    channels: Annotated[tuple[Channels, ...], Field(min_length=1), at_most(8)]
    """Channels of each level; level 0 has the full resolution."""
    strides: Annotated[tuple[tuple[Stride, Stride, Stride], ...], at_most(8)]
    """Stride from the level above, per level and axis; level 0 has (1, 1, 1)."""
    encoder: Literal["plain", "residual"] = "plain"
    """Two plain convolutions a level, or residual units."""
    norm: Literal["instance", "group", "batch"] = "instance"
    """Normalisation after each convolution."""
    deep_supervision: Annotated[bool, Field(strict=True)] = False
    """Whether coarser levels have a head of their own in training."""

    @model_validator(mode="after")
    def _levels_agree(self) -> Self:
        """Refuse what a file says of levels that do not belong together."""
        if len(self.strides) != len(self.channels) or self.strides[0] != (1, 1, 1):
            raise ValueError(
                f"names channels of {len(self.channels)} levels but {len(self.strides)} strides, "
                f"of which the first must be (1, 1, 1)"
            )
        return self

    @property
    def num_levels(self) -> int:
        """Number of resolutions."""
        return len(self.channels)

    @property
    def total_stride(self) -> Shape:
        """Voxels of level 0 along each axis in one voxel of the lowest level."""
        x, y, z = (math.prod(stride[axis] for stride in self.strides) for axis in range(3))
        return x, y, z

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, for a checkpoint."""
        return asdict(self)


def plan_topology(
    settings: ModelSettings,
    size: Shape,
    spacing_mm: Spacing,
    in_channels: int,
    num_classes: int,
) -> Topology:
    """Choose channels and strides for patches of one size and spacing.

    An axis is not halved while its spacing is more than twice the finest of the axes that can
    still be halved, nor below 4 voxels; so a volume with thick slices is first halved within its
    slices, until its voxels are about cubes (the rule of nnU-Net, arXiv 1904.08128).

    Args:
        settings: Levels, channels and options.
        size: Voxels of a patch along X, Y, Z.
        spacing_mm: Distance of voxels along X, Y, Z.
        in_channels: Channels of the image.
        num_classes: Classes, the background included.

    Raises:
        ConfigError: More levels are asked for than the patch can be halved to, or it cannot be
            halved at all.
    """
    strides = _strides(size, spacing_mm)
    wanted = len(settings.channels) if settings.channels else settings.num_levels
    num_levels = min(max(len(strides), 2), MAX_LEVELS) if wanted == "auto" else wanted
    if num_levels > len(strides):
        raise ConfigError(
            f"the model has {num_levels} levels but a patch of {'x'.join(map(str, size))} voxels "
            f"gives {len(strides)}, because no axis is halved below {MIN_VOXELS} voxels; "
            "use fewer levels (at least 2) or a larger patch"
        )
    strides = strides[:num_levels]
    channels = settings.channels or tuple(
        min(settings.base_channels * 2**level, settings.max_channels) for level in range(num_levels)
    )
    return Topology(
        in_channels=in_channels,
        num_classes=num_classes,
        channels=channels,
        strides=strides,
        encoder=settings.encoder,
        norm=settings.norm,
        deep_supervision=settings.deep_supervision,
    )


def _strides(size: Shape, spacing_mm: Spacing) -> tuple[Shape, ...]:
    """Halve until no axis can be halved any more."""
    voxels, spacing = list(size), list(spacing_mm)
    strides: list[Shape] = [(1, 1, 1)]
    while True:
        halvable = [axis for axis in range(3) if math.ceil(voxels[axis] / 2) >= MIN_VOXELS]
        if not halvable:
            return tuple(strides)
        finest = min(spacing[axis] for axis in halvable)
        x, y, z = (
            2 if axis in halvable and spacing[axis] <= 2 * finest else 1 for axis in range(3)
        )
        strides.append((x, y, z))
        for axis, step in enumerate((x, y, z)):
            voxels[axis] = math.ceil(voxels[axis] / step)
            spacing[axis] *= step
