"""Normalisation of a channel's intensities: to mean 0 and standard deviation 1, or to 0 ... 1.

Each normalisation clips, subtracts and divides. Statistics of the whole image are computed first,
in one pass over its pieces (:func:`measured`); then any part can be normalised separately. Of a
large volume of a microscope, a sample of boxes is measured. They are of the level that is used:
a coarser one, in which neighbours are averaged, has a smaller deviation (by 19 % after three
halvings of a FIB-SEM).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from unet3d.config import Normalization
from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError
from unet3d.images.files import format_of
from unet3d.images.geometry import Geometry
from unet3d.images.image import Box, Image
from unet3d.images.units import SMALL_MM
from unet3d.inputs.ahead import in_threads
from unet3d.inputs.plain_data import PLAIN

if TYPE_CHECKING:  # scores and reports use moments without PyTorch
    from torch import Tensor

MOST_THREADS = 8
"""With more threads, memory bandwidth is the limit."""

FORMATS_OF_MICROSCOPES = ("tiff", "ome_zarr", "hdf5")
"""Modules of :mod:`unet3d.images`."""

LARGE_VOXELS = 10**8
"""Images of microscopes with more voxels than this, along X, Y, Z, are not measured completely."""

NUM_BOXES = 4
"""Number of boxes of a sample along each axis."""

BOX_SHAPE = (140, 140, 8)
"""Voxels of a box of a sample along X, Y, Z: 10^7 in all boxes, on few pages of a TIFF."""

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Found = TypeVar("Found")

Kind = Literal["ct", "z-score", "z-score-inside", "rescale", "rgb", "none"]

KINDS_BY_NAME: dict[str, Kind] = {
    "ct": "ct",
    "nonorm": "none",
    "rescale_to_0_1": "rescale",
    "rgb_to_0_1": "rgb",
}
"""The normalisation of a channel by its name in lower case, as in nnU-Net; else z-score."""

MOST_COLOUR = 255.0
"""The largest intensity of a colour image."""

Intensity = Annotated[float, Field(strict=True)]


@dataclass(frozen=True, kw_only=True)
class ChannelNormalization:
    """How the intensities of one channel become comparable.

    ``ct``: clipped to ``low`` and ``high``, then shifted and scaled with the data set's ``mean``
    and ``std``, because Hounsfield units mean the same in every scan; likewise for percentiles of
    the volumes of microscopes. ``z-score``: with mean and
    deviation of all voxels of the image. ``z-score-inside``: with mean and deviation of the voxels
    inside the mask; outside is 0. ``rescale``: from 0 for the lowest intensity to 1 for the
    highest. ``rgb``: 255 becomes 1. ``none``: unchanged.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    kind: Kind
    low: Intensity = 0.0
    high: Intensity = 0.0
    mean: Intensity = 0.0
    std: Annotated[float, Field(gt=0, strict=True)] = 1.0
    least_std: Annotated[float, Field(ge=0, strict=True)] = 0.0
    """Lower limit of the standard deviation of a z-score, or of the range of ``rescale``, in
    intensities of the image. With 0, the result does not depend on the unit of intensities."""


def kind_of(
    channel_name: str, setting: Normalization, is_microscopic: bool
) -> Kind | Literal["percentiles"]:
    """Return how training normalises a channel, by ``data.normalization`` or its name."""
    if setting != "auto":
        return setting
    name = channel_name.strip().lower()
    if name.startswith(("ct ", "ct_", "ct-")):
        return "ct"
    return KINDS_BY_NAME.get(name, "percentiles" if is_microscopic else "z-score")


def is_microscopic(geometry: Geometry) -> bool:
    """Return whether an image is of a microscope, by its format or the size of its voxels."""
    found = format_of(geometry.path)
    by_format = found is not None and found.module in FORMATS_OF_MICROSCOPES
    return by_format or min(geometry.spacing_mm) < SMALL_MM


def is_large(image: Image) -> bool:
    """Return whether an image is one of a microscope of which only a sample is measured."""
    return math.prod(image.geometry.shape) > LARGE_VOXELS and is_microscopic(image.geometry)


def sample_boxes(image: Image) -> list[Box]:
    """Return boxes for the statistics of an image: of all voxels or, if it is large, of a few."""
    if not is_large(image):
        return list(image.pieces())
    along = []
    for size, length in zip(image.geometry.shape, BOX_SHAPE, strict=True):
        ends = [size * number // NUM_BOXES for number in range(NUM_BOXES + 1)]
        parts = []
        for begin, end in pairwise(ends):
            taken = min(length, end - begin)
            start = begin + (end - begin - taken) // 2
            parts.append(slice(start, start + taken))
        along.append(parts)
    return list(product(*along))


def sampled(image: Image) -> Array:
    """Return all intensities (C, X, Y, Z) or, if an image is large, of a sample (C, N, 1, 1)."""
    if not is_large(image):
        return image.whole()
    parts = [image.read(box) for box in sample_boxes(image)]
    return np.concatenate([part.reshape(len(part), -1, 1, 1) for part in parts], axis=1)


@dataclass(frozen=True)
class Moments:
    """Number of voxels, their mean, and the sum of squared deviations from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Array) -> "Moments":
        """Return the moments of voxels; of none, if one is NaN or infinite."""
        with np.errstate(invalid="ignore"):  # the sum of infinity and -infinity
            mean = float(values.mean(dtype=np.float64)) if values.size else math.nan
        if not math.isfinite(mean):  # sums of float32 never overflow in float64
            return cls()
        distances = np.subtract(values, mean, dtype=np.float64)
        # A dot product would start BLAS's threads, one for each core, in each thread of ours.
        return cls(values.size, mean, float(np.square(distances, out=distances).sum()))

    def joined(self, other: "Moments") -> "Moments":
        """Return the moments of both, as by Chan, Golub and LeVeque: without cancellation."""
        count = self.count + other.count
        apart, share = other.mean - self.mean, other.count / max(count, 1)
        squares = self.squares + other.squares + apart**2 * share * self.count
        return Moments(count, self.mean + apart * share, squares)

    @property
    def std(self) -> float:
        """The standard deviation, with the number of voxels as the divisor."""
        return math.sqrt(self.squares / max(self.count, 1))


class Intensities(NamedTuple):
    """Statistics of one channel, over the voxels that count in :func:`measured`."""

    mean: float
    std: float
    lowest: Array
    """Lowest intensity of each plane along an axis, or of all voxels, (1,)."""
    highest: Array

    @classmethod
    def between(cls, low: float, high: float) -> "Intensities":
        """Return what is known without reading voxels, of a channel that is clipped."""
        return cls(0.0, 1.0, np.array([low], np.float32), np.array([high], np.float32))


def measured(
    image: Image, masks: Sequence[Mask | None], axis: int | None = None
) -> list[Intensities]:
    """Return the intensities of each channel; VolumeError if an image has NaN or infinity.

    Only voxels inside a channel's mask (X, Y, Z) count; without a mask, all voxels count. With an
    axis, the extremes are measured in each plane along it, and voxels of a plane outside the mask
    count as having the mean. Of a large image only a sample counts, unless it has a mask or an axis
    is given.
    """
    others = tuple(one for one in range(3) if one != axis)

    def of_piece(box: Box) -> list[tuple[int, Moments, Array, Array]]:
        found = []
        for values, mask in zip(image.read(box), masks, strict=True):
            where = True if mask is None else mask[box]
            lowest = values.min(axis=others, where=where, initial=np.inf)
            highest = values.max(axis=others, where=where, initial=-np.inf)
            counted = values if mask is None else values[mask[box]]
            moments = Moments.of(counted)
            num_wrong = 0 if moments.count else np.count_nonzero(~np.isfinite(counted))
            found.append((int(num_wrong), moments, lowest, highest))
        return found

    needs_all = axis is not None or any(mask is not None for mask in masks)
    boxes = list(image.pieces()) if needs_all else sample_boxes(image)
    pieces = on_pieces(of_piece, boxes)
    num_wrong = sum(one[0] for piece in pieces for one in piece)
    if num_wrong:
        raise VolumeError(
            f"the image has {num_wrong} of {math.prod(image.shape)} voxels that are NaN or "
            "infinite; replace them, for example by 0"
        )
    found = []
    for channel, mask in enumerate(masks):
        lowest = np.full(1 if axis is None else image.geometry.shape[axis], np.inf)
        highest, moments = -lowest, Moments()
        for box, piece in zip(boxes, pieces, strict=True):
            planes = slice(None) if axis is None else box[axis]
            _, of_box, low, high = piece[channel]
            moments = moments.joined(of_box)
            lowest[planes] = np.minimum(lowest[planes], low)
            highest[planes] = np.maximum(highest[planes], high)
        if mask is not None:
            has_others = ~mask.all(axis=others)
            lowest = np.where(has_others, lowest.clip(max=moments.mean), lowest)
            highest = np.where(has_others, highest.clip(moments.mean), highest)
        low, high = lowest.astype(np.float32), highest.astype(np.float32)
        found.append(Intensities(moments.mean, moments.std, low, high))
    return found


def on_pieces(work: Callable[[Box], Found], boxes: Sequence[Box]) -> list[Found]:
    """Return the results of a function for all pieces of an image, computed in threads."""
    return in_threads(work, boxes, min(MOST_THREADS, num_cores()))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The normalisation of one channel of one image."""

    limits: tuple[float, float] | None = None
    """Lowest and highest intensity, to which others are clipped first."""
    mean: float = 0.0
    std: float = 1.0
    is_masked: bool = False
    """Whether voxels outside the mask become 0."""

    @classmethod
    def of(cls, how: ChannelNormalization, found: Intensities) -> "Scaling":
        """Return the scaling of a channel; VolumeError for colours outside 0 ... 255."""
        if how.kind == "none":
            return cls()
        if how.kind == "ct":
            return cls(limits=(how.low, how.high), mean=how.mean, std=how.std)
        lowest, highest = float(found.lowest.min()), float(found.highest.max())
        if how.kind == "rgb":
            if lowest < 0 or highest > MOST_COLOUR:
                raise VolumeError(
                    f"a channel has intensities from {lowest:.6g} to {highest:.6g}, but colours "
                    "are expected, from 0 to 255; choose images like those of the training"
                )
            return cls(std=MOST_COLOUR)
        start, scale = found.mean, found.std
        if how.kind == "rescale":
            start, scale = lowest, highest - lowest
        std = max(scale, how.least_std) or 1.0  # 1 for a constant channel
        return cls(mean=start, std=std, is_masked=how.kind == "z-score-inside")

    def apply_(self, values: "Tensor", inside: "Tensor | None" = None) -> None:
        """Normalise a part of the channel in place, in float32; ``inside`` is its mask."""
        if self.limits is not None:
            values.clamp_(*self.limits)
        if self.mean:
            values.sub_(self.mean)
        if self.std != 1:
            values.div_(self.std)
        if self.is_masked and inside is not None:
            values.masked_fill_(~inside, 0)
