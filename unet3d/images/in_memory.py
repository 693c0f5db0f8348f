"""Images that are in memory already: arrays, and what nibabel has made or read."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.spatialimages import SpatialImage

from unet3d.errors import VolumeError, reason_of
from unet3d.images.nifti_like import RAS_FROM_LPS, stored_like_nifti
from unet3d.images.stored import StoredVolume, refuse_unreal
from unet3d.images.voxels import HeldVoxels

NAME = Path("the image")
"""Stands in messages where other volumes have their file."""


def open_image(image: SpatialImage) -> StoredVolume:
    """Return an image as it would be read from a file.

    Args:
        image: Of nibabel's NIfTI or MGH format; its voxels are read where they have not been.

    Raises:
        VolumeError: It has another format, its voxels cannot be read or are no real numbers, or it
            lies where no scan can.
    """
    is_nifti = isinstance(image, nib.Nifti1Pair)  # the others of its kind derive from it
    if not is_nifti and not isinstance(image, nib.MGHImage):
        raise VolumeError(
            f"{NAME} is nibabel's {type(image).__name__}, which may not say where left is; give a "
            "NIfTI or MGH image, or its array with an affine"
        )
    if image.affine is None:
        raise VolumeError(f"{NAME} has no affine, so nobody knows where it lies; give it one")
    voxels = HeldVoxels(_voxels(image))
    refuse_unreal(NAME, voxels.dtype)
    if not is_nifti:
        return stored_like_nifti(NAME, voxels, RAS_FROM_LPS @ image.affine)
    header = image.header
    if not np.allclose(header.get_best_affine(), image.affine):  # which was changed since
        header = header.copy()
        header.set_qform(image.affine, code="aligned")
        header.set_sform(image.affine, code="aligned")
    pixdim = tuple(float(size) for size in header["pixdim"][1:])
    return StoredVolume(header=header, voxels=voxels, affine=image.affine, pixdim=pixdim)


def open_array(voxels: npt.NDArray[Any], affine: npt.ArrayLike) -> StoredVolume:
    """Return an array as it would be read from a file.

    Args:
        voxels: Shape (I, J, K), or (I, J, K, C) with channels.
        affine: (4, 4): from the indices I, J, K to mm, to the right, front and top.

    Raises:
        VolumeError: The voxels are no real numbers, or the affine is none that a scan has.
    """
    try:
        matrix = np.asarray(affine, dtype=np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.shape != (4, 4) or not np.array_equal(matrix[3], (0, 0, 0, 1)):
        raise VolumeError(
            f"the affine of {NAME} is none; give 4 rows of 4 numbers, the last of them 0, 0, 0, 1"
        )
    if voxels.ndim not in (3, 4):
        raise VolumeError(
            f"{NAME} has {voxels.ndim} axes; give an array of 3, or of 4 with the channels last"
        )
    refuse_unreal(NAME, voxels.dtype)
    return stored_like_nifti(NAME, HeldVoxels(voxels), RAS_FROM_LPS @ matrix)


def _voxels(image: SpatialImage) -> npt.NDArray[Any]:
    """Return the voxels of an image, read where its file has not been."""
    try:
        return np.asanyarray(image.dataobj)
    except MemoryError:  # which the caller explains
        raise
    except Exception as error:  # a damaged file can raise anything in nibabel
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise VolumeError(
            f"the voxels of {NAME} cannot be read: {' '.join(reason.split())}"
        ) from error
