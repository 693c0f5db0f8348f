"""Changes of the intensities of one channel, in place, each as in nnU-Net.

Whatever depends on the whole patch, such as its mean, is a sum or an extreme over its voxels, taken
on the device and never read by the host. Where several devices make parts of one patch, they merge
these numbers.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

CHUNK_VOXELS = 2**21
"""Voxels whose squares are in memory at a time."""

SMALL = 1e-7
"""Spans and deviations below this count as it, so that a constant channel stays finite."""

Merge = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Returns the sums, or the largest, of the numbers of all parts of a patch."""


class Statistics:
    """Numbers over all voxels of a patch."""

    def __init__(self, inner: Sequence[slice] | None, num_voxels: int, merge: Merge | None) -> None:
        """Say which voxels count.

        Args:
            inner: Part of a box that is this one's to count, because the rest is other parts' as
                well; None: all.
            num_voxels: Voxels of the whole patch.
            merge: Merges the numbers of the parts; None: the part is the whole patch.
        """
        self._inner = None if inner is None else tuple(inner)
        self._num_voxels = num_voxels
        self._merge = merge

    def mean(self, channel: Tensor) -> Tensor:
        """Return the mean, a tensor without axes.

        Args:
            channel: A box of the patch, (X, Y, Z).
        """
        return self._total(self._counted(channel).sum()) / self._num_voxels

    def deviation(self, channel: Tensor, mean: Tensor) -> Tensor:
        """Return the standard deviation, a tensor without axes.

        Args:
            channel: A box of the patch, (X, Y, Z).
            mean: Its mean.
        """
        inner = self._counted(channel)
        planes = max(1, CHUNK_VOXELS // inner[0].numel())
        squares = [
            (inner[first : first + planes] - mean).square_().sum()
            for first in range(0, len(inner), planes)
        ]
        # A patch of one voxel has no deviation; nnU-Net divides by one voxel less, too.
        return (self._total(sum(squares[1:], squares[0])) / max(1, self._num_voxels - 1)).sqrt()

    def extremes(self, channel: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest intensity, tensors without axes.

        Args:
            channel: A box of the patch, (X, Y, Z).
        """
        low, high = torch.aminmax(self._counted(channel))
        if self._merge is None:
            return low, high
        negative_low, high = self._merge(torch.stack((-low, high)), "max").unbind()
        return -negative_low, high

    def _counted(self, channel: Tensor) -> Tensor:
        return channel if self._inner is None else channel[self._inner]

    def _total(self, part: Tensor) -> Tensor:
        return part if self._merge is None else self._merge(part, "sum")


def change_contrast(channel: Tensor, factor: float, statistics: Statistics) -> None:
    """Move intensities away from their mean, or towards it; none leaves the range of before.

    Args:
        channel: float32 (X, Y, Z); changed.
        factor: Of the distance from the mean.
        statistics: Of the patch.
    """
    mean = statistics.mean(channel)
    low, high = statistics.extremes(channel)
    channel.sub_(mean).mul_(factor).add_(mean)
    torch.clamp(channel, low, high, out=channel)


def change_gamma(
    channel: Tensor, exponent: float, is_inverted: bool, statistics: Statistics
) -> None:
    """Bend intensities between their extremes by a power, and restore mean and deviation.

    Args:
        channel: float32 (X, Y, Z); changed.
        exponent: The power.
        is_inverted: Whether the inverted intensities are bent.
        statistics: Of the patch.
    """
    mean = statistics.mean(channel)
    deviation = statistics.deviation(channel, mean)
    low, high = statistics.extremes(channel)
    span = (high - low).clamp(min=SMALL)
    if is_inverted:
        torch.sub(high, channel, out=channel)
    else:
        channel.sub_(low)
    # Where parts are made of several boxes, voxels that count elsewhere may lie outside.
    channel.div_(span).clamp_(min=0).pow_(exponent)
    # Mean and deviation are restored, so that scale and offset of the curve make no difference.
    if is_inverted:
        channel.neg_()
    bent_mean = statistics.mean(channel)
    bent_deviation = statistics.deviation(channel, bent_mean).clamp(min=SMALL)
    channel.sub_(bent_mean).mul_(deviation / bent_deviation).add_(mean)
