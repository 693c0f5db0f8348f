"""Augmentation of a batch: one function of tensors and drawn numbers, for any device.

There is no random state, and on a GPU nothing waits for the host nor the host for it. Rotation,
scaling, mirroring and the conversion from what is stored are one interpolation; what was not drawn
is not computed.

A slab of a batch is made alone, from what it depends on. Only contrast and gamma depend on the
whole patch: where the slabs' holders cannot gather its mean and range, such a patch is made whole.
"""

import math
from collections.abc import Iterable

from torch import Tensor

from unet3d.config import Shape
from unet3d.kernels.affine.api import sample_affine
from unet3d.patches.augment.cut import Cut, Slab, inside, shape_of, start_of
from unet3d.patches.augment.draw import DrawnChannel
from unet3d.patches.augment.filters import ChannelFilters, independent_of_threads
from unet3d.patches.augment.intensity import Gather, Statistics, change_contrast, change_gamma
from unet3d.patches.augment.noise import add_noise


def augment(
    cuts: Iterable[Cut],
    image: Tensor,
    target: Tensor,
    slab: Slab | None = None,
    gather: Gather | None = None,
) -> None:
    """Make the patches of a batch, or a slab of them, in given memory.

    That is float32 (N, C, X, Y, Z), contiguous, and class indices (N, X, Y, Z) of the type of the
    cuts' labels. A patch smaller than its place lies in the middle of it, with zeros around. The
    result for a patch does not depend on the others. Each cut, which is on the device of the batch,
    is asked for when it is needed and can be freed before the next. ``gather`` gathers statistics
    of the slabs of a patch; None: each patch that needs them is made whole.
    """
    slab = slab or Slab(planes=range(image.shape[2]), num_planes=image.shape[2])
    remaining = iter(cuts)
    for own_image, own_target in zip(image, target, strict=True):
        cut = next(remaining)
        place, shape, start = (
            slab.place(cut, own_target.shape),
            shape_of(cut.made),
            start_of(cut.made),
        )
        place_image, place_target = own_image[:, *place], own_target[place]
        # What is made is made in place, unless it is larger or lies between zeros.
        in_place = cut.made == cut.part and place_target.shape == own_target.shape
        made_image = place_image if in_place else image.new_empty((len(own_image), *shape))
        made_target = place_target if in_place else target.new_empty(shape)
        sample_affine(
            cut.image,
            cut.label,
            matrix=cut.placement.matrix,
            offset=cut.placement.offset,
            image_out=made_image,
            label_out=made_target,
            start=start,
        )
        inner = inside(cut.part, cut.made)
        channels, filters, size = cut.channels, cut.filters, cut.size
        del cut  # the memory of its box serves what follows
        if gather is not None or made_target.numel() > 0:
            statistics = Statistics(None if gather is None else inner, math.prod(size), gather)
            with independent_of_threads(image.device):
                for channel, drawn, own_filters in zip(made_image, channels, filters, strict=False):
                    _change(channel, drawn, own_filters, start, size, statistics)
        if not in_place:
            own_image.zero_()
            own_target.zero_()
            place_image.copy_(made_image[:, *inner])
            place_target.copy_(made_target[inner])


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
    if filters.blur.matrices:
        channel.copy_(filters.blur.applied(channel, start))
    if drawn.brightness != 1:
        channel.mul_(drawn.brightness)
    if drawn.contrast != 1:
        change_contrast(channel, drawn.contrast, statistics)
    if filters.coarsening.matrices:
        channel.copy_(filters.coarsening.applied(channel, start))
    if drawn.inverted_gamma != 1:
        change_gamma(channel, drawn.inverted_gamma, True, statistics)
    if drawn.gamma != 1:
        change_gamma(channel, drawn.gamma, False, statistics)
