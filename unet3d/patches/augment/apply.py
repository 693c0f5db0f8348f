"""Augmentation of a batch: one function of tensors and drawn numbers, for any device.

There is no random state, and on a GPU nothing waits for the host nor the host for it. Rotation,
scaling, mirroring, noise, brightness and the conversion from what is stored are one interpolation;
what was not drawn is not computed.

A slab of a batch is made alone, from what it depends on. Only contrast and gamma depend on the
whole patch: where the slabs' holders cannot gather its mean and range, such a patch is made whole.
"""

from collections.abc import Iterable

from torch import Tensor

from unet3d.kernels import Boxes, sample_affine
from unet3d.kernels.affine.noise import independent_of_threads
from unet3d.patches.augment.cut import Slab, inside, shape_of
from unet3d.patches.augment.intensity import Gather, Part
from unet3d.patches.augment.recipe import Recipe


def augment(
    given: Iterable[tuple[Boxes, Recipe]],
    image: Tensor,
    target: Tensor,
    slab: Slab | None = None,
    gather: Gather | None = None,
) -> None:
    """Make the patches of a batch, or a slab of them, in given memory.

    That is float32 (N, C, X, Y, Z), contiguous, and class indices (N, X, Y, Z) of the type of the
    boxes' labels. A patch smaller than its place lies in the middle of it, with zeros around. The
    boxes, which are on the device of the batch, are asked for when they are needed and can be freed
    before the next. ``gather`` gathers statistics of the slabs of a patch; None: each patch that
    needs them is made whole.
    """
    slab = slab or Slab(planes=range(image.shape[2]), num_planes=image.shape[2])
    remaining, first = iter(given), 0
    while first < len(image):
        boxes, recipe = next(remaining)
        of_batch = slice(first, first := first + len(boxes.table))
        own_image, own_target = image[of_batch], target[of_batch]
        _, part, made = recipe.extent
        place = slab.place(recipe.extent, own_target.shape[1:])
        place_image, place_target = own_image[:, :, *place], own_target[:, *place]
        # What is made is made in place, unless it is larger or lies between zeros.
        in_place = made == part and place_target.shape == own_target.shape
        shape = shape_of(made)
        made_image = own_image if in_place else image.new_empty((*own_image.shape[:2], *shape))
        made_target = own_target if in_place else target.new_empty((len(own_target), *shape))
        sample_affine(boxes, image_out=made_image, label_out=made_target)
        del boxes  # its memory serves what follows
        if gather is not None or made_target.numel() > 0:
            with independent_of_threads(image.device):
                for change in recipe.changes:
                    change.apply(made_image.flatten(0, 1), Part(recipe.extent, gather))
        if not in_place:
            own_image.zero_()
            own_target.zero_()
            inner = inside(part, made)
            place_image.copy_(made_image[:, :, *inner])
            place_target.copy_(made_target[:, *inner])
