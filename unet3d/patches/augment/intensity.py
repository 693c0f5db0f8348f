"""Changes of the intensities of channels, in place, each as in nnU-Net.

Statistics of the whole patch, such as its mean, are sums or extremes over its voxels, computed on
the device and never read by the host. If several devices make slabs of one patch, they gather these
numbers.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.patches.augment.cut import Extent, inside

SMALL = 1e-7
"""Smallest range or deviation to divide by, so that a constant channel stays finite."""

Gather = Callable[[Tensor], Tensor]
"""Maps numbers (K) of one slab to the numbers of all slabs of the patch (slabs, K), in the same
order on all devices. All devices call it equally often, whatever their slabs."""


class Levels(NamedTuple):
    """Statistics over all voxels of each channel of patches, (R, 1)."""

    mean: Tensor
    variance: Tensor
    low: Tensor
    high: Tensor


class Part(NamedTuple):
    """A part of patches of one size; other devices may have the other parts."""

    extent: Extent
    gather: Gather | None = None
    """Gathers the numbers of all wanted parts; None: the whole patch is made here."""

    def levels(self, channels: Tensor, *, has_range: bool = True) -> Levels:
        """Return statistics of channels (R, X, Y, Z) of all parts; this part may have no voxels."""
        size, part, made = self.extent
        counted = (channels if self.gather is None else channels[:, *inside(part, made)]).flatten(1)
        # As in nnU-Net, the divisor is the number of voxels minus one, but never 0.
        number, divisor = counted.shape[1], max(1, counted.shape[1] - 1)
        if number == 0:
            mean = variance = counted.new_zeros(len(counted), 1)
            low, high = mean + math.inf, mean - math.inf
        else:
            if counted.is_cuda:  # one launch; slow on a CPU
                correction = number - divisor
                variance, mean = torch.var_mean(counted, 1, correction=correction, keepdim=True)
            else:
                mean = counted.mean(1, keepdim=True)
                variance = (counted - mean).square_().sum(1, keepdim=True) / divisor
            low, high = mean, mean
            if has_range:
                low, high = counted.amin(1, keepdim=True), counted.amax(1, keepdim=True)
        if self.gather is not None:
            counts = torch.full_like(mean, number)
            own = torch.stack((counts, mean, variance * divisor, low, high))
            gathered = self.gather(own.double().flatten()).view(-1, *own.shape)
            counts, means, parts, lows, highs = gathered.unbind(1)
            # Merged as by Chan, Golub and LeVeque (The American Statistician 1983).
            num_voxels = math.prod(size)
            total = (counts * means).sum(0) / num_voxels
            squares = (parts + counts * (means - total).square()).sum(0)
            variance = squares.float() / max(1, num_voxels - 1)
            mean, low, high = total.float(), lows.amin(0).float(), highs.amax(0).float()
        return Levels(mean, variance, low, high)


def change_contrast(channels: Tensor, part: Part, factors: Tensor) -> Tensor:
    """Multiply distances of intensities (R, X, Y, Z) from their mean, clipped to their range.

    Factors are (R, 1). The intensities are changed in place, so they must be contiguous.
    """
    levels, values = part.levels(channels), channels.flatten(1)
    values.sub_(levels.mean).mul_(factors).add_(levels.mean)
    torch.clamp(values, levels.low, levels.high, out=values)
    return channels


def change_gamma(channels: Tensor, part: Part, exponents: Tensor, signs: Tensor) -> Tensor:
    """Apply gamma curves to intensities (R, X, Y, Z) in place; sign -1 inverts them meanwhile.

    Exponents and signs are (R, 1). Mean and deviation are restored. The intensities are changed in
    place, so they must be contiguous.
    """
    levels, values = part.levels(channels), channels.flatten(1)
    span = (levels.high - levels.low).clamp_(min=SMALL)
    # abs: a voxel of the margin may lie beyond the range, which other devices measure for it.
    end = torch.where(signs > 0, levels.low, levels.high)
    values.sub_(end).div_(span).abs_().pow_(exponents)
    # Mean and deviation are restored, so scale and offset of the curve have no effect.
    bent = part.levels(channels, has_range=False)
    factors = (levels.variance / bent.variance.clamp_(min=SMALL**2)).sqrt_().mul_(signs)
    values.sub_(bent.mean).mul_(factors).add_(levels.mean)
    return channels
