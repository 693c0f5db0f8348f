"""Changes of the intensities of one channel, in place, each as in nnU-Net.

Whatever depends on the whole patch, such as its mean, is a sum or an extreme over its voxels, taken
on the device and never read by the host. Where several devices make slabs of one patch, they gather
these numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.images.image import Box

CHUNK_VOXELS = 2**21
"""Voxels whose squares are in memory at a time."""

SMALL = 1e-7
"""Spans and deviations below this count as it, so that a constant channel stays finite."""

Gather = Callable[[Tensor], Tensor]
"""Takes numbers (K) of a slab, and returns those of all slabs of the patch (slabs, K), in one order
everywhere. The holders of all slabs call it equally often, whatever they hold."""


class Levels(NamedTuple):
    """Numbers over all voxels of a channel of a patch, tensors without axes."""

    mean: Tensor
    deviation: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class Statistics:
    """Measures channels, of which boxes may be elsewhere."""

    inner: Box | None
    """What counts of a box; the rest is counted in other ones. None: all."""
    num_voxels: int
    """Of the whole patch."""
    gather: Gather | None
    """Gathers the numbers of all boxes; None: the box is the whole patch."""

    def levels(self, channel: Tensor) -> Levels:
        """Measure a channel of a box (X, Y, Z), which may have no voxels."""
        counted = channel if self.inner is None else channel[self.inner]
        if counted.numel() == 0:
            mean, squares = channel.new_zeros(2).unbind()
            low, high = mean + math.inf, mean - math.inf
        else:
            mean = counted.sum() / counted.numel()
            squares = _sum_of_squares(counted, mean)
            low, high = torch.aminmax(counted)
        if self.gather is not None:
            own = torch.stack((torch.full_like(mean, counted.numel()), mean, squares, low, high))
            counts, means, parts, lows, highs = self.gather(own.double()).unbind(1)
            # Merged as by Chan, Golub and LeVeque (The American Statistician 1983).
            total = (counts * means).sum() / self.num_voxels
            squares = (parts + counts * (means - total).square()).sum().float()
            mean, low, high = total.float(), lows.amin().float(), highs.amax().float()
        # A patch of one voxel has no deviation; nnU-Net divides by one voxel less, too.
        deviation = (squares / max(1, self.num_voxels - 1)).sqrt()
        return Levels(mean=mean, deviation=deviation, low=low, high=high)


def _sum_of_squares(channel: Tensor, mean: Tensor) -> Tensor:
    """Return the sum of squared distances from the mean."""
    planes = max(1, CHUNK_VOXELS // channel[0].numel())
    squares = [
        (channel[first : first + planes] - mean).square_().sum()
        for first in range(0, len(channel), planes)
    ]
    return sum(squares[1:], squares[0])


def change_contrast(channel: Tensor, factor: float, statistics: Statistics) -> None:
    """Multiply distances of intensities (X, Y, Z) from their mean; none leaves the range."""
    levels = statistics.levels(channel)
    channel.sub_(levels.mean).mul_(factor).add_(levels.mean)
    torch.clamp(channel, levels.low, levels.high, out=channel)


def change_gamma(
    channel: Tensor, exponent: float, is_inverted: bool, statistics: Statistics
) -> None:
    """Bend intensities (X, Y, Z), or inverted ones, between their extremes by a power.

    Mean and deviation are restored.
    """
    levels = statistics.levels(channel)
    span = (levels.high - levels.low).clamp(min=SMALL)
    if is_inverted:
        torch.sub(levels.high, channel, out=channel)
    else:
        channel.sub_(levels.low)
    # Where parts are made of several boxes, voxels that count elsewhere may lie outside.
    channel.div_(span).clamp_(min=0).pow_(exponent)
    # Mean and deviation are restored, so that scale and offset of the curve make no difference.
    if is_inverted:
        channel.neg_()
    bent = statistics.levels(channel)
    factor = levels.deviation / bent.deviation.clamp(min=SMALL)
    channel.sub_(bent.mean).mul_(factor).add_(levels.mean)
