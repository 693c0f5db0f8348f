"""Images that are in memory already: arrays, and what nibabel has made or read."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.spatialimages import SpatialImage

from unet3d.errors import VolumeError
from unet3d.volumes.nifti_like import RAS_FROM_LPS, stored_like_nifti
from unet3d.volumes.stored import StoredVolume, refuse_unreal

NAME = Path("the image")
"""Stands in messages where other volumes have their file."""


class HeldVoxels:
    """Voxels in memory, with the attributes of nibabel's proxies."""

    slope, inter, order = 1, 0, "F"

    def __init__(self, voxels: npt.NDArray[Any]) -> None:
        self._voxels = voxels
        self.shape = voxels.shape
        self.dtype = voxels.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._voxels, dtype=dtype, copy=copy)


def open_image(image: SpatialImage) -> StoredVolume:
    """Return an image as it would be read from a file.

    Args:
        image: Of any of nibabel's formats; its voxels are read where they have not been.

    Raises:
        VolumeError: Its voxels are no real numbers, or it lies where no scan can.
    """
    header, affine = image.header, image.affine
    if affine is None:
        raise VolumeError(f"{NAME} has no affine, so nobody knows where it lies; give it one")
    voxels = HeldVoxels(np.asanyarray(image.dataobj))
    refuse_unreal(NAME, voxels.dtype)
    # A header that contradicts the affine is of before that was changed.
    if isinstance(header, nib.Nifti1Header) and np.allclose(header.get_best_affine(), affine):
        pixdim = tuple(float(size) for size in header["pixdim"][1:])
        return StoredVolume(header=header, proxy=voxels, affine=affine, pixdim=pixdim)
    return stored_like_nifti(NAME, voxels, RAS_FROM_LPS @ affine)


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
