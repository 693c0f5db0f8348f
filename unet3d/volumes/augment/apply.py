"""Augmentation of a batch: one function of tensors and drawn numbers, for any device.

There is no random state, and on a GPU nothing waits for the host nor the host for it. Rotation,
scaling, mirroring and the conversion from what is stored are one interpolation; what was not drawn
is not computed.
"""

import math
from collections.abc import Iterable

from torch import Tensor

from unet3d.config import Shape
from unet3d.kernels.affine.api import sample_affine
from unet3d.volumes.augment.cut import Cut, Region, with_margin
from unet3d.volumes.augment.draw import DrawnChannel
from unet3d.volumes.augment.filters import ChannelFilters
from unet3d.volumes.augment.intensity import (
    Merge,
    Statistics,
    change_contrast,
    change_gamma,
)
from unet3d.volumes.augment.noise import add_noise
from unet3d.volumes.augment.threads import independent_of_threads


def augment(
    cuts: Iterable[Cut],
    image: Tensor,
    target: Tensor,
    region: Region | None = None,
    merge: Merge | None = None,
) -> None:
    """Make the patches of a batch, or one region of each of them.

    A patch smaller than its place lies in the middle of it, with zeros around. The result for a
    patch does not depend on the others.

    Args:
        cuts: A cut for each patch, on the device of the batch. Each is asked for when it is needed
            and can be freed before the next.
        image: float32 (N, C, X, Y, Z), contiguous; overwritten.
        target: Class indices (N, X, Y, Z) of the type of the cuts' labels; overwritten.
        region: The voxels to make, of patches of one size; None: all.
        merge: Merges statistics of a region with those of the patch's others; None: it has none.
    """
    remaining = iter(cuts)
    for own_image, own_target in zip(image, target, strict=True):
        cut = next(remaining)
        part = region or Region(start=(0, 0, 0), stop=cut.size)
        box = with_margin(part, cut.filters, cut.size)
        place_image, place_target = _middle(own_image, part.shape), _middle(own_target, part.shape)
        # What is made is made in place, unless it is larger or lies between zeros.
        in_place = box == part and place_target.shape == own_target.shape
        made_image = place_image if in_place else image.new_empty((len(own_image), *box.shape))
        made_target = place_target if in_place else target.new_empty(box.shape)
        _sample(cut, made_image, made_target, box)
        size, channels, filters = cut.size, cut.channels, cut.filters
        del cut  # the memory of its box serves what follows
        counted = None if box == part else _inside(box, part)
        statistics = Statistics(counted, math.prod(size), merge)
        with independent_of_threads(image.device):
            for channel, drawn, own_filters in zip(made_image, channels, filters, strict=False):
                _change(channel, drawn, own_filters, box.start, size, statistics)
        if not in_place:
            inner = _inside(box, part)
            own_image.zero_()
            own_target.zero_()
            place_image.copy_(made_image[:, *inner])
            place_target.copy_(made_target[inner])


def _middle(whole: Tensor, shape: Shape) -> Tensor:
    """Return the middle of (..., X, Y, Z), of a smaller shape."""
    x, y, z = (
        slice((available - voxels) // 2, (available - voxels) // 2 + voxels)
        for available, voxels in zip(whole.shape[-3:], shape, strict=True)
    )
    return whole[..., x, y, z]


def _sample(cut: Cut, image: Tensor, target: Tensor, region: Region) -> None:
    placement = cut.placement.at(region.start)
    sample_affine(
        cut.image,
        cut.label,
        matrix=placement.matrix,
        offset=placement.offset,
        image_out=image,
        label_out=target,
    )


def _change(
    channel: Tensor,
    drawn: DrawnChannel,
    filters: ChannelFilters,
    start: Shape,
    size: Shape,
    statistics: Statistics,
) -> None:
    """Change the intensities of a box (X, Y, Z) of a patch as was drawn."""
    if drawn.noise_std > 0:
        add_noise(channel, drawn.noise_std, start, size, drawn.noise_seed)
    if filters.blur is not None:
        channel.copy_(filters.blur.applied(channel, start))
    if drawn.brightness != 1:
        channel.mul_(drawn.brightness)
    if drawn.contrast != 1:
        change_contrast(channel, drawn.contrast, statistics)
    if filters.coarsening is not None:
        channel.copy_(filters.coarsening.applied(channel, start))
    if drawn.inverted_gamma != 1:
        change_gamma(channel, drawn.inverted_gamma, True, statistics)
    if drawn.gamma != 1:
        change_gamma(channel, drawn.gamma, False, statistics)


def _inside(outer: Region, inner: Region) -> tuple[slice, slice, slice]:
    """Return where a region lies in a larger one."""
    x, y, z = (
        slice(first - outer_first, last - outer_first)
        for first, last, outer_first in zip(inner.start, inner.stop, outer.start, strict=True)
    )
    return (x, y, z)
