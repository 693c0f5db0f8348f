"""Augmentation of a batch: one function of tensors and drawn numbers, for any device.

There is no random state, and GPU and host do not wait for each other. Rotation, scaling, mirroring,
noise, brightness and the conversion from the stored type are one interpolation. Changes that were
not drawn are not computed.

A slab of a batch is made separately, from the voxels that it depends on. Only contrast and gamma
depend on the whole patch: if the devices cannot gather its statistics, the patch is made whole.

A small patch takes a GPU less time than a launch takes the host. So each operation is launched once
for all patches of a batch; tensors with the drawn numbers are copied beforehand. On a CPU each
patch is made alone, because the number of rows of a sum or a product may change trailing bits.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.kernels import Boxes, sample_affine
from unet3d.kernels.affine.noise import independent_of_threads
from unet3d.patches.augment.cut import Cut, Extent, Slab, inside, shape_of, start_of
from unet3d.patches.augment.draw import STILL, DrawnChannel
from unet3d.patches.augment.filters import blur_matrices, coarsening_matrices, filtered
from unet3d.patches.augment.intensity import Gather, Part, change_contrast, change_gamma

T = TypeVar("T")

TOGETHER_VOXELS = 2**20
"""Voxels of patches, or of channels, that are changed at a time; larger ones are changed singly."""


class Change(NamedTuple):
    """One change of some channels."""

    function: Callable[..., Tensor]
    """Takes the channels (R, X, Y, Z), their part and the numbers; may change them in place."""
    rows: slice | Tensor
    """Indices of the channels, among the channels of all patches (N * C)."""
    numbers: tuple[Any, ...]

    def apply(self, channels: Tensor, part: Part) -> None:
        """Change the channels at :attr:`rows`; ``channels`` are all channels (N * C, X, Y, Z)."""
        if isinstance(self.rows, Tensor):
            own = channels.index_select(0, self.rows)
            channels.index_copy_(0, self.rows, self.function(own, part, *self.numbers))
            return
        own = channels[self.rows]
        changed = self.function(own, part, *self.numbers)
        if changed is not own:
            own.copy_(changed)


class Recipe(NamedTuple):
    """The changes of sampled patches of one size."""

    extent: Extent
    changes: tuple[Change, ...]
    """The changes, in order."""


def together(cuts: Iterable[Cut], *, stacks: bool) -> Iterator[tuple[Boxes, Recipe]]:
    """Yield the boxes of patches of a batch and their changes, in order.

    Patches are only made together if ``stacks``. If other devices make slabs of them, each patch is
    made alone: the groups would differ between devices, and with them the gathered numbers.
    """
    for extent, same in groupby(cuts, lambda cut: cut.extent):
        own = list(same)
        most = number_together(extent.size) if stacks else 1
        for first in range(0, len(own), most):
            yield _recipe(own[first : first + most], extent)


def number_together(size: Shape) -> int:
    """Return how many patches of this size, or how many of their channels, change at a time."""
    return max(1, TOGETHER_VOXELS // math.prod(size))


def _recipe(cuts: Sequence[Cut], extent: Extent) -> tuple[Boxes, Recipe]:
    drawn = [cut.channels or (DrawnChannel(),) * len(cut.image) for cut in cuts]
    boxes = Boxes.of(
        [cut.image for cut in cuts],
        [cut.label for cut in cuts],
        [cut.placement for cut in cuts],
        [[channel.sampled for channel in channels] for channels in drawn],
        start_of(extent.made),
        extent.size,
    )
    changes = _changes(list(chain.from_iterable(drawn)), extent.size)
    return boxes, Recipe(extent, tuple(changes))


def _changes(drawn: Sequence[DrawnChannel], size: Shape) -> Iterator[Change]:
    """Yield the changes of channels, in the order in which they are applied."""
    for rows, sigmas in _chosen([one.blur_sigma for one in drawn], None, size):
        yield Change(filtered, rows, (blur_matrices(sigmas, size),))
    for rows, factors in _chosen([one.contrast for one in drawn], 1.0, size):
        yield Change(change_contrast, rows, (_column(factors),))
    for rows, coarse in _chosen([one.resolution for one in drawn], STILL, size):
        yield Change(filtered, rows, (coarsening_matrices(coarse, size),))
    # The inverted curve comes first, but most channels have only one of the two.
    curves = [
        [curve for curve in ((one.inverted_gamma, -1.0), (one.gamma, 1.0)) if curve[0] != 1]
        for one in drawn
    ]
    for turn in range(2):
        own = [both[turn] if turn < len(both) else None for both in curves]
        for rows, chosen in _chosen(own, None, size):
            exponents, signs = zip(*chosen, strict=True)
            yield Change(change_gamma, rows, (_column(exponents), _column(signs)))


def _chosen(
    values: Sequence[T | None], nothing: T | None, size: Shape
) -> Iterator[tuple[slice | Tensor, list[T]]]:
    """Yield the rows that have a value, and their values, in groups that are changed together."""
    rows = [row for row, value in enumerate(values) if value != nothing]
    most = number_together(size)
    for begin in range(0, len(rows), most):
        own = rows[begin : begin + most]
        first, end = own[0], own[-1] + 1
        chosen = [value for value in (values[row] for row in own) if value is not None]
        yield slice(first, end) if end - first == len(own) else torch.tensor(own), chosen


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values)[:, None]


def augment(
    given: Iterable[tuple[Boxes, Recipe]],
    image: Tensor,
    target: Tensor,
    slab: Slab | None = None,
    gather: Gather | None = None,
) -> None:
    """Make the patches of a batch, or a slab of them, in given memory.

    The memory is float32 (N, C, X, Y, Z), contiguous, and class indices (N, X, Y, Z) of the type of
    the boxes' labels. A patch smaller than its place is centred in it, with zeros around. The
    iterator over the boxes, which are on the device of the batch, advances only after a group is
    made, so that the group's boxes can be freed. ``gather`` gathers statistics of the slabs of a
    patch; None: each patch that needs them is made whole.
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
        # Patches are made in place, unless more voxels are made or zeros lie around them.
        in_place = made == part and place_target.shape == own_target.shape
        shape = shape_of(made)
        made_image = own_image if in_place else image.new_empty((*own_image.shape[:2], *shape))
        made_target = own_target if in_place else target.new_empty((len(own_target), *shape))
        sample_affine(boxes, image_out=made_image, label_out=made_target)
        del boxes  # later work reuses the memory
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
