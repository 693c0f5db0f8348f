"""Reads NIfTI and MGH volumes, from files or from nibabel images in memory; writes NIfTI."""

import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from isal import igzip, igzip_threaded
from nibabel.spatialimages import SpatialImage
from nibabel.volumeutils import array_to_file

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError
from unet3d.images.files import times, volume_suffix
from unet3d.images.geometry import Geometry, geometry_of_affine, geometry_of_nifti
from unet3d.images.label_names import name_labels
from unet3d.images.scratch import PART_BYTES, forget_pages
from unet3d.images.source import (
    AS_STATED,
    GZIP_MARK,
    Reading,
    Source,
    beginning_of,
    source_in_file,
    unreadable,
    whole_axes,
)

# nibabel logs each oddity of a header to stderr without naming the file. It also raises the errors
# that it cannot repair, and this module reports them.
logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)

IN_MEMORY = Path("the image")
"""Names an image without a file in messages."""

PARTNERS = {".hdr": ".img", ".img": ".hdr"}
"""For each file of a pair (header, voxels), by its ending: the ending of the other file."""

HEADER_BYTES = 540
"""Size of the larger of the two NIfTI headers."""

MAX_AXES = 7
"""Most axes that the NIfTI format allows."""

PACKING_LEVEL = 2
"""Level of ISA-L, which compresses label maps like zlib's level 1, five times as fast."""

PACKING_THREADS = 4
"""More threads would compress faster than the disk writes."""


def members(path: Path) -> tuple[Path, ...]:
    """Return the header and the voxel file of a pair if both exist, else the file alone."""
    partner_suffix = PARTNERS.get(volume_suffix(path))
    if partner_suffix is None:
        return (path,)
    # A partner whose ending is in the same letter case comes first.
    spellings = (partner_suffix, partner_suffix.upper())
    for suffix in reversed(spellings) if path.suffix.isupper() else spellings:
        partner = path.with_suffix(suffix)
        if os.path.isfile(partner):  # pathlib would raise for a long name
            return (path, partner) if partner_suffix == ".img" else (partner, path)
    return (path,)


def open_file(path: Path, reading: Reading = AS_STATED) -> Source:
    """Read and check the header of a NIfTI or MGH volume, but not its voxels."""
    files = members(path)
    if volume_suffix(path) in PARTNERS and len(files) == 1 and os.path.isfile(path):
        partner = f"{path.stem}{PARTNERS[volume_suffix(path)]}"
        raise VolumeError(f"{path} lacks its partner {partner}; a pair needs both files")
    # The ending does not decide whether a file is compressed.
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
    proxy = format_.ImageArrayProxy(str(voxel_file), header)  # applies the format's rules
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
        header = format_.header_class(start[:size], check=False)  # the check would repair it
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
        f"cannot read {path}: it does not begin with a NIfTI header; if it is of another format, "
        "such as Analyze 7.5, convert it to NIfTI"
    )


def open_nibabel(image: SpatialImage) -> Source:
    """Return an image of nibabel's NIfTI or MGH format as it would be read from a file."""
    is_nifti = isinstance(image, nib.Nifti1Pair)  # nibabel's other NIfTI classes derive from it
    if not is_nifti and not isinstance(image, nib.MGHImage):
        raise VolumeError(
            f"{IN_MEMORY} is a nibabel {type(image).__name__}, which may not define left and "
            "right; "
            "give a NIfTI or MGH image, or its array with an affine"
        )
    if image.affine is None:
        raise VolumeError(f"{IN_MEMORY} has no affine, so its position is unknown; give it one")
    try:
        voxels = np.asanyarray(image.dataobj)
    except MemoryError:  # the caller explains it
        raise
    except Exception as error:  # a damaged file can raise anything in nibabel
        raise unreadable(IN_MEMORY, error) from error
    if not is_nifti:
        return open_array(voxels, image.affine)
    shape = whole_axes(IN_MEMORY, voxels.shape)
    header = image.header
    if not np.allclose(header.get_best_affine(), image.affine):  # changed after loading
        header = header.copy()
        header.set_qform(image.affine, code="aligned")
        header.set_sform(image.affine, code="aligned")
    return _held(voxels, geometry_of_nifti(IN_MEMORY, shape, header, image.affine))


def open_array(voxels: npt.NDArray[Any], affine: npt.ArrayLike) -> Source:
    """Return an array (I, J, K) or (I, J, K, C) with an affine to mm in RAS as a source."""
    try:
        matrix = np.asarray(affine, dtype=np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.shape != (4, 4) or not np.array_equal(matrix[3], (0, 0, 0, 1)):
        raise VolumeError(
            f"the affine of {IN_MEMORY} is invalid; give 4 rows of 4 numbers, the last row 0, 0, "
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


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K) with the header of a scan."""
    write_nifti(path, nibabel_labels(stored, geometry, names))


def nibabel_labels(
    stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> nib.Nifti1Image:
    """Return labels (I, J, K) as a nibabel image, a ``Nifti2Image`` if the shape needs one.

    It has the affine, qform and sform with their codes, spacing and units of the scan's file, and
    the names of labels (:mod:`unet3d.images.label_names`).
    """
    header = geometry.nifti_header.copy()
    header.set_data_dtype(stored.dtype)
    if names:
        name_labels(header, names)
    two = isinstance(header, nib.Nifti2Header)
    # Given any other affine, nibabel would change qform and sform.
    affine = header.get_best_affine()
    return (nib.Nifti2Image if two else nib.Nifti1Image)(stored, affine, header)


def write_nifti(path: Path, image: Any) -> None:
    """Write a nibabel image as a NIfTI file."""
    if volume_suffix(path) != ".nii.gz":
        # nibabel's save would change the letter case of the ending.
        image.to_file_map({"image": nib.FileHolder(filename=str(path))})
        return
    image.update_header()
    header, start = image.header.copy(), io.BytesIO()
    header.set_slope_inter(1, 0)
    header.write_to(start)
    threads = min(PACKING_THREADS, num_cores())
    with (
        path.open("wb") as file,
        igzip_threaded.open(file, "wb", PACKING_LEVEL, threads=threads) as packed,  # type: ignore[no-untyped-call]
    ):
        # Without offset=None, nibabel would ask a compressed file for its position.
        packed.write(start.getvalue().ljust(header.get_data_offset(), b"\0"))
        voxels = np.asanyarray(image.dataobj)
        number = max(1, PART_BYTES * voxels.shape[-1] // max(1, voxels.nbytes))
        for first in range(0, voxels.shape[-1], number):  # mapped voxels may exceed the memory
            part = voxels[..., first : first + number]
            array_to_file(part, packed, header.get_data_dtype(), offset=None)
            forget_pages(voxels)
