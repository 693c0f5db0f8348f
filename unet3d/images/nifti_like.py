"""What a volume of another format looks like to everything that reads: a NIfTI volume."""

from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt

from unet3d.config import Spacing
from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.grids import (
    MIN_SPACING_MM,
    column_lengths,
    corner_tolerance_mm,
    corners_apart_mm,
    is_flat,
)
from unet3d.images.stored import StoredVolume
from unet3d.images.voxels import StoredVoxels

RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""ITK and DICOM count to the patient's left and back, NIfTI to the right and front."""


def stored_like_nifti(
    path: Path,
    voxels: StoredVoxels,
    affine_lps: npt.NDArray[np.float64],
    spacing_mm: Spacing | None = None,
) -> StoredVolume:
    """Return an opened volume whose header is that of a NIfTI file on the same grid.

    Args:
        path: The volume, for messages.
        voxels: Reads the voxels.
        affine_lps: (4, 4): from the indices of a stored voxel to mm, to the left, back and top.
        spacing_mm: Along each stored axis, where the file has it beside the directions; None: that
            of the affine.

    Raises:
        VolumeError: It lies where no NIfTI file can.
    """
    affine = RAS_FROM_LPS @ affine_lps
    shape = (voxels.shape[0], voxels.shape[1], voxels.shape[2])
    with np.errstate(all="ignore"):
        written = affine.astype(np.float32).astype(np.float64)
    lengths = column_lengths(affine)
    is_sound = (
        np.isfinite(written).all() and lengths.min() >= MIN_SPACING_MM and not is_flat(affine)
    )
    # Segmentations are written in single precision, which must tell neighbouring voxels apart.
    tolerance_mm = corner_tolerance_mm(affine, shape, lengths.tolist()) if is_sound else 0.0
    if not is_sound or corners_apart_mm(affine, written, shape) > tolerance_mm:
        raise VolumeError(
            f"{path} has an affine that no scan has: it begins at {times(affine[:3, 3])} mm, and "
            f"its spacing is {times(lengths)} mm; fix its header"
        )
    two = max(voxels.shape) > np.iinfo(np.int16).max
    header = nib.Nifti2Header() if two else nib.Nifti1Header()
    header.set_data_shape(voxels.shape)
    header.set_xyzt_units("mm")
    header.set_qform(affine, code="scanner")
    header.set_sform(affine, code="scanner")
    # Not column_lengths, which may miss the last bit: this is how ITK has the spacing of NRRD.
    pixdim = spacing_mm or np.sqrt(np.square(affine[:3, :3]).sum(axis=0)).tolist()
    return StoredVolume(header=header, voxels=voxels, affine=affine, pixdim=tuple(pixdim))
