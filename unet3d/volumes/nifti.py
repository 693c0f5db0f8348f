"""Reading and writing volumes: the only module that knows about orientation.

However a scanner stored its axes, every other module sees arrays in RAS: X grows to the patient's
right, Y to the front, Z to the top. ``write_label`` turns a label map back into the orientation of
the image that it belongs to.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError, reason_of
from unet3d.volumes.files import (
    is_nifti_file,
    open_volume,
    stored_axes,
    stored_voxels,
    times,
    write_nifti,
)

logger = logging.getLogger(__name__)

MILLIMETRES_PER_UNIT = {1: 1000.0, 3: 0.001}
"""By the codes of a NIfTI header for metre and micrometre; every other code counts as mm."""

MAX_INTEGER_IN_FLOAT64 = 2.0**53

MIN_DETERMINANT = 1e-6
"""Determinant of the three axis directions, 1 for right angles; below this they are flat."""

LABEL_ROUNDING = 1e-3
"""How far a label may lie from an integer, for label maps that were saved as floats."""

GEOMETRY_FIELDS = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code"),
    *("quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class VolumeHeader:
    """Where the voxels of a volume lie, in RAS and as they are stored."""

    path: Path
    """The file that it was read from; of several channel files the first."""
    shape: Shape
    """Voxels along X, Y, Z."""
    num_channels: int
    spacing_mm: Spacing
    """Distance of neighbouring voxels along X, Y, Z."""
    affine: npt.NDArray[np.float64]
    """(4, 4): from RAS voxel indices to mm."""
    stored_orientation: npt.NDArray[np.float64] = field(repr=False)
    """(3, 2): for each stored axis, the RAS axis and the direction, in nibabel's form."""
    stored_header: Any = field(repr=False)
    """A NIfTI header with nothing but the stored geometry, for ``write_label``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Volume:
    """An image or a label map."""

    array: npt.NDArray[Any]
    """float32 ``(C, X, Y, Z)`` of an image, integers ``(X, Y, Z)`` of a label map."""
    header: VolumeHeader


def read_header(path: Path | str) -> VolumeHeader:
    """Read where a volume lies, without its voxels.

    Args:
        path: The volume.

    Raises:
        VolumeError: The file cannot be read, or is no volume that can be oriented.
    """
    path = Path(path)
    return _header(path, open_volume(path))


def read_image(path: Path | str) -> Volume:
    """Read the image in one file in RAS, with the scaling in its header applied.

    Args:
        path: The file; a fourth axis is that of the channels.

    Returns:
        The volume, its array float32 ``(C, X, Y, Z)`` and C-contiguous.

    Raises:
        VolumeError: The file cannot be read, or a voxel is NaN or infinite in float32.
    """
    path = Path(path)
    image = open_volume(path)
    header = _header(path, image)
    stored = stored_voxels(path, image).reshape(stored_axes(path, image))
    canonical = np.moveaxis(nib.apply_orientation(stored, header.stored_orientation), 3, 0)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, counted below
        array = np.array(canonical, dtype=np.float32, order="C")
    _refuse_non_finite(path, array)
    return Volume(array=array, header=header)


def read_channels(paths: Sequence[Path]) -> Volume:
    """Read an image whose channels are in one file or in several, in RAS.

    Args:
        paths: The files in the order of their channels.

    Returns:
        The volume, its array float32 ``(C, X, Y, Z)`` with the channels of every file.

    Raises:
        VolumeError: A file cannot be read, a voxel is NaN or infinite, or the files do not lie on
            one grid.
    """
    if len(paths) == 1:
        return read_image(paths[0])
    headers = [read_header(path) for path in paths]
    first = headers[0]
    for header in headers[1:]:
        disagreement = same_grid(first, header)
        if disagreement:
            raise VolumeError(f"{header.path} is not on the grid of {first.path}: {disagreement}")
    num_channels = sum(header.num_channels for header in headers)
    array = np.empty((num_channels, *first.shape), np.float32)
    start = 0
    for header in headers:  # one after the other, so that each is in memory twice but not all
        array[start : start + header.num_channels] = read_image(header.path).array
        start += header.num_channels
    return Volume(array=array, header=replace(first, num_channels=num_channels))


def read_label(path: Path | str) -> Volume:
    """Read a label map in RAS.

    Args:
        path: The file.

    Returns:
        The volume, its array ``(X, Y, Z)``, C-contiguous, of the smallest unsigned integer type
        that holds its values, or the smallest signed one if some are negative.

    Raises:
        VolumeError: The file cannot be read, has several channels, or holds values that are not
            integers.
    """
    path = Path(path)
    image = open_volume(path)
    header = _header(path, image)
    if header.num_channels != 1:
        raise VolumeError(
            f"{path} has {header.num_channels} channels; a label map needs one label per voxel"
        )
    stored = stored_voxels(path, image).reshape(stored_axes(path, image)[:3])
    if stored.dtype.kind == "f":
        _refuse_non_finite(path, stored)
        rounded = np.rint(stored)
        wrong = np.abs(stored - rounded) > LABEL_ROUNDING
        wrong |= np.abs(stored) > MAX_INTEGER_IN_FLOAT64
        if wrong.any():
            raise VolumeError(
                f"{path} has {np.count_nonzero(wrong)} voxels that are no integer labels, such as "
                f"{stored[wrong][0]:.7g}; is it an image? a label map holds whole numbers"
            )
        stored = rounded
    canonical = nib.apply_orientation(stored, header.stored_orientation)
    return Volume(array=np.array(canonical, dtype=_smallest_type(stored), order="C"), header=header)


def write_label(
    path: Path | str, labels: npt.NDArray[Any], header: VolumeHeader, overwrite: bool = True
) -> None:
    """Write a label map onto the grid of the image that it was made from.

    The file has the stored orientation, shape, affine, qform and sform with their codes, spacing
    and units of that image. It appears whole or not at all.

    Args:
        path: A name that ends in .nii or .nii.gz.
        labels: Integers ``(X, Y, Z)`` in RAS, none negative.
        header: Header of the image.
        overwrite: Whether a file of that name is replaced.

    Raises:
        FileExistsError: Something has the name and may not be replaced.
        VolumeError: The name has another ending, or the file cannot be written.
        ValueError: The labels do not lie on the grid of the image or are not labels.
    """
    path = Path(path)
    if not is_nifti_file(path):
        raise VolumeError(f"cannot write {path}: choose a name that ends in .nii.gz or .nii")
    if labels.shape != header.shape:
        raise ValueError(f"labels of shape {labels.shape} for a grid of shape {header.shape}")
    if labels.dtype.kind not in "bui" or labels.min() < 0:
        raise ValueError(f"labels of type {labels.dtype}, {labels.min()} to {labels.max()}")
    ras = nib.io_orientation(np.eye(4))
    restore = nib.orientations.ornt_transform(ras, header.stored_orientation)
    stored = nib.apply_orientation(labels.astype(_smallest_type(labels)), restore)
    nifti_header = header.stored_header.copy()
    nifti_header.set_data_dtype(stored.dtype)
    two = isinstance(nifti_header, nib.Nifti2Header)
    # Without an affine nibabel leaves both forms as the header has them.
    image = (nib.Nifti2Image if two else nib.Nifti1Image)(stored, None, nifti_header)
    try:
        write_nifti(path, image, overwrite)
    except FileExistsError:
        raise
    except OSError as error:
        raise VolumeError(
            f"cannot write {path}: {reason_of(error)}; choose a folder with space that you can "
            "write to"
        ) from error


def same_grid(a: VolumeHeader, b: VolumeHeader, tolerance_mm: float | None = None) -> str | None:
    """Compare where two volumes lie, whatever their stored orientations.

    Args:
        a: One volume.
        b: The other.
        tolerance_mm: How far apart the same corner may lie; None: a tenth of the finest spacing.

    Returns:
        None if they share one grid, else a phrase that says what disagrees.
    """
    if a.shape != b.shape:
        return f"shapes {times(a.shape)} and {times(b.shape)} differ"
    corners = np.indices((2, 2, 2)).reshape(3, -1) * (np.array(a.shape)[:, None] - 1)
    homogeneous = np.vstack([corners, np.ones(corners.shape[1])])
    apart_mm = np.linalg.norm(((a.affine - b.affine) @ homogeneous)[:3], axis=0).max()
    limit_mm = min(a.spacing_mm) / 10 if tolerance_mm is None else tolerance_mm
    if apart_mm > limit_mm:
        return f"affines differ, corners lie up to {apart_mm:.3g} mm apart"
    return None


def _header(path: Path, image: Any) -> VolumeHeader:
    unit_mm = 1.0
    if isinstance(image, nib.Nifti1Pair):
        unit_mm = MILLIMETRES_PER_UNIT.get(int(image.header["xyzt_units"]) & 7, 1.0)
        _check_forms(path, image)
    affine = np.array(image.affine, dtype=np.float64)
    affine[:3] *= unit_mm
    lengths = np.sqrt(affine[0, :3] ** 2 + affine[1, :3] ** 2 + affine[2, :3] ** 2)
    if not np.isfinite(affine).all() or not (lengths > 0).all():
        raise VolumeError(f"{path} has the spacing {times(lengths)} mm; fix its header")
    if abs(np.linalg.det(affine[:3, :3] / lengths)) < MIN_DETERMINANT:
        raise VolumeError(f"{path} has an affine that cannot be inverted; fix its header")
    *stored_shape, num_channels = stored_axes(path, image)
    orientation = nib.io_orientation(affine)
    x, y, z = np.argsort(orientation[:, 0])  # the stored axes that run along X, Y, Z
    spacing_mm = _spacing_mm(image, lengths, unit_mm)
    return VolumeHeader(
        path=path,
        shape=(stored_shape[x], stored_shape[y], stored_shape[z]),
        num_channels=num_channels,
        spacing_mm=(spacing_mm[x], spacing_mm[y], spacing_mm[z]),
        affine=affine @ nib.orientations.inv_ornt_aff(orientation, stored_shape),
        stored_orientation=orientation,
        stored_header=_geometry(image, stored_shape),
    )


def _check_forms(path: Path, image: Any) -> None:
    if int(image.header["sform_code"]) > 0:
        return
    # nibabel turns a spacing of zero into 1 as it loads, so look at the file itself.
    holder = image.file_map.get("header", image.file_map["image"])
    with holder.get_prepare_fileobj("rb") as stream:
        raw = type(image.header).from_fileobj(stream, check=False)
    spacing = raw["pixdim"][1 : 1 + min(3, len(image.shape))]
    if not (np.abs(spacing) > 0).all():
        raise VolumeError(f"{path} has the spacing {times(spacing)} mm; fix its header")
    if int(image.header["qform_code"]) <= 0:
        logger.warning(
            "%s does not state its orientation (qform and sform codes are 0); its axes are taken "
            "as right to left, back to front, bottom to top",
            path,
        )


def _spacing_mm(image: Any, lengths_mm: npt.NDArray[np.float64], unit_mm: float) -> list[float]:
    """Return the spacing of the stored axes to 1e-6 mm, the same for every orientation of a scan.

    The spacing in the header has less rounding noise than the columns of an oblique affine, but
    the affine is right where they contradict each other.
    """
    zooms = [float(str(zoom)) for zoom in (*image.header.get_zooms()[:3], 1.0, 1.0)[:3]]
    zooms_mm = np.array(zooms) * unit_mm
    spacing_mm = np.where(np.isclose(zooms_mm, lengths_mm, rtol=1e-4, atol=0), zooms_mm, lengths_mm)
    # 500 mm / 512 is 0.9765625: rounding up from 0.4 keeps such a common spacing from depending on
    # the last bit.
    return [math.floor(spacing * 1e6 + 0.6) / 1e6 for spacing in spacing_mm.tolist()]


def _geometry(image: Any, stored_shape: list[int]) -> Any:
    two = isinstance(image.header, nib.Nifti2Header) or max(stored_shape) > np.iinfo(np.int16).max
    header = nib.Nifti2Header() if two else nib.Nifti1Header()
    header.set_data_shape(stored_shape)
    if isinstance(image, nib.Nifti1Pair):
        for name in GEOMETRY_FIELDS:
            header[name] = image.header[name]
    else:
        header.set_qform(image.affine, code="scanner")
        header.set_sform(image.affine, code="scanner")
        header.set_xyzt_units("mm")
    return header


def _refuse_non_finite(path: Path, array: npt.NDArray[Any]) -> None:
    num_wrong = array.size - np.count_nonzero(np.isfinite(array))
    if num_wrong:
        raise VolumeError(
            f"{path} has {num_wrong} voxels of {array.size} that are NaN or infinite; "
            "replace them, for example by 0"
        )


def _smallest_type(labels: npt.NDArray[Any]) -> np.dtype[Any]:
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest >= 0:
        return np.dtype(np.min_scalar_type(highest))
    # The negative number that needs the same signed type as the highest label.
    return np.promote_types(np.min_scalar_type(lowest), np.min_scalar_type(min(-1, -highest - 1)))
