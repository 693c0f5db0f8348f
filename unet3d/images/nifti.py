"""Opening NIfTI and MGH volumes, in files or in memory of nibabel's."""

import os
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from isal import igzip
from nibabel.spatialimages import SpatialImage

from unet3d.errors import VolumeError
from unet3d.images.file_voxels import source_in_file
from unet3d.images.files import PARTNERS, members, times, volume_suffix
from unet3d.images.geometry import Geometry, geometry_of_affine, geometry_of_nifti
from unet3d.images.source import Source, beginning_of, unreadable, whole_axes

IN_MEMORY = Path("the image")
"""Stands in messages where other images have their file."""

GZIP_MARK = b"\x1f\x8b"

HEADER_BYTES = 540
"""Size of the larger of the two NIfTI headers."""

MAX_AXES = 7
"""What the NIfTI format has room for."""


def open_nifti(path: Path) -> Source:
    """Read the header of a NIfTI or MGH volume, not its voxels, once the file looks sound."""
    files = members(path)
    if volume_suffix(path) in PARTNERS and len(files) == 1 and os.path.isfile(path):
        partner = f"{path.stem}{PARTNERS[volume_suffix(path)]}"
        raise VolumeError(f"{path} lacks its partner {partner}; a pair needs both files")
    # Names of files may lie.
    is_packed = {file: beginning_of(file) == GZIP_MARK for file in files}
    try:
        with np.errstate(all="ignore"):  # NaN and infinity are refused with the geometry
            return _open(path, is_packed)
    except VolumeError:
        raise
    except Exception as error:  # a damaged header can raise anything in nibabel
        raise unreadable(path, error) from error


def _open(path: Path, is_packed: dict[Path, bool]) -> Source:
    header_file, *_, voxel_file = (*is_packed, *is_packed)
    opened: Any = igzip.open if is_packed[header_file] else open
    with opened(header_file, "rb") as file:
        start = file.read(HEADER_BYTES)
    is_mgh = volume_suffix(path) in (".mgz", ".mgh")
    format_ = nib.MGHImage if is_mgh else _nifti_format(path, start, header_file != voxel_file)
    size = format_.header_class.template_dtype.itemsize
    header = format_.header_class(start if is_mgh else start[:size])
    proxy = format_.ImageArrayProxy(str(voxel_file), header)  # which knows the format's rules
    shape = whole_axes(path, tuple(int(size) for size in proxy.shape))
    affine = np.array(header.get_best_affine(), np.float64)
    if is_mgh:
        geometry = geometry_of_affine(path, shape, affine)
    else:
        geometry = geometry_of_nifti(path, shape, header, affine)
    return source_in_file(
        geometry,
        voxel_file,
        shape,
        proxy.dtype,
        packing="gzip" if is_packed[voxel_file] else None,
        offset=int(proxy.offset),
        order="F" if proxy.order == "F" else "C",
        slope=float(proxy.slope),
        inter=float(proxy.inter),
    )


def _nifti_format(path: Path, start: bytes, is_pair: bool) -> Any:
    formats = (nib.Nifti1Pair, nib.Nifti2Pair) if is_pair else (nib.Nifti1Image, nib.Nifti2Image)
    for format_ in formats:
        if not format_.header_class.may_contain_header(start):
            continue
        size = format_.header_class.template_dtype.itemsize
        header = format_.header_class(start[:size], check=False)  # nibabel's check repairs it
        num_axes = int(header["dim"][0])
        if not 1 <= num_axes <= MAX_AXES:
            raise VolumeError(f"{path} claims to have {num_axes} axes; it is damaged")
        if np.isinf([header["scl_slope"], header["scl_inter"]]).any():
            raise VolumeError(f"{path} scales its voxels by infinity; fix its header")
        spacing = header["pixdim"][1 : 1 + min(3, num_axes)]
        if int(header["sform_code"]) <= 0 and not (np.abs(spacing) > 0).all():
            raise VolumeError(f"{path} has the spacing {times(spacing)} mm; fix its header")
        return format_
    raise VolumeError(
        f"cannot read {path}: it does not begin with a NIfTI header; convert Analyze 7.5, which "
        "has no orientation, to NIfTI"
    )


def open_nibabel(image: SpatialImage) -> Source:
    """Return an image of nibabel's NIfTI or MGH format as it would be read from a file."""
    is_nifti = isinstance(image, nib.Nifti1Pair)  # the others of its kind derive from it
    if not is_nifti and not isinstance(image, nib.MGHImage):
        raise VolumeError(
            f"{IN_MEMORY} is nibabel's {type(image).__name__}, which may not say where left is; "
            "give a NIfTI or MGH image, or its array with an affine"
        )
    if image.affine is None:
        raise VolumeError(f"{IN_MEMORY} has no affine, so nobody knows where it lies; give it one")
    try:
        voxels = np.asanyarray(image.dataobj)
    except MemoryError:  # which the caller explains
        raise
    except Exception as error:  # a damaged file can raise anything in nibabel
        raise unreadable(IN_MEMORY, error) from error
    if not is_nifti:
        return open_array(voxels, image.affine)
    shape = whole_axes(IN_MEMORY, voxels.shape)
    header = image.header
    if not np.allclose(header.get_best_affine(), image.affine):  # which was changed since
        header = header.copy()
        header.set_qform(image.affine, code="aligned")
        header.set_sform(image.affine, code="aligned")
    return _held(voxels, geometry_of_nifti(IN_MEMORY, shape, header, image.affine))


def open_array(voxels: npt.NDArray[Any], affine: npt.ArrayLike) -> Source:
    """Return an array (I, J, K) or (I, J, K, C) with an affine, in mm to the right, front, top."""
    try:
        matrix = np.asarray(affine, dtype=np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.shape != (4, 4) or not np.array_equal(matrix[3], (0, 0, 0, 1)):
        raise VolumeError(
            f"the affine of {IN_MEMORY} is none; give 4 rows of 4 numbers, the last of them 0, 0, "
            "0, 1"
        )
    if voxels.ndim not in (3, 4):
        raise VolumeError(
            f"{IN_MEMORY} has {voxels.ndim} axes; give an array of 3, or of 4 with the channels "
            "last"
        )
    shape = whole_axes(IN_MEMORY, voxels.shape)
    return _held(voxels, geometry_of_affine(IN_MEMORY, shape, matrix))


def _held(voxels: npt.NDArray[Any], geometry: Geometry) -> Source:
    shape = (*geometry.stored_shape, geometry.num_channels)
    return Source(geometry, voxels.dtype, lambda scratch: voxels.reshape(shape))
