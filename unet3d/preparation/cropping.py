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
import numpy.typing as npt

from unet3d.config import Shape
from unet3d.images.image import PIECE_VOXELS, Image

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
    def slices(self) -> tuple[slice, slice, slice]:
        """What cuts it out of an array (X, Y, Z)."""
        return self.inside(whole_box((0, 0, 0)))

    def inside(self, outer: "Box") -> tuple[slice, slice, slice]:
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

    Args:
        image: The whole image.

    Returns:
        The box; of an image that is zero everywhere, all of it.
    """
    start, stop = [0, 0, 0], list(image.geometry.shape)
    slowest = image.slowest_axis
    for axis in (slowest, *(other for other in range(3) if other != slowest)):
        first, last = (
            _first_nonzero(image, axis, start, stop, backward=backward)
            for backward in (False, True)
        )
        if first is None or last is None:  # there is neither of them
            return whole_box(image.geometry.shape)
        start[axis], stop[axis] = first, last + 1
    return Box.between(start, stop)


def _first_nonzero(
    image: Image, axis: int, start: Sequence[int], stop: Sequence[int], *, backward: bool
) -> int | None:
    """Return the first plane of a part of an image, or the last one, that is not zero.

    Most images are not zero at any side, so that a few planes are all that is read.

    Args:
        image: The image.
        axis: The planes follow each other along it.
        start: The part's first voxel along X, Y, Z.
        stop: The voxel behind its last one.
        backward: Whether the last plane is looked for.
    """
    first, behind = start[axis], stop[axis]
    number = 1  # then more and more: of many empty planes each would be a pass of its own
    of_plane = math.prod(b - a for a, b in zip(start, stop, strict=True)) // (behind - first)
    most = max(1, PIECE_VOXELS // of_plane)
    while first < behind:
        number = min(number, behind - first)
        place = [slice(a, b) for a, b in zip(start, stop, strict=True)]
        place[axis] = slice(behind - number, behind) if backward else slice(first, first + number)
        x, y, z = place
        others = tuple(other for other in range(3) if other != axis)
        found = np.flatnonzero(_nonzero(image, (x, y, z)).any(axis=others))
        if len(found):
            return int(place[axis].start + found[-1 if backward else 0])
        if backward:
            behind -= number
        else:
            first += number
        number = min(2 * number, most)
    return None


def inside_mask(image: Image) -> npt.NDArray[np.bool_]:
    """Return the voxels that are not zero in every channel, and those that they enclose.

    Args:
        image: Cut to its box or not, the mask is the same there.

    Returns:
        Shape (X, Y, Z).
    """
    from scipy import ndimage  # takes a third of a second, and most images need it not

    nonzero = np.empty(image.geometry.shape, bool)
    for piece in image.pieces():
        nonzero[piece] = _nonzero(image, piece)
    filled: npt.NDArray[np.bool_] = ndimage.binary_fill_holes(nonzero)
    return filled


def _nonzero(image: Image, place: tuple[slice, slice, slice]) -> npt.NDArray[np.bool_]:
    """Return where any channel of a part is not 0, (X, Y, Z); NaN is not 0."""
    found: npt.NDArray[np.bool_] = (image.read(place) != 0).any(axis=0)
    return found


def takes_much(whole: Sequence[Shape], kept: Sequence[Shape]) -> bool:
    """Return whether cropping takes so much, in the median case, that the outside is masked.

    Args:
        whole: Voxels along X, Y, Z of each case.
        kept: Those of its box.
    """
    sizes = zip(whole, kept, strict=True)
    left = np.median([math.prod(of_box) / math.prod(shape) for shape, of_box in sizes])
    return bool(left <= MASKED_SHARE)
