"""The modules that a U-Net is made of.

If maps are slabs of a volume (:mod:`unet3d.kernels.sharding`), inputs and results of units have a
halo. Maps within a unit, added maps and inputs of heads have none.
"""

from torch import Tensor, nn

from unet3d.config import Shape
from unet3d.kernels import (
    CHANNELS_BY_HAND,
    add_border,
    average_pool,
    conv1x1x1,
    conv3x3x3,
    conv3x3x3_instance_norm,
    convolve,
    flat_conv,
    instance_norm_head,
    own_planes,
    strided_conv3x3x3,
    sum_with_conv3x3x3,
    upsample_with_halo,
    upsampled_conv3x3x3,
    with_halo,
)
from unet3d.model.norms import InstanceNorm, make_norm
from unet3d.model.topology import Topology
from unet3d.torch_private import has_hooks

_CUBE: Shape = (3, 3, 3)
"""The kernel that sees all neighbours of a voxel."""


class Convolution(nn.Conv3d):
    """Convolution with zero padding, with a kernel of 1 or 3 voxels along each axis.

    It has no bias, because the normalisation that follows removes the mean.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: Shape = (1, 1, 1), kernel: Shape = _CUBE
    ) -> None:
        """Initialise as PyTorch does; the stride is 1 along axes where the kernel has one voxel."""
        i, j, k = (taps // 2 for taps in kernel)
        super().__init__(in_channels, channels, kernel, stride, (i, j, k), bias=False)

    @property
    def is_cube(self) -> bool:
        """Whether the kernel is 3x3x3, for which there are faster convolutions."""
        return self.kernel_size == _CUBE

    @property
    def is_plain(self) -> bool:
        """Whether the kernel is 3x3x3 and the stride 1."""
        return self.is_cube and self.stride == (1, 1, 1)

    @property
    def outputs_of_reader(self) -> int | None:
        """Argument of :func:`instance_norm` if only this convolution reads the normalised map."""
        # Hooks would get a map that is not normalised.
        return self.out_channels if self.is_plain and not has_hooks(self) else None

    @property
    def adds_in_passing(self) -> bool:
        """Whether kernels add its result to another map (:func:`sum_with_conv3x3x3`)."""
        return self.is_plain and {self.in_channels, self.out_channels} <= set(CHANNELS_BY_HAND)

    def forward(self, x: Tensor, moments: bool = False) -> Tensor:
        """Map (N, C, X, Y, Z) to (N, channels, X', Y', Z').

        ``moments``: a normalisation reads the result, which gets its moments if they cost nothing.
        """
        if not self.is_cube:
            return flat_conv(x, self.weight, self.stride)
        if self.is_plain:
            return conv3x3x3(x, self.weight, moments=moments)
        return strided_conv3x3x3(x, self.weight, self.stride)


class Projection(nn.Conv3d):
    """1x1x1 convolution from features to features."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(in_channels, channels, kernel_size=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) to (N, channels, X, Y, Z)."""
        return convolve(x, self.weight, (1, 1, 1), (0, 0, 0))


class ConvUnit(nn.Module):
    """Convolution, normalisation, LeakyReLU."""

    def __init__(
        self,
        topology: Topology,
        level: int,
        in_channels: int,
        stride: Shape = (1, 1, 1),
        *,
        feeds_convolution: bool = False,
    ) -> None:
        """Build the layers; ``feeds_convolution``: a convolution on this level reads the result."""
        super().__init__()
        channels = topology.channels[level]
        self.conv = Convolution(in_channels, channels, stride, topology.kernel(level))
        self.norm = make_norm(topology, channels, True, feeds_convolution and self.conv.is_cube)

    def convolved(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the map to normalise, and None: no map is added to it first."""
        return self.conv(x, moments=isinstance(self.norm, InstanceNorm)), None

    def forward(self, x: Tensor, outputs_of_reader: int | None = None) -> Tensor:
        """Map (N, C, X, Y, Z) to (N, channels, X', Y', Z').

        For ``outputs_of_reader`` see :func:`unet3d.kernels.instance_norm`.
        """
        norm = self.norm
        if has_hooks(self):  # they read the result too
            outputs_of_reader = None
        if isinstance(norm, InstanceNorm) and self.conv.is_plain:
            return conv3x3x3_instance_norm(
                x,
                self.conv.weight,
                norm.weight,
                norm.bias,
                norm.eps,
                norm.negative_slope,
                pads_output=norm.feeds_convolution,
                has_halo=norm.activated,
                outputs_of_reader=outputs_of_reader,
            )
        out: Tensor = norm(*self.convolved(x), outputs_of_reader)
        return out


class AveragePool(nn.Module):
    """Average of the voxels of each block."""

    def __init__(self, stride: Shape) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) to (N, C, X', Y', Z')."""
        return average_pool(x, self.stride)


class ResidualUnit(nn.Module):
    """Two convolutions whose result is added to the input (He et al., arXiv 1512.03385)."""

    def __init__(
        self, topology: Topology, level: int, in_channels: int, stride: Shape = (1, 1, 1)
    ) -> None:
        """Build the layers."""
        super().__init__()
        channels = topology.channels[level]
        self.first = ConvUnit(topology, level, in_channels, stride, feeds_convolution=True)
        self.conv = Convolution(channels, channels, kernel=topology.kernel(level))
        self.norm = make_norm(topology, channels, activated=False)
        self.activation = nn.LeakyReLU(topology.negative_slope, inplace=True)
        # As in ResNet-D (arXiv 1812.01187), averaging comes first, so that no voxel is skipped.
        pool = AveragePool(stride) if max(stride) > 1 else nn.Identity()
        project: nn.Module = nn.Identity()
        if in_channels != channels:
            norm = make_norm(topology, channels, activated=False)
            project = nn.Sequential(Projection(in_channels, channels), norm)
        self.shortcut = nn.Sequential(pool, project)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) to (N, channels, X', Y', Z')."""
        conv, moments = self.conv, isinstance(self.norm, InstanceNorm)
        features = self.norm(conv(self.first(x, conv.outputs_of_reader), moments=moments))
        return with_halo(self.activation(features + self.shortcut(own_planes(x))))


class Upsample(nn.ConvTranspose3d):
    """Transposed convolution whose kernel is its stride: each voxel becomes a small block.

    It needs no bias: the normalisation after the next convolution would remove it, except at the
    edge of the volume. Networks that were trained elsewhere may have one. :class:`UpsampledUnit`
    joins it with the next convolution.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: Shape, *, has_bias: bool = False
    ) -> None:
        super().__init__(in_channels, channels, kernel_size=stride, stride=stride, bias=has_bias)


class UpsampledUnit(nn.Module):
    """A unit that reads upsampled features, together with the upsampling."""

    def __init__(self, up: Upsample, unit: ConvUnit) -> None:
        """Join two modules; the stride of the unit is 1."""
        super().__init__()
        self.up = up
        self.unit = unit

    @property
    def norm(self) -> nn.Module:
        """The unit's normalisation."""
        return self.unit.norm

    def convolved(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the map to normalise, and the map to add to it first."""
        return self.upsampled(x), added

    def upsampled(self, x: Tensor) -> Tensor:
        """Return the convolution of the upsampled features."""
        conv, stride = self.unit.conv, self.up.stride
        if conv.is_cube:
            return self.with_bias(upsampled_conv3x3x3(x, self.up.weight, conv.weight, stride))
        return self.with_bias(conv(upsample_with_halo(x, self.up.weight, stride)))

    def with_bias(self, convolved: Tensor) -> Tensor:
        """Add the effect of the upsampling's bias to a convolution, in place, and return it."""
        bias = self.up.bias
        # The normalisation removes the effect of the bias except at the border.
        return convolved if bias is None else add_border(convolved, self.unit.conv.weight, bias)

    def forward(self, x: Tensor, added: Tensor, outputs_of_reader: int | None = None) -> Tensor:
        """Map features of the level below (N, C, X, Y, Z) to (N, channels, X', Y', Z').

        ``added``, the convolved skip, has the result's shape and is added before normalisation. For
        ``outputs_of_reader`` see :func:`unet3d.kernels.instance_norm`.
        """
        out: Tensor = self.unit.norm(*self.convolved(x, added), outputs_of_reader)
        return out


class SkippedUnit(UpsampledUnit):
    """An upsampled unit fused with the convolution of its skip: one kernel convolves and adds."""

    def __init__(self, unit: UpsampledUnit, skip: Convolution) -> None:
        """Join a unit and a convolution with a 3x3x3 kernel and stride 1."""
        super().__init__(unit.up, unit.unit)
        self.joined = unit
        self.skip = skip

    def upsampled(self, x: Tensor) -> Tensor:
        """Return the joined unit's convolution of the upsampled features."""
        return self.joined.upsampled(x)

    def convolved(self, x: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the map to normalise, and the map to add to it first, if not yet added."""
        if has_hooks(self.skip):
            return self.upsampled(x), self.skip(features)
        return sum_with_conv3x3x3(self.upsampled(x), features, self.skip.weight)


class Head(nn.Conv3d):
    """1x1x1 convolution from features to logits."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) to (N, num_classes, X, Y, Z)."""
        assert self.bias is not None  # the default of nn.Conv3d
        return conv1x1x1(own_planes(x), self.weight, self.bias)


class HeadUnit(nn.Module):
    """The last unit and its head: nothing else reads the unit's features."""

    def __init__(self, unit: ConvUnit | UpsampledUnit, head: Head) -> None:
        """Join two modules."""
        super().__init__()
        self.unit = unit
        self.head = head

    def forward(self, *inputs: Tensor) -> Tensor:
        """Map the unit's inputs to logits (N, num_classes, X, Y, Z)."""
        norm, head = self.unit.norm, self.head
        if not isinstance(norm, InstanceNorm):
            out: Tensor = head(self.unit(*inputs))
            return out
        x, added = self.unit.convolved(*inputs)
        assert head.bias is not None  # each head has one
        return instance_norm_head(
            x,
            norm.weight,
            norm.bias,
            norm.eps,
            norm.negative_slope,
            added=added,
            head_weight=head.weight,
            head_bias=head.bias,
        )
