"""Label maps: read as integers in RAS, written on the grid of their image."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.volumeutils import apply_read_scaling

from unet3d.atomic import new_folder, replacing
from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import WRITTEN_SUFFIXES, can_be_written, format_of, module_of, times
from unet3d.images.geometry import RAS, Geometry, axes_between
from unet3d.images.image import Image, image_of, open_source
from unet3d.images.memory_limits import explaining_memory, refuse_beyond_memory
from unet3d.images.scratch import LARGE_BYTES, parts
from unet3d.images.source import AS_STATED, Reading, Source

MAX_INTEGER_IN_FLOAT64 = 2.0**53

LABEL_ROUNDING = 1e-3
"""Largest distance of a label from an integer, for label maps saved as floats."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelMap:
    """A label map in memory."""

    array: npt.NDArray[Any]
    """Integers (X, Y, Z) in RAS, of the smallest type that holds them."""
    geometry: Geometry


def read_label(path: Path | str, reading: Reading = AS_STATED) -> LabelMap:
    """Read a label map in RAS; VolumeError if it has several channels or non-integer values.

    Its array (X, Y, Z) is C-contiguous, of the smallest unsigned integer type that holds its
    values, or the smallest signed one if some are negative.
    """
    return label_of(open_source(Path(path), reading))


def label_of(source: Source) -> LabelMap:
    """Read the label map of an opened file, as :func:`read_label` does."""
    return label_in(image_of([integers_of(source)]))


def integers_of(source: Source) -> Source:
    """Return the source of a label map with its labels as integers.

    Those that a file stores as floats, or scaled, are read at once, as one volume: only together do
    they tell labels with noise from an image of small values.
    """
    path, geometry = source.path, source.geometry
    if geometry.num_channels != 1:
        raise VolumeError(
            f"{path} has {geometry.num_channels} channels; a label map needs one label per voxel"
        )
    if source.dtype.kind != "f" and not source.is_scaled:
        return source
    # Rounding, comparing and converting floats each need a copy.
    _refuse_large(geometry, 8 if source.is_scaled else source.dtype.itemsize, source.unpacked_bytes)
    stored = np.asarray(source.voxels()[:, :, :, 0:1])
    with explaining_memory(f"cannot read {path}"), np.errstate(all="ignore"):
        if source.is_scaled:
            stored = apply_read_scaling(stored, source.slope, source.inter)
        if stored.dtype.kind == "f":
            stored = _whole_numbers(path, stored)
        integers = stored.astype(_smallest_type(stored))
    return Source(geometry, integers.dtype, lambda scratch: integers, levels=source.levels)


def label_in(image: Image, channel: int = 0) -> LabelMap:
    """Return a channel of integers in memory, with the axes of the image."""
    geometry = image.geometry
    _refuse_large(geometry, image.dtype.itemsize, image.unpacked_bytes)
    with explaining_memory(f"cannot read {geometry.path}"):
        stored = image.stored((slice(None),) * 3, channel)[..., 0]
        array = np.array(stored, dtype=_smallest_type(stored), order="C")
    return LabelMap(array=array, geometry=replace(geometry, num_channels=1))


def _refuse_large(geometry: Geometry, voxel_bytes: int, unpacked_bytes: int) -> None:
    refuse_beyond_memory(
        4 * voxel_bytes * math.prod(geometry.shape) + unpacked_bytes,
        f"{geometry.path}: reading {times(geometry.shape)} voxels",
        "use a machine with more, a coarser level of a pyramid (--level), or cut the volume",
    )


def on_grid_of(target: Geometry, label: LabelMap) -> LabelMap:
    """Return a label map with its axes in the order and direction of an image on the same grid.

    Axes only change if a grid is rotated by about 45 degrees, because then rounding decides the
    nearest anatomical axes.
    """
    turn = axes_between(label.geometry.affine, target.affine)
    if np.array_equal(turn, RAS):
        return label
    array = np.ascontiguousarray(nib.apply_orientation(label.array, turn))
    return LabelMap(array=array, geometry=replace(target, path=label.geometry.path, num_channels=1))


def write_label(
    path: Path | str,
    labels: npt.NDArray[Any],
    geometry: Geometry,
    overwrite: bool = True,
    names: Mapping[int, str] | None = None,
) -> None:
    """Write a label map (X, Y, Z) in RAS on the grid of its image, atomically.

    The file has the axes, shape and position of the image, and the names of label values. Raises
    FileExistsError if a file exists and may not be replaced.
    """
    path = Path(path)
    if not can_be_written(path):
        endings = " or ".join(WRITTEN_SUFFIXES)
        raise VolumeError(f"cannot write {path}: choose a name that ends in {endings}")
    stored = stored_labels(labels, geometry)
    try:
        format_ = format_of(path)
        assert format_ is not None
        with (
            new_folder(path, replace=overwrite)
            if format_.is_folder
            else replacing(path, may_exist=overwrite)
        ) as unfinished:
            module_of(format_).write_labels(unfinished, stored, geometry, names or {})
    except FileExistsError:
        raise
    except OSError as error:
        raise VolumeError(
            f"cannot write {path}: {reason_of(error)}; choose a folder with space that you can "
            "write to"
        ) from error


def stored_labels(labels: npt.NDArray[Any], geometry: Geometry) -> npt.NDArray[Any]:
    """Return labels (X, Y, Z) in RAS with the axes of the image's file, of the smallest type.

    Large labels are not copied, so they keep their type. Raises ValueError if the shape differs
    from the image's, or values are not labels.
    """
    if labels.shape != geometry.shape:
        raise ValueError(f"labels of shape {labels.shape} for a grid of shape {geometry.shape}")
    lowest, highest = _extremes(labels)
    if labels.dtype.kind not in "bui" or lowest < 0:
        raise ValueError(f"labels of type {labels.dtype}, {lowest} to {highest}")
    if labels.nbytes <= LARGE_BYTES:
        labels = labels.astype(np.min_scalar_type(highest), copy=False)
    return geometry.as_in_file(labels)


def _whole_numbers(path: Path, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return floats as the integers that they stand for."""
    rounded: npt.NDArray[Any] = np.rint(stored)
    wrong = ~(np.abs(stored - rounded) <= LABEL_ROUNDING)  # true for NaN and infinity, too
    wrong |= np.abs(stored) > MAX_INTEGER_IN_FLOAT64
    if not rounded.any():  # perhaps an image of small values; noise beside labels is accepted
        wrong |= stored != 0
    if wrong.any():
        raise VolumeError(
            f"{path} has {np.count_nonzero(wrong)} voxels that are not integer labels, such as "
            f"{stored[wrong][0]:.7g}; is it an image? a label map holds whole numbers"
        )
    return rounded


def _extremes(labels: npt.NDArray[Any]) -> tuple[int, int]:
    ends = [(int(labels[part].min()), int(labels[part].max())) for part in parts(labels)]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _smallest_type(labels: npt.NDArray[Any]) -> np.dtype[Any]:
    lowest, highest = _extremes(labels)
    if lowest >= 0:
        return np.dtype(np.min_scalar_type(highest))
    # The negative number that needs the same signed type as the highest label.
    return np.promote_types(np.min_scalar_type(lowest), np.min_scalar_type(min(-1, -highest - 1)))
