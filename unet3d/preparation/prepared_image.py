"""Images and label maps prepared: cut to a box, normalised, and resampled.

Training reads whole images; prediction reads planes when it needs them.
"""

import logging
import math
from copy import copy
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import Shape, Spacing
from unet3d.datasets.labels import class_indices
from unet3d.errors import VolumeError, counted
from unet3d.images.image import Box, Image
from unet3d.images.memory_limits import explaining_memory
from unet3d.memory.host import is_out_of_gpu_memory
from unet3d.preparation.interpolation import Order, Resampling, resample_classes
from unet3d.preparation.normalization import (
    Intensities,
    Mask,
    Scaling,
    is_large,
    measured,
    on_pieces,
)
from unet3d.preparation.resample import visible_shape
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

ENOUGH_VOXELS = 10**7
"""Voxels of a level in which the nonzero box of a large image is found."""

CLASS_ARRAYS = 2
"""Arrays for resampling a label map: the strongest class of each voxel, and its strength."""

MAX_NORMALISED = 1e9
"""Largest normalised intensity. With a larger one, a variance in the network may overflow in
float32: features divided by it become 0, and the segmentation empty, without NaN or infinity."""


class PreparedImage:
    """An image whose planes are normalised and resampled on request."""

    def __init__(self, image: Image, preprocessing: Preprocessing) -> None:
        """Measure an image that is cut to its :func:`kept_box`, or refuse it."""
        channels = preprocessing.channels
        if image.num_channels != len(channels):
            raise VolumeError(
                f"the image has {counted(image.num_channels, 'channel')}, not {len(channels)}: "
                f"{', '.join(preprocessing.channel_names)}"
            )
        shape, spacing_mm = image.geometry.shape, image.geometry.spacing_mm
        target_mm = preprocessing.spacing_mm
        self.shape = visible_shape(shape, spacing_mm, target_mm)
        """Voxels along X, Y, Z at the target spacing."""
        self._image = image
        self._has_told = False
        interpolation, target_mm = preprocessing.interpolation, target_mm or spacing_mm
        slice_axis = interpolation.slice_axis(spacing_mm, target_mm)
        clips = interpolation.clips and not is_large(image)
        self._may_be_nan = image.dtype.kind == "f" and is_large(image)  # a sample was measured
        is_masked = [how.kind == "z-score-inside" for how in channels]
        with explaining_memory("the image cannot be prepared"):
            self._inside = inside_mask(image) if any(is_masked) else None
            masks = [self._inside if masked else None for masked in is_masked]
            if (
                not clips
                and image.dtype.kind in "bui"
                and all(how.kind == "ct" for how in channels)
            ):
                found = [Intensities.between(how.low, how.high) for how in channels]
            else:
                found = measured(image, masks, slice_axis if clips else None)
        self._scalings = [Scaling.of(*one) for one in zip(channels, found, strict=True)]
        ranges = torch.from_numpy(np.stack([[one.lowest, one.highest] for one in found]))
        for scaling, one in zip(self._scalings, ranges, strict=True):
            scaling.apply_(one)
        self.largest = float(ranges.abs().max())
        """The largest magnitude of its normalised intensities."""
        if not self.largest <= MAX_NORMALISED:
            raise VolumeError(
                f"its normalised intensities reach {self.largest:.3g}; look for outlier voxels, "
                "or train with data.normalization=z-score"
            )
        orders = interpolation.orders(slice_axis)
        limits = ranges if clips else None
        self._resampling = Resampling.of(image.shape, self.shape, orders, limits, slice_axis)
        self._nearest_axis: int | None = None
        if not interpolation.logits_across_slices:
            self._nearest_axis = interpolation.slice_axis(target_mm, spacing_mm)

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return self._image.num_channels

    @property
    def image(self) -> Image:
        """The image that is prepared."""
        return self._image

    def within(self, box: Box) -> "PreparedImage":
        """Return a part of the prepared image, which has the same voxels; nothing is read."""
        part = copy(self)
        needed, part._resampling = self._resampling.within(box)
        part._image = self._image.cut(needed)
        part._inside = None if self._inside is None else self._inside[needed]
        part.shape = part._resampling.new_shape
        return part

    def restoring(self) -> Resampling:
        """Return how logits are resampled to the image's own spacing.

        They are interpolated linearly, or across thick slices the nearest plane is taken.
        """
        orders: list[Order] = [0 if axis == self._nearest_axis else 1 for axis in range(3)]
        shape = self._image.geometry.shape
        return Resampling.of((1, *self.shape), shape, (orders[0], orders[1], orders[2]))

    def planes(self, axis: int, begin: int, end: int, device: torch.device = CPU) -> torch.Tensor:
        """Return some planes along an axis, (C, X', Y', Z'), in any memory order.

        They are on the device or, if it has too little memory, on the CPU. On a GPU their values
        are complete, but their memory belongs to another stream, so the caller must call
        ``record_stream``.
        """
        with explaining_memory("the image cannot be prepared"):
            if device.type == "cuda":
                try:
                    with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
                        made = self._made(axis, begin, end, device)
                        _stream(device).synchronize()  # the caller's stream does not wait for it
                        return made
                except RuntimeError as error:
                    if not is_out_of_gpu_memory(error):
                        raise
                    if not self._has_told:
                        logger.info(
                            "%s has too little memory to prepare the image; the CPU does", device
                        )
                    self._has_told = True
            return self._made(axis, begin, end, CPU)

    def whole(self) -> torch.Tensor:
        """Return all planes, as :meth:`planes` does."""
        axis = self._resampling.best_axis
        return self.planes(axis, 0, self.shape[axis])

    def _made(self, axis: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
        return self._resampling.planes(
            lambda planes: self._normalised(axis, planes, device), axis, begin, end
        )

    def _normalised(self, axis: int, source: slice, device: torch.device) -> torch.Tensor:
        """Return some planes of the image itself, normalised."""
        box = self._image.planes(axis, source)
        image = self._image.on_device(box, device)
        if self._may_be_nan and not bool(image.isfinite().all()):
            raise VolumeError(
                f"{self._image.geometry.path} has voxels that are NaN or infinite; replace them, "
                "for example by 0"
            )
        inside = None if self._inside is None else torch.from_numpy(self._inside[box]).to(device)
        for channel, scaling in zip(image, self._scalings, strict=True):
            scaling.apply_(channel, inside)
        return image


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a GPU prepares images; all images share it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def kept_box(image: Image, preprocessing: Preprocessing) -> Box:
    """Return the box to which an image and its label map are cropped."""
    return nonzero_box(image) if preprocessing.crops_to_nonzero else whole_box(image.geometry.shape)


def whole_box(shape: Shape) -> Box:
    """Return the box of all voxels."""
    x, y, z = (slice(0, size) for size in shape)
    return x, y, z


def nonzero_box(image: Image) -> Box:
    """Return the bounding box of voxels that are nonzero in any channel, as in nnU-Net.

    For an image of zeros, it is the whole image. In a large pyramid, it is found in a coarser
    level, with a voxel more on each side. Zeros around a skull-stripped head or outside the field
    of view can be most of the volume, and add nothing to training.
    """
    shape = image.geometry.shape
    ends = ((axis, slice(end, end + 1)) for axis in range(3) for end in (0, shape[axis] - 1))
    if all(_nonzero(image, image.planes(*end)).any() for end in ends):  # true for most images
        return whole_box(shape)
    coarse = _coarse(image) if is_large(image) else None
    if coarse is not None:  # reading all voxels would take as long as segmenting them
        box = nonzero_box(coarse)
        x, y, z = (
            slice(max(0, part.start - 1) * new // old, min(old, part.stop + 1) * new // old)
            for part, old, new in zip(box, coarse.geometry.shape, shape, strict=True)
        )
        return x, y, z

    def lines_of(box: Box) -> list[Mask]:
        nonzero = _nonzero(image, box)
        return [np.atleast_1d(nonzero.any(axis=others)) for others in ((1, 2), (0, 2), (0, 1))]

    lines = [np.zeros(size, bool) for size in shape]
    boxes = list(image.pieces())
    for box, found in zip(boxes, on_pieces(lines_of, boxes), strict=True):
        for line, part, one in zip(lines, box, found, strict=True):
            line[part] |= one
    if not lines[0].any():
        return whole_box(shape)
    ends_of_lines = (np.flatnonzero(line)[[0, -1]].tolist() for line in lines)
    x, y, z = (slice(first, last + 1) for first, last in ends_of_lines)
    return x, y, z


def _coarse(image: Image) -> Image | None:
    """Return the coarsest level of a pyramid with enough voxels; None if none is coarser."""
    fine = math.prod(image.geometry.shape)
    for level in reversed(range(len(image.levels))):
        if ENOUGH_VOXELS <= math.prod(image.levels[level]) < fine:
            return image.at_level(level)
    return None


def inside_mask(image: Image) -> Mask:
    """Return the mask (X, Y, Z) of voxels that are nonzero in any channel, with its holes filled.

    Cropping an image to the bounding box of its nonzero voxels does not change their mask.
    """
    from scipy import ndimage  # takes a third of a second; most images do not need it

    nonzero = np.empty(image.geometry.shape, bool)
    for box in image.pieces():
        nonzero[box] = _nonzero(image, box)
    filled: Mask = ndimage.binary_fill_holes(nonzero)
    return filled


def _nonzero(image: Image, box: Box) -> Mask:
    """Return where any channel of a box is nonzero, (X, Y, Z); NaN counts as nonzero."""
    found: Mask = (image.read(box) != 0).any(axis=0)
    return found


def prepare_image(image: Image, preprocessing: Preprocessing) -> npt.NDArray[np.float32]:
    """Normalise and resample an image that is cut to its :func:`kept_box`, (C, X', Y', Z')."""
    geometry, target_mm = image.geometry, preprocessing.spacing_mm
    visible_shape(geometry.shape, geometry.spacing_mm, target_mm, len(preprocessing.channels))
    return np.ascontiguousarray(PreparedImage(image, preprocessing).whole().numpy())


def prepare_label(
    array: npt.NDArray[np.integer[Any]], spacing_mm: Spacing, preprocessing: Preprocessing
) -> npt.NDArray[np.unsignedinteger]:
    """Turn label values (X, Y, Z), cut like the image, into class indices, and resample them.

    The indices are uint8, or uint16 if there are more than 256. Unlabelled voxels get the index
    after the last class.
    """
    known = preprocessing.class_of
    classes = class_indices(array, tuple(known), tuple(known.values()))
    x, y, z = array.shape
    shape = visible_shape((x, y, z), spacing_mm, preprocessing.spacing_mm, CLASS_ARRAYS)
    with explaining_memory("the label map cannot be prepared"):
        return resample_classes(classes, shape)
