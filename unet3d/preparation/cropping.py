"""The part of an image that is not zero.

Around a head whose skull was taken away, or beyond the field of view, voxels are zero in every
channel. Nothing is to be learned there, and it may be most of the volume. So images are cut to the
smallest box that holds all others, as in nnU-Net (Isensee et al., Nature Methods 2021).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from unet3d.config import Shape
from unet3d.images.image import Image
from unet3d.preparation.intensities import Mask, Place, on_pieces

MASKED_SHARE = 0.75
"""Where cropping leaves at most this share of the volume, what is normalised by mean and deviation
is masked (the value of nnU-Net)."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of voxels; it may have none."""

    start: Shape
    """Its first voxel along X, Y, Z."""
    stop: Shape
    """The voxel behind its last one."""

    @classmethod
    def between(cls, start: Iterable[int], stop: Iterable[int]) -> Self:
        """Return the box of three first voxels and three ends."""
        (x, y, z), (x_stop, y_stop, z_stop) = start, stop
        return cls(start=(x, y, z), stop=(x_stop, y_stop, z_stop))

    @property
    def shape(self) -> Shape:
        """Voxels along X, Y, Z."""
        x, y, z = (stop - start for start, stop in zip(self.start, self.stop, strict=True))
        return (x, y, z)

    @property
    def is_empty(self) -> bool:
        """Whether it has no voxel."""
        return min(self.shape) == 0

    @property
    def slices(self) -> Place:
        """What cuts it out of an array (X, Y, Z)."""
        return self.inside(whole_box((0, 0, 0)))

    def inside(self, outer: "Box") -> Place:
        """Return what cuts it out of the array of a larger box."""
        x, y, z = (
            slice(start - first, stop - first)
            for start, stop, first in zip(self.start, self.stop, outer.start, strict=True)
        )
        return (x, y, z)


def whole_box(shape: Shape) -> Box:
    """Return the box of all voxels."""
    return Box(start=(0, 0, 0), stop=shape)


def nonzero_box(image: Image) -> Box:
    """Return the smallest box of all voxels that are not zero in every channel.

    Of an image that is zero everywhere, it is all of it.
    """
    shape = image.geometry.shape
    ends = ((axis, slice(end, end + 1)) for axis in range(3) for end in (0, shape[axis] - 1))
    if all(_nonzero(image, image.planes(*end)).any() for end in ends):  # as of most images
        return whole_box(shape)

    def lines_of(place: Place) -> list[Mask]:
        nonzero = _nonzero(image, place)
        return [np.atleast_1d(nonzero.any(axis=others)) for others in ((1, 2), (0, 2), (0, 1))]

    lines = [np.zeros(size, bool) for size in shape]
    places = list(image.pieces())
    for place, found in zip(places, on_pieces(lines_of, places), strict=True):
        for line, part, one in zip(lines, place, found, strict=True):
            line[part] |= one
    if not lines[0].any():
        return whole_box(shape)
    (x, x_last), (y, y_last), (z, z_last) = (
        np.flatnonzero(line)[[0, -1]].tolist() for line in lines
    )
    return Box(start=(x, y, z), stop=(x_last + 1, y_last + 1, z_last + 1))


def inside_mask(image: Image) -> Mask:
    """Return the voxels that are not zero in every channel, and those that they enclose, (X, Y, Z).

    Of an image that is cut to its box the mask is the same there.
    """
    from scipy import ndimage  # takes a third of a second, and most images need it not

    nonzero = np.empty(image.geometry.shape, bool)
    for place in image.pieces():
        nonzero[place] = _nonzero(image, place)
    filled: Mask = ndimage.binary_fill_holes(nonzero)
    return filled


def _nonzero(image: Image, place: Place) -> Mask:
    """Return where any channel of a part is not 0, (X, Y, Z); NaN is not 0."""
    found: Mask = (image.read(place) != 0).any(axis=0)
    return found


def takes_much(whole: Sequence[Shape], kept: Sequence[Shape]) -> bool:
    """Return whether cropping takes so much, in the median case, that the outside is masked.

    The shapes are those of each case, and of its box.
    """
    sizes = zip(whole, kept, strict=True)
    left = np.median([math.prod(of_box) / math.prod(shape) for shape, of_box in sizes])
    return bool(left <= MASKED_SHARE)
