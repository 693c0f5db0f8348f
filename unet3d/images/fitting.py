"""Large volumes in a size that fits a page: a coarser level of a pyramid, or every few voxels."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from unet3d.config import Shape
from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.geometry import RAS, same_grid
from unet3d.images.image import Image, image_of, open_source
from unet3d.images.labels import LabelMap, label_of, on_grid_of
from unet3d.images.scratch import Scratch
from unet3d.images.source import AS_STATED, Reading, Source

MOST_VOXELS = 10**8
"""Most voxels to show: eight times as many as a page holds, and 2 GB of memory."""

MOST_READ = 2 * 10**10
"""Most voxels of a volume without a pyramid to look through, which takes minutes."""

SAME_SPACING = 0.01
"""Largest relative difference of the spacings of two levels that are shown together."""


def open_fitting(
    segmentation: Path, scan: Path, reading: Reading = AS_STATED
) -> tuple[LabelMap, Image, Shape]:
    """Return a segmentation and its scan with few enough voxels to show, and its whole shape.

    Raises VolumeError if the two files do not lie on one grid.
    """
    labels = open_source(segmentation, reading)
    shape = labels.geometry.shape
    image = open_source(scan, reading.near(labels.geometry.spacing_mm))
    disagreement = same_grid(labels.geometry, image.geometry)
    if disagreement is not None:
        raise VolumeError(
            f"{segmentation} and {scan} do not lie on one grid: {disagreement}; name the scan "
            "that was segmented"
        )
    if math.prod(shape) > MOST_VOXELS:
        labels, steps = _fitting_labels(labels)
        image = _at_spacing_of(labels, image) or _thinned(image, steps)
    found = image_of([image])
    common = [min(sizes) for sizes in zip(labels.geometry.shape, found.geometry.shape, strict=True)]
    x, y, z = (slice(0, size) for size in common)
    found, label = found.cut((x, y, z)), label_of(labels)
    if label.array.shape == found.geometry.shape:
        return on_grid_of(found.geometry, label), found, shape
    return LabelMap(array=label.array[x, y, z], geometry=found.geometry), found, shape


def _fitting_labels(labels: Source) -> tuple[Source, Shape]:
    """Return a label map in a size that fits, and how many voxels became one along each axis."""
    geometry = labels.geometry
    for level, shape in enumerate(labels.levels):
        if math.prod(shape) <= MOST_VOXELS and math.prod(shape) < math.prod(geometry.shape):
            found = _at_level(labels, level)
            ratios = np.divide(found.geometry.spacing_mm, geometry.spacing_mm).round()
            return found, (int(ratios[0]), int(ratios[1]), int(ratios[2]))
    steps = [1, 1, 1]
    while math.prod(_thin_shape(geometry.shape, steps)) > MOST_VOXELS:
        reached = np.multiply(steps, geometry.spacing_mm)
        is_long = np.array(geometry.shape) > steps
        steps[int(np.argmin(np.where(is_long, reached, np.inf)))] *= 2
    x, y, z = steps
    return _thinned(labels, (x, y, z)), (x, y, z)


def _at_spacing_of(labels: Source, scan: Source) -> Source | None:
    """Return the level of a scan on the grid of a label map, up to a voxel; None: it has none."""
    for level, shape in enumerate(scan.levels):
        if np.abs(np.subtract(shape, labels.geometry.shape)).max() <= 1:
            found = _at_level(scan, level)
            ratios = np.divide(found.geometry.spacing_mm, labels.geometry.spacing_mm)
            if np.abs(ratios - 1).max() <= SAME_SPACING:
                return found
    return None


def _at_level(source: Source, level: int) -> Source:
    reading = source.reading.model_copy(update={"level": level})
    return open_source(source.path, reading)


def _thinned(source: Source, steps: Shape) -> Source:
    """Return every few voxels of a source, in memory, in RAS."""
    image, geometry = image_of([source]), source.geometry
    if math.prod(geometry.shape) > MOST_READ:
        raise VolumeError(
            f"{source.path} has {times(geometry.shape)} voxels, too many to look through; save it "
            "as OME-Zarr, with coarser levels"
        )
    x, y, z = _thin_shape(geometry.shape, steps)
    what = f"{source.path}: every {times(steps)} voxels"
    voxels = Scratch().empty((x, y, z, geometry.num_channels), source.dtype, what, "F")
    for box in image.pieces():
        parts = list(zip(box, steps, strict=True))
        thin = [slice(-(-part.start // step), -(-part.stop // step)) for part, step in parts]
        if all(part.stop > part.start for part in thin):
            i, j, k = (
                slice(part.start * step, (part.stop - 1) * step + 1)
                for part, step in zip(thin, steps, strict=True)
            )
            stored = image.stored((i, j, k))
            voxels[*thin] = stored[tuple(slice(None, None, step) for step in steps)]
    affine = geometry.affine @ np.diag([*steps, 1.0])
    spacing = np.multiply(geometry.spacing_mm, steps).tolist()
    placed = replace(
        geometry,
        shape=(x, y, z),
        affine=affine,
        spacing_mm=(spacing[0], spacing[1], spacing[2]),
        orientation=RAS,
    )
    return Source(
        placed, source.dtype, lambda scratch: voxels, slope=source.slope, inter=source.inter
    )


def _thin_shape(shape: Shape, steps: Shape | list[int]) -> Shape:
    x, y, z = (-(-size // step) for size, step in zip(shape, steps, strict=True))
    return x, y, z
