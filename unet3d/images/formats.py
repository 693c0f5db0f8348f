"""Opening volumes of every format; from here on each looks like a NIfTI volume."""

from pathlib import Path

from unet3d.errors import VolumeError
from unet3d.images.dicom import open_series
from unet3d.images.files import (
    SUFFIXES,
    is_dicom_file,
    is_meta_file,
    is_nrrd_file,
    is_volume_file,
)
from unet3d.images.itk import open_itk
from unet3d.images.stored import StoredVolume, open_nifti


def open_volume(path: Path) -> StoredVolume:
    """Read the header of a volume, a file or a folder of DICOM slices, and not its voxels."""
    if path.is_dir():
        return open_series(path)
    if not is_volume_file(path):
        if is_dicom_file(path):
            raise VolumeError(
                f"{path} is one DICOM file; name the folder that holds all slices of its series"
            )
        raise VolumeError(
            f"{path} is not named like a volume; known: {', '.join(SUFFIXES)}, and folders of "
            "DICOM slices"
        )
    return open_itk(path) if is_nrrd_file(path) or is_meta_file(path) else open_nifti(path)
