"""Normalisations of whole volumes or slabs, each with the LeakyReLU that follows it."""

import torch
from torch import Tensor, nn

from unet3d.kernels import instance_norm, sum_of, with_halo
from unet3d.kernels.sharding import current_shard, sum_over_shards
from unet3d.model.topology import Topology
from unet3d.torch_private import has_hooks


class InstanceNorm(nn.Module):
    """Instance normalisation, with the LeakyReLU that follows it, as one operation."""

    def __init__(
        self, topology: Topology, channels: int, activated: bool, feeds_convolution: bool
    ) -> None:
        """Start with scale 1 and shift 0; see :func:`make_norm` for the arguments."""
        super().__init__()
        self.activated = activated
        self.feeds_convolution = feeds_convolution
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = topology.norm_eps
        self.negative_slope = topology.negative_slope if activated else 1.0

    def forward(
        self, x: Tensor, added: Tensor | None = None, outputs_of_reader: int | None = None
    ) -> Tensor:
        """Map features (N, C, X, Y, Z) to the same shape; ``added`` is first added to x in place.

        For ``outputs_of_reader`` see :func:`unet3d.kernels.instance_norm`.
        """
        return instance_norm(
            x,
            self.weight,
            self.bias,
            self.eps,
            self.negative_slope,
            added=added,
            pads_output=self.feeds_convolution,
            has_halo=self.activated,
            outputs_of_reader=None if has_hooks(self) else outputs_of_reader,  # they read it too
        )


class GroupNorm(nn.GroupNorm):
    """Group normalisation, also of slabs."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, X, Y, Z) to the same shape."""
        shard = current_shard()
        if shard is None:
            return super().forward(x)
        exact = torch.promote_types(x.dtype, torch.float32)
        groups = x.to(exact, memory_format=torch.contiguous_format)
        groups = groups.view(len(x), self.num_groups, -1)
        number = shard.of_volume(groups.shape[2])
        mean = sum_over_shards(groups.sum(2, keepdim=True), shard) / number
        away = groups - mean
        variance = sum_over_shards(away.square().sum(2, keepdim=True), shard) / number
        normal = (away * (variance + self.eps).rsqrt()).view(x.shape)
        weight, bias = (value.view(-1, 1, 1, 1).to(exact) for value in (self.weight, self.bias))
        return (normal * weight + bias).to(memory_format=torch.channels_last_3d)


class OtherNorm(nn.Sequential):
    """Group or batch normalisation, followed by LeakyReLU if ``activated``."""

    def __init__(self, norm: nn.Module, negative_slope: float, activated: bool) -> None:
        """Append LeakyReLU to a normalisation if ``activated``."""
        follows = [nn.LeakyReLU(negative_slope, inplace=True)] if activated else []
        super().__init__(norm, *follows)
        self.activated = activated

    def forward(
        self, x: Tensor, added: Tensor | None = None, outputs_of_reader: int | None = None
    ) -> Tensor:
        """Map (N, C, X, Y, Z) to the same shape; for the arguments see :class:`InstanceNorm`."""
        out: Tensor = super().forward(x if added is None else sum_of(x, added))  # type: ignore[no-untyped-call]
        return with_halo(out) if self.activated else out


def make_norm(
    topology: Topology, channels: int, activated: bool, feeds_convolution: bool = False
) -> OtherNorm | InstanceNorm:
    """Return the normalisation that follows a convolution.

    ``activated``: LeakyReLU follows and ends the unit; ``feeds_convolution``: a 3x3x3 convolution
    reads the result.
    """
    if topology.norm == "instance":
        return InstanceNorm(topology, channels, activated, feeds_convolution)
    if topology.norm == "group":
        num_groups = next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
        made: nn.Module = GroupNorm(num_groups, channels, eps=topology.norm_eps)
    else:
        made = nn.BatchNorm3d(channels, eps=topology.norm_eps)
    return OtherNorm(made, topology.negative_slope, activated)
