"""The part of a large image that is segmented in blocks: a box of it, and the voxels of a mask."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from unet3d.config import Reading
from unet3d.errors import ConfigError, VolumeError
from unet3d.images.geometry import Geometry
from unet3d.images.image import Box, Image, open_image
from unet3d.images.scratch import Scratch
from unet3d.images.units import Units
from unet3d.inference.request import Crop, PredictionRequest

Labels = npt.NDArray[Any]


class Region:
    """A box of an image, and where a mask is not zero in it."""

    def __init__(
        self,
        image: Image,
        request: PredictionRequest,
        reading: Reading,
        scratch: Scratch | None = None,
    ) -> None:
        """Open the mask; ConfigError if box or mask do not fit the image."""
        self._geometry = image.geometry
        self.box = _box_of(request.crop, image.geometry)
        self._mask: Image | None = None
        if request.mask is not None:
            # The spacing that users state is that of the image.
            nearest = reading.model_copy(update={"spacing_mm": None})
            nearest = nearest.near(image.geometry.spacing_mm)
            self._mask = open_image(request.mask, scratch, nearest)
            _refuse_misfit(self._mask.geometry, image.geometry)

    @property
    def mask(self) -> Geometry | None:
        """The geometry of the mask, if there is one."""
        return None if self._mask is None else self._mask.geometry

    def begin(
        self, box: Box, begin: Callable[[Box], Callable[[], Labels]]
    ) -> Callable[[], Labels | None]:
        """Return a function that returns the labels (X, Y, Z) of a box of the region.

        It returns None if the mask is zero there. Otherwise ``begin`` begins with a box of the
        image, and returns a function that returns its labels, in an array that may be changed.
        """
        x, y, z = (
            slice(whole.start + part.start, whole.start + part.stop)
            for whole, part in zip(self.box, box, strict=True)
        )
        if self._mask is None:
            return begin((x, y, z))
        try:
            inside = _where_nonzero(self._mask, self._geometry, (x, y, z))
        except VolumeError as error:
            return partial(_raise, error)  # when the labels of this block are requested
        if inside is None:
            return lambda: None
        labels_of = begin((x, y, z))

        def masked() -> Labels:
            labels = labels_of()
            return np.multiply(labels, inside, out=labels)

        return masked


def _raise(error: VolumeError) -> NoReturn:
    raise error


def _box_of(crop: Crop | None, geometry: Geometry) -> Box:
    """Return the box of an image that users name, or all of it."""
    asked = crop or ((None, None),) * 3
    found = [
        (start or 0, size if stop is None else stop)
        for (start, stop), size in zip(asked, geometry.shape, strict=True)
    ]
    sizes = zip(found, geometry.shape, strict=True)
    if not all(0 <= start < stop <= size for (start, stop), size in sizes):
        named = ",".join(f"{start}:{stop}" for start, stop in reversed(found))
        shape = ",".join(map(str, reversed(geometry.shape)))
        raise ConfigError(
            f"{geometry.path} has {shape} voxels along Z,Y,X, and no part {named}; change --crop"
        )
    x, y, z = (slice(*ends) for ends in found)
    return x, y, z


def _refuse_misfit(mask: Geometry, image: Geometry) -> None:
    """Refuse a mask of another extent than the image, by more than one of the coarser voxels."""
    if mask.num_channels != 1:
        raise ConfigError(
            f"{mask.path} has {mask.num_channels} channels; a mask needs one number per voxel"
        )
    if mask.shape == image.shape:
        return
    covered, wanted = _extent_mm(mask), _extent_mm(image)
    most = 1.01 * np.maximum(mask.spacing_mm, image.spacing_mm)
    if (
        not (mask.has_spacing and image.has_spacing)
        or (np.abs(np.subtract(covered, wanted)) > most).any()
    ):
        units = Units.of(image.spacing_mm)
        raise ConfigError(
            f"{mask.path} covers {units.spacing_text(covered)}, but {image.path} "
            f"{units.spacing_text(wanted)} along X, Y, Z; choose a mask of the same extent, which "
            "states its spacing or has as many voxels"
        )


def _extent_mm(geometry: Geometry) -> list[float]:
    sizes = zip(geometry.shape, geometry.spacing_mm, strict=True)
    return [size * mm for size, mm in sizes]


def _where_nonzero(mask: Image, image: Geometry, box: Box) -> npt.NDArray[np.bool_] | None:
    """Return where a mask is not zero in a box of an image (X, Y, Z), or None if it is nowhere.

    Each voxel of the image takes the voxel of the mask that holds its centre. X is contiguous, as
    in most label maps.
    """
    nearest = [_nearest(axis, box[axis], mask.geometry, image) for axis in range(3)]
    x, y, z = (slice(int(one[0]), int(one[-1]) + 1) for one in nearest)
    part = mask.cut((x, y, z))
    places = [one - one[0] for one in nearest]
    found = np.zeros([len(one) for one in reversed(places)], bool)  # (Z, Y, X)
    is_empty = True
    for piece in part.pieces():
        nonzero = (part.read(piece)[0] != 0).T
        if not nonzero.any():
            continue
        target: list[slice] = []
        # X last: whole rows are copied along the other axes.
        for dim, axis in enumerate((2, 1, 0)):
            place, voxels = places[axis], piece[axis]
            first, end = np.searchsorted(place, (voxels.start, voxels.stop)).tolist()
            nonzero = nonzero.take(place[first:end] - voxels.start, dim)
            target.append(slice(first, end))
        found[tuple(target)] = nonzero
        is_empty = False
    return None if is_empty else found.T


def _nearest(axis: int, part: slice, mask: Geometry, image: Geometry) -> npt.NDArray[np.int64]:
    """Return the voxels of a mask along an axis that hold the centres of voxels of an image."""
    ratio = 1.0
    if mask.shape != image.shape:
        ratio = image.spacing_mm[axis] / mask.spacing_mm[axis]
    centres = (np.arange(part.start, part.stop) + 0.5) * ratio
    return np.minimum(centres.astype(np.int64), mask.shape[axis] - 1)
