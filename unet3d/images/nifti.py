"""Reading and writing volumes: the only module that knows about orientation.

However a scanner stored its axes, every other module sees arrays in RAS: X grows to the patient's
right, Y to the front, Z to the top. ``write_label`` turns a label map back into the orientation of
the image that it belongs to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import is_nifti_file, times, write_nifti
from unet3d.images.formats import open_volume
from unet3d.images.grids import axes_between
from unet3d.images.header import RAS, VolumeHeader, header_of, same_grid
from unet3d.images.image_voxels import ImageVoxels, StoredChannels
from unet3d.images.memory_limits import FLOAT32_BYTES, explaining_memory, refuse_beyond_memory
from unet3d.images.scratch import Scratch, forget_pages
from unet3d.images.stored import StoredVolume, raw_voxels, scaled_voxels

MAX_INTEGER_IN_FLOAT64 = 2.0**53

LABEL_ROUNDING = 1e-3
"""How far a label may lie from an integer, for label maps that were saved as floats."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanImage:
    """An image whose voxels stay as they are stored until some of them are asked for."""

    voxels: ImageVoxels
    """Of all channels, in RAS."""
    header: VolumeHeader

    def as_stored(self) -> "ScanImage":
        """Return the same, with the stored axes of its first file, in their direction, as X, Y, Z.

        Its voxels are views.
        """
        turn = nib.orientations.ornt_transform(RAS, self.header.stored_orientation)
        voxels = self.voxels.viewed(lambda array: _turned(array, turn))
        return ScanImage(voxels=voxels, header=self.header.as_stored())


@dataclass(frozen=True, eq=False, kw_only=True)
class Volume:
    """An image or a label map, in memory."""

    array: npt.NDArray[Any]
    """float32 ``(C, X, Y, Z)`` of an image, integers ``(X, Y, Z)`` of a label map."""
    header: VolumeHeader


def read_image(path: Path | str) -> Volume:
    """Read the image in one file in RAS, with the scaling in its header applied.

    Args:
        path: The file; a fourth axis is that of the channels.

    Returns:
        The volume, its array float32 ``(C, X, Y, Z)`` and C-contiguous.

    Raises:
        VolumeError: The file cannot be read, is too large for the memory, or a voxel is NaN or
            infinite in float32.
    """
    return read_channels([Path(path)])


def read_channels(paths: Sequence[Path]) -> Volume:
    """Read an image whose channels are in one file or in several, in RAS.

    Args:
        paths: The files in the order of their channels.

    Returns:
        The volume, its array float32 ``(C, X, Y, Z)`` with the channels of every file.

    Raises:
        VolumeError: As :func:`open_channels`, or a voxel is NaN or infinite in float32.
    """
    files = _on_one_grid(paths)
    stored_bytes = _unpacked_bytes([volume for _, volume, _ in files])
    num_channels = sum(header.num_channels for _, _, header in files)
    shape = files[0][2].shape
    refuse_beyond_memory(
        stored_bytes + num_channels * math.prod(shape) * FLOAT32_BYTES,
        f"{paths[0]}: reading {times((*shape, num_channels))} voxels",
        "use a machine with more, or cut the volume into pieces",
    )
    image = _image_of(files, Scratch())
    with explaining_memory(f"cannot read {paths[0]}"):
        array = image.voxels.whole()
        _refuse_non_finite(paths[0], array)
        return Volume(array=array, header=image.header)


def unpacked_bytes(paths: Sequence[Path]) -> int:
    """Return what voxels take that are packed in their files.

    Args:
        paths: The files of an image.

    Raises:
        VolumeError: One cannot be read.
    """
    return _unpacked_bytes([open_volume(path) for path in paths])


def _unpacked_bytes(volumes: Sequence[StoredVolume]) -> int:
    stored = [volume.voxels for volume in volumes]
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in stored if not one.is_mapped)


def open_channels(paths: Sequence[Path], scratch: Scratch | None = None) -> ScanImage:
    """Open an image whose channels are in one file or in several, in RAS.

    Args:
        paths: The files in the order of their channels.
        scratch: Where voxels go that are packed; None: into memory.

    Raises:
        VolumeError: A file cannot be read, is too large for the memory, or the files do not lie
            on one grid.
    """
    return _image_of(_on_one_grid(paths), scratch or Scratch())


def open_stored(path: Path, opened: StoredVolume) -> ScanImage:
    """Open the image of a volume whose header has been read, as :func:`open_channels` does.

    Args:
        path: The volume, for messages.
        opened: The volume, of a file or of memory.

    Raises:
        VolumeError: As there.
    """
    return _image_of([(path, opened, header_of(path, opened))], Scratch())


_File = tuple[Path, StoredVolume, VolumeHeader]
"""A file of an image, opened."""


def _on_one_grid(paths: Sequence[Path]) -> list[_File]:
    """Open files whose voxels are not read until it is known that they lie on one grid."""
    opened = [(path, open_volume(path)) for path in paths]
    files = [(path, volume, header_of(path, volume)) for path, volume in opened]
    first = files[0][2]
    for _, _, header in files[1:]:
        disagreement = same_grid(first, header)
        if disagreement:
            raise VolumeError(f"{header.path} is not on the grid of {first.path}: {disagreement}")
    return files


def _image_of(files: Sequence[_File], scratch: Scratch) -> ScanImage:
    """Read the voxels of files on one grid."""
    first = files[0][2]
    channels = []
    for path, volume, header in files:
        stored = _channels(path, volume, header, scratch)
        turn = axes_between(header.affine, first.affine)
        if not np.array_equal(turn, RAS):
            stored = replace(stored, voxels=_turned(stored.voxels, turn))
        channels.append(stored)
    num_channels = sum(header.num_channels for _, _, header in files)
    return ScanImage(voxels=ImageVoxels(channels), header=replace(first, num_channels=num_channels))


def _channels(
    path: Path, opened: StoredVolume, header: VolumeHeader, scratch: Scratch
) -> StoredChannels:
    stored = np.moveaxis(raw_voxels(path, opened, scratch), 3, 0)
    forget_pages(stored)
    return StoredChannels(
        voxels=_turned(stored, header.stored_orientation),
        slope=opened.voxels.slope,
        inter=opened.voxels.inter,
    )


def turned_to_ras(stored: npt.NDArray[Any], header: VolumeHeader) -> npt.NDArray[Any]:
    """Return a view in RAS of an array as a volume is stored.

    Args:
        stored: Of the volume's stored shape.
        header: The volume's.
    """
    view: npt.NDArray[Any] = nib.apply_orientation(np.asarray(stored), header.stored_orientation)
    return view


def _turned(array: npt.NDArray[Any], orientation: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """Return a view of (C, X, Y, Z) with its axes in another order and direction."""
    turned = nib.apply_orientation(np.moveaxis(np.asarray(array), 0, 3), orientation)
    view: npt.NDArray[Any] = np.moveaxis(turned, 3, 0)
    return view


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
    opened = open_volume(path)
    header = header_of(path, opened)
    if header.num_channels != 1:
        raise VolumeError(
            f"{path} has {header.num_channels} channels; a label map needs one label per voxel"
        )
    # Floats are rounded, compared and converted: each needs a copy.
    copied_bytes = 4 * opened.voxels.dtype.itemsize
    stored = scaled_voxels(path, opened, copied_bytes)[..., 0]
    with explaining_memory(f"cannot read {path}"):
        if stored.dtype.kind == "f":
            stored = _whole_numbers(path, stored)
        canonical = nib.apply_orientation(stored, header.stored_orientation)
        array = np.array(canonical, dtype=_smallest_type(stored), order="C")
    return Volume(array=array, header=header)


def on_grid_of(target: VolumeHeader, volume: Volume) -> Volume:
    """Return a volume with its axes in the order and direction of another on the same grid.

    Both are in RAS already. That differs only where the volume lies so obliquely that the nearest
    anatomical axes are a matter of rounding, near 45 degrees.

    Args:
        target: Header of the other, for which :func:`same_grid` has no objection.
        volume: The volume.
    """
    orientation = axes_between(volume.header.affine, target.affine)
    if np.array_equal(orientation, RAS):
        return volume
    array = volume.array if volume.array.ndim == 4 else volume.array[None]
    array = np.ascontiguousarray(_turned(array, orientation))
    header = replace(target, path=volume.header.path, num_channels=volume.header.num_channels)
    return Volume(array=array if volume.array.ndim == 4 else array[0], header=header)


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
    try:
        write_nifti(path, label_image(labels, header), overwrite)
    except FileExistsError:
        raise
    except OSError as error:
        raise VolumeError(
            f"cannot write {path}: {reason_of(error)}; choose a folder with space that you can "
            "write to"
        ) from error


def label_image(labels: npt.NDArray[Any], header: VolumeHeader) -> nib.Nifti1Image:
    """Return a label map on the grid of the image that it was made from, as nibabel has it.

    Args:
        labels: Integers ``(X, Y, Z)`` in RAS, none negative.
        header: Header of the image.

    Returns:
        A ``Nifti2Image`` where the shape needs one.

    Raises:
        ValueError: The labels do not lie on the grid of the image or are not labels.
    """
    if labels.shape != header.shape:
        raise ValueError(f"labels of shape {labels.shape} for a grid of shape {header.shape}")
    if labels.dtype.kind not in "bui" or labels.min() < 0:
        raise ValueError(f"labels of type {labels.dtype}, {labels.min()} to {labels.max()}")
    restore = nib.orientations.ornt_transform(RAS, header.stored_orientation)
    stored = nib.apply_orientation(labels.astype(_smallest_type(labels), copy=False), restore)
    nifti_header = header.stored_header.copy()
    nifti_header.set_data_dtype(stored.dtype)
    two = isinstance(nifti_header, nib.Nifti2Header)
    # With any other affine nibabel would change both forms.
    affine = nifti_header.get_best_affine()
    return (nib.Nifti2Image if two else nib.Nifti1Image)(stored, affine, nifti_header)


def _whole_numbers(path: Path, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return floats as the integers that they stand for."""
    _refuse_non_finite(path, stored)
    rounded: npt.NDArray[Any] = np.rint(stored)
    wrong = np.abs(stored - rounded) > LABEL_ROUNDING
    wrong |= np.abs(stored) > MAX_INTEGER_IN_FLOAT64
    if wrong.any():
        raise VolumeError(
            f"{path} has {np.count_nonzero(wrong)} voxels that are no integer labels, such as "
            f"{stored[wrong][0]:.7g}; is it an image? a label map holds whole numbers"
        )
    if stored.any() and not rounded.any():  # noise beside labels is rounded away, but not all
        raise VolumeError(
            f"{path} has no integer labels but values up to {np.abs(stored).max():.7g}, such as an "
            "image in small units; a label map holds whole numbers"
        )
    return rounded


def _refuse_non_finite(path: Path, array: npt.NDArray[Any]) -> None:
    num_wrong = array.size - int(np.count_nonzero(np.isfinite(array)))
    if num_wrong:
        raise VolumeError(
            f"{path} has {num_wrong} voxels of {array.size} that are NaN or infinite; replace "
            "them, for example by 0"
        )


def _smallest_type(labels: npt.NDArray[Any]) -> np.dtype[Any]:
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest >= 0:
        return np.dtype(np.min_scalar_type(highest))
    # The negative number that needs the same signed type as the highest label.
    return np.promote_types(np.min_scalar_type(lowest), np.min_scalar_type(min(-1, -highest - 1)))
