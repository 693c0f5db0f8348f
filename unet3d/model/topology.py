"""The shape of the network: channels, strides and kernels of each level.

They follow from spacing and patch size.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from unet3d.config import Channels, ModelSettings, Shape, Spacing
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import PLAIN, at_most

Stride = Annotated[int, Field(ge=1, le=4, strict=True)]
"""Voxels of a level along one axis in one voxel of the next level."""
Strides = tuple[Stride, Stride, Stride]
Taps = Literal[1, 3]
"""Voxels of a kernel along one axis."""
Kernel = tuple[Taps, Taps, Taps]
"""Voxels of a kernel along X, Y, Z."""
Units = Annotated[int, Field(ge=1, le=64, strict=True)]

MAX_LEVELS = 6
MAX_CHANNELS = 320
"""Most channels of a level, unless the settings name the channels of each."""

MIN_VOXELS = 4
"""No axis is halved below this many voxels: an axis of 7 voxels stays, as in nnU-Net, and needs no
padding."""

ANISOTROPY_RATIO = 2.0
"""Along an axis whose spacing is at least this many times the finest one, an anisotropic kernel has
one voxel (nnU-Net's value)."""

_CUBE: Kernel = (3, 3, 3)

MOST_LEVELS = 16
"""Most levels of a network that a file describes."""

RESIDUAL_UNITS = (1, 3, 4, 6)
"""Units of the first levels of a residual encoder; deeper ones have as many as the last (as in
nnU-Net's, arXiv 2404.09556)."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Everything that determines the parameters of a :class:`~unet3d.model.unet.UNet3d`."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    in_channels: Channels
    """Channels of the image."""
    num_classes: Annotated[int, Field(ge=1, le=2**16, strict=True)]
    """Channels of the logits: classes including the background, or regions."""
    channels: Annotated[tuple[Channels, ...], at_most(MOST_LEVELS)]
    """Channels of each level; level 0 has the full resolution."""
    strides: Annotated[tuple[Strides, ...], at_most(MOST_LEVELS)]
    """Stride from the level above, per level and axis; level 0 has (1, 1, 1)."""
    kernels: Annotated[tuple[Kernel, ...], at_most(MOST_LEVELS)] = ()
    """Voxels of the kernels of each level along X, Y, Z, 1 or 3; empty: 3 x 3 x 3 at all levels, as
    in files of the first versions."""
    encoder: Literal["plain", "residual"] = "plain"
    """Plain convolutions, or residual units."""
    norm: Literal["instance", "group", "batch"] = "instance"
    """Normalisation after each convolution; all but ``batch`` normalise each sample alone."""
    deep_supervision: Annotated[bool, Field(strict=True)] = False
    """Whether coarser levels have a head of their own in training."""
    units: Annotated[tuple[Units, ...], at_most(MOST_LEVELS)] = ()
    """Number of convolutions or residual units on each level of the encoder, not counting the stem
    of a residual one; empty: 2 convolutions, or RESIDUAL_UNITS."""
    decoder_units: Annotated[tuple[Units, ...], at_most(MOST_LEVELS)] = ()
    """Number of convolutions on each level of the decoder, from level 0 to the last but one; empty:
    2 with a plain encoder, 1 with a residual one, as in nnU-Net."""
    upsampling_bias: Annotated[bool, Field(strict=True)] = False
    """Whether the transposed convolutions have a bias."""
    norm_eps: Annotated[float, Field(gt=0, le=1, strict=True)] = 1e-5
    """Epsilon that normalisations add to the variance."""
    negative_slope: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.01
    """Slope of each LeakyReLU below zero; as in nnU-Net."""

    @model_validator(mode="after")
    def _levels_agree(self) -> Self:
        """Refuse levels of a file that contradict each other."""
        if not 0 < len(self.channels) == len(self.strides) or self.strides[0] != (1, 1, 1):
            raise ValueError(
                f"names channels of {len(self.channels)} levels but {len(self.strides)} strides, "
                f"of which the first must be (1, 1, 1)"
            )
        num_levels = len(self.channels)
        for name, number in (
            ("kernels", num_levels),
            ("units", num_levels),
            ("decoder_units", num_levels - 1),
        ):
            found = len(getattr(self, name))
            if found not in (0, number):
                raise ValueError(
                    f"names channels of {num_levels} levels but {found} {name}, not {number}"
                )
        for kernel, stride in zip(self.kernels, self.strides, strict=False):
            if any(step > taps for taps, step in zip(kernel, stride, strict=True)):
                raise ValueError(f"has strides {stride} that skip voxels of kernels {kernel}")
        if self.upsampling_bias and self.norm != "instance":
            raise ValueError(
                f"has an upsampling_bias with norm {self.norm}; it needs norm instance"
            )
        return self

    def kernel(self, level: int) -> Kernel:
        """Return the voxels of the kernels of a level along X, Y, Z."""
        return self.kernels[level] if self.kernels else _CUBE

    def num_units(self, level: int) -> int:
        """Count the convolutions or residual units on a level of the encoder, without the stem."""
        if self.units:
            return self.units[level]
        return 2 if self.encoder == "plain" else RESIDUAL_UNITS[min(level, len(RESIDUAL_UNITS) - 1)]

    def num_decoder_units(self, level: int) -> int:
        """Return the number of convolutions on a decoder level; the lowest level has none."""
        if self.decoder_units:
            return self.decoder_units[level]
        return 2 if self.encoder == "plain" else 1

    @property
    def num_heads(self) -> int:
        """Number of levels that have a head, counted from level 0.

        nnU-Net gives none to the two lowest levels, because their logits are too coarse.
        """
        return max(self.num_levels - 2, 1) if self.deep_supervision else 1

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
    """Choose channels, strides and kernels for patches of one size and spacing.

    An axis is not halved below 4 voxels, nor while its spacing is more than twice the finest
    spacing of the axes that can still be halved. So a volume with thick slices is first halved
    within its slices, until its voxels are about cubes (the rule of nnU-Net, arXiv 1904.08128).
    Anisotropic kernels have one voxel along an axis until the axis is halved or its spacing is less
    than twice the finest; from there on, and at the lowest level, they have three.

    Args:
        settings: Levels, channels and options.
        size: Voxels of a patch along X, Y, Z.
        spacing_mm: Distance of voxels along X, Y, Z.
        in_channels: Channels of the image.
        num_classes: Logits of a voxel: classes including the background, or regions.

    Raises:
        ConfigError: The patch is too small for the number of levels, or the settings of levels
            contradict each other.
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
    kernels = _planned_kernels(settings, strides, spacing_mm)
    channels = settings.channels or tuple(
        min(settings.base_channels * 2**level, MAX_CHANNELS) for level in range(num_levels)
    )
    return Topology(
        in_channels=in_channels,
        num_classes=num_classes,
        channels=channels,
        strides=strides,
        kernels=kernels,
        encoder=settings.encoder,
        norm=settings.norm,
        deep_supervision=settings.deep_supervision,
    )


def topology_like(
    trained: Topology, size: Shape, in_channels: int, num_classes: int, deep_supervision: bool
) -> Topology:
    """Adapt a trained topology to other images, labels and losses; refuse too small patches."""
    total = trained.total_stride
    if all(voxels <= step for voxels, step in zip(size, total, strict=True)):
        raise ConfigError(
            f"the network of training.init reduces a patch of {'x'.join(map(str, size))} to one "
            f"voxel, because it divides by {'x'.join(map(str, total))}; use a larger patch"
        )
    return replace(
        trained,
        in_channels=in_channels,
        num_classes=num_classes,
        deep_supervision=deep_supervision,
    )


def stated_kernels(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Return kernels of levels as a topology states them: none where all are cubes."""
    return () if set(kernels) == {_CUBE} else kernels


def _planned_kernels(
    settings: ModelSettings, strides: tuple[Shape, ...], spacing_mm: Spacing
) -> tuple[Kernel, ...]:
    """Return the kernels of levels; none where all are cubes."""
    if settings.kernels == "isotropic":
        return ()
    # Without one kernel across slices, a network of few levels would see each slice alone.
    return stated_kernels((*_kernels(strides, spacing_mm)[:-1], _CUBE))


def _strides(size: Shape, spacing_mm: Spacing) -> tuple[Shape, ...]:
    """Halve until no axis can be halved any more."""
    voxels, spacing = list(size), list(spacing_mm)
    strides: list[Shape] = [(1, 1, 1)]
    while True:
        halvable = [axis for axis in range(3) if voxels[axis] >= 2 * MIN_VOXELS]
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


def _kernels(strides: tuple[Shape, ...], spacing_mm: Spacing) -> tuple[Kernel, ...]:
    """Return anisotropic kernels of levels."""
    spacing, is_wide = list(spacing_mm), [False] * 3
    kernels: list[Kernel] = []
    for stride in strides:
        for axis, step in enumerate(stride):
            spacing[axis] *= step
        for axis, step in enumerate(stride):
            is_wide[axis] |= step > 1 or spacing[axis] < ANISOTROPY_RATIO * min(spacing)
        taps: list[Taps] = [3 if wide else 1 for wide in is_wide]
        kernels.append((taps[0], taps[1], taps[2]))
    return tuple(kernels)
