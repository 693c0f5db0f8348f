"""Patches that are made together: what is done to which of their channels, as few tensors.

A small patch takes a GPU less time than a launch takes the host. So each operation is launched once
for all patches of a batch, with what was drawn for each in tensors that are copied beforehand. On a
CPU each patch is made alone: how many rows a sum or a product has may change its bits.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.images.image import Box
from unet3d.kernels import Boxes, Intensity, Sample
from unet3d.patches.augment.cut import Cut, start_of
from unet3d.patches.augment.draw import STILL, DrawnChannel
from unet3d.patches.augment.filters import (
    blur_matrices,
    blur_reach,
    coarsening_matrices,
    coarsening_reach,
    filtered,
)
from unet3d.patches.augment.intensity import Part, change_contrast, change_gamma

T = TypeVar("T")

TOGETHER_VOXELS = 2**20
"""Voxels of the patches, or of channels, that are changed at a time; of larger ones it is one."""


class Change(NamedTuple):
    """What is done to some channels."""

    function: Callable[..., Tensor]
    """Takes the channels (R, X, Y, Z), their part and the numbers; may change them in place."""
    rows: slice | Tensor
    """Of the channels of all patches (N * C)."""
    numbers: tuple[Any, ...]

    def apply(self, channels: Tensor, part: Part) -> None:
        """Change the rows of all channels (N * C, X, Y, Z)."""
        if isinstance(self.rows, Tensor):
            own = channels.index_select(0, self.rows)
            channels.index_copy_(0, self.rows, self.function(own, part, *self.numbers))
            return
        own = channels[self.rows]
        changed = self.function(own, part, *self.numbers)
        if changed is not own:
            own.copy_(changed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """What is made of sampled patches, which all have one size."""

    number: int
    """Of the patches."""
    changes: tuple[Change, ...]
    """In their order."""
    size: Shape
    """Voxels of a whole patch along X, Y, Z."""
    part: Box
    """The voxels of a patch that are wanted."""
    made: Box
    """The voxels that are made for that."""


def together(cuts: Iterable[Cut], *, stacks: bool) -> Iterator[tuple[Boxes, Recipe]]:
    """Yield what patches of a batch are sampled from, and what is made of them, in their order.

    Patches are only made together if ``stacks``. Where slabs of them are elsewhere they are not:
    who makes which together differs, and the numbers that are gathered would.
    """
    for (size, _, _), same in groupby(cuts, lambda cut: (cut.size, cut.part, cut.made)):
        own = list(same)
        most = number_together(size) if stacks else 1
        for first in range(0, len(own), most):
            yield _recipe(own[first : first + most])


def number_together(size: Shape) -> int:
    """Return how many patches of a size, or channels of such patches, are changed at a time."""
    return max(1, TOGETHER_VOXELS // math.prod(size))


def _recipe(cuts: Sequence[Cut]) -> tuple[Boxes, Recipe]:
    first, size = cuts[0], cuts[0].size
    drawn = [cut.channels or (DrawnChannel(),) * len(cut.image) for cut in cuts]
    samples = tuple(
        Sample(
            (cut.label.shape[0], cut.label.shape[1], cut.label.shape[2]),
            cut.placement.matrix,
            cut.placement.offset,
            # A factor commutes with blur, which comes between the two.
            tuple(Intensity(one.noise_std, one.noise_seed, one.brightness) for one in channels),
        )
        for cut, channels in zip(cuts, drawn, strict=True)
    )
    images, labels = [cut.image for cut in cuts], [cut.label for cut in cuts]
    boxes = Boxes.of(images, labels, samples, start_of(first.made), size)
    changes = tuple(_changes([one for channels in drawn for one in channels], size))
    recipe = Recipe(number=len(cuts), changes=changes, size=size, part=first.part, made=first.made)
    return boxes, recipe


def _changes(drawn: Sequence[DrawnChannel], size: Shape) -> Iterator[Change]:
    """Yield what is done to channels."""
    for rows, sigmas in _chosen([one.blur_sigma for one in drawn], size):
        reach = _farthest(blur_reach(sigma) for sigma in sigmas)
        yield Change(filtered, rows, (blur_matrices(sigmas, size), reach))
    for rows, factors in _chosen([_unless(one.contrast, 1) for one in drawn], size):
        yield Change(change_contrast, rows, (_column(factors),))
    for rows, coarse in _chosen([_unless(one.resolution, STILL) for one in drawn], size):
        reach = _farthest(coarsening_reach(resolution, size) for resolution in coarse)
        yield Change(filtered, rows, (coarsening_matrices(coarse, size), reach))
    # Inverted before the other, but most channels have only one of the two.
    curves = [
        [curve for curve in ((one.inverted_gamma, -1.0), (one.gamma, 1.0)) if curve[0] != 1]
        for one in drawn
    ]
    for turn in range(2):
        own = [both[turn] if turn < len(both) else None for both in curves]
        for rows, chosen in _chosen(own, size):
            exponents, signs = zip(*chosen, strict=True)
            yield Change(change_gamma, rows, (_column(exponents), _column(signs)))


def _chosen(values: Sequence[T | None], size: Shape) -> Iterator[tuple[slice | Tensor, list[T]]]:
    """Yield the rows that have a value, and their values, as many as are changed at a time."""
    rows = [(row, value) for row, value in enumerate(values) if value is not None]
    most = number_together(size)
    for begin in range(0, len(rows), most):
        numbers, own = map(list, zip(*rows[begin : begin + most], strict=True))
        first, last = numbers[0], numbers[-1]
        is_run = last - first < len(numbers)
        yield slice(first, last + 1) if is_run else torch.tensor(numbers), own


def _unless(value: T, nothing: T) -> T | None:
    return None if value == nothing else value


def _farthest(reaches: Iterable[Shape]) -> Shape:
    x, y, z = map(max, zip(*reaches, strict=True))
    return x, y, z


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values)[:, None]
