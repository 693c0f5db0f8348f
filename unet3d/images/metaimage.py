"""Opening MetaImages (.mha, .mhd), the format of ITK."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unet3d.config import Spacing
from unet3d.errors import VolumeError
from unet3d.images.packed_voxels import (
    PackedVoxels,
    number_of,
    numbers_of,
    opened,
    refuse_other_axes,
    shape_of,
    type_of,
    unit_in_mm,
    unplaced_error,
    warn_of_orientation,
)
from unet3d.images.stored import StoredVolume, refuse_irregular
from unet3d.images.text_headers import TextHeader, meta_data_file, read_meta_header
from unet3d.inputs.plain_data import printable

META_TYPES = {
    **{"MET_CHAR": "i1", "MET_UCHAR": "u1", "MET_SHORT": "i2", "MET_USHORT": "u2"},
    **{"MET_INT": "i4", "MET_UINT": "u4", "MET_LONG": "i4", "MET_ULONG": "u4"},
    **{"MET_LONG_LONG": "i8", "MET_ULONG_LONG": "u8", "MET_FLOAT": "f4", "MET_DOUBLE": "f8"},
}
"""The same by those of MetaImage, whose long has four bytes."""


def open_meta(path: Path) -> StoredVolume:
    """Read the header of a MetaImage, not its voxels, once the file looks sound.

    Args:
        path: The file; of one in two files its header.

    Raises:
        VolumeError: The file is missing, damaged, or of a kind that cannot be used.
    """
    refuse_irregular(path)
    if path.stat().st_size == 0:
        raise VolumeError(f"{path} is empty (0 bytes)")
    text = read_meta_header(path)
    fields = text.fields
    if not _is_true(fields.get("binarydata", "False")):
        raise VolumeError(f"{path} has its voxels as text; save it with BinaryData = True")
    slope = fields.get("elementtointensityfunctionslope", "1")
    offset = fields.get("elementtointensityfunctionoffset", "0")
    if (number_of(slope), number_of(offset)) != (1.0, 0.0):
        raise VolumeError(
            f"{path} scales its voxels by {printable(slope)} and {printable(offset)}, which no "
            "reader applies; save it with the intensities that are meant"
        )
    refuse_other_axes(path, fields.get("ndims", ""))
    num_components = fields.get("elementnumberofchannels", "1")
    if num_components != "1":
        raise VolumeError(
            f"{path} has {printable(num_components)} numbers in each voxel, such as colours or "
            "vectors; only one can be used: save each as a volume of its own"
        )
    orders = ("binarydatabyteordermsb", "elementbyteordermsb")
    is_big_endian = any(_is_true(fields.get(name, "False")) for name in orders)
    file, start = _meta_voxels(path, text)
    packed = PackedVoxels(
        file=file,
        start=start,
        shape=shape_of(path, fields.get("dimsize", "")),
        dtype=type_of(path, META_TYPES, fields.get("elementtype", ""), is_big_endian),
        is_compressed=_is_true(fields.get("compresseddata", "False")),
    )
    spacing_mm = _meta_spacing(path, fields)
    return opened(path, packed, _meta_affine(path, fields, spacing_mm), spacing_mm)


def _meta_spacing(path: Path, fields: Mapping[str, str]) -> Spacing:
    """Return the spacing along each stored axis in mm."""
    unit_mm = unit_in_mm(path, fields.get("distanceunits", ""))
    text = fields.get("elementspacing", fields.get("elementsize", ""))
    spacing = numbers_of(path, "ElementSpacing", text, 3)
    if min(spacing) <= 0:
        raise unplaced_error(path, "ElementSpacing", text)
    i, j, k = (number * unit_mm for number in spacing)
    return (i, j, k)


def _meta_affine(
    path: Path, fields: Mapping[str, str], spacing_mm: Spacing
) -> npt.NDArray[np.float64]:
    """Return where a MetaImage lies, (4, 4) in LPS and mm."""
    unit_mm = unit_in_mm(path, fields.get("distanceunits", ""))
    origin = _first_of(fields, ("offset", "position", "origin")) or "0 0 0"
    matrix = _first_of(fields, ("transformmatrix", "orientation", "rotation"))
    if matrix is None:
        warn_of_orientation(path)
    affine = np.eye(4)
    # Each three numbers are the direction of an axis.
    axes = np.reshape(numbers_of(path, "TransformMatrix", matrix or "1 0 0 0 1 0 0 0 1", 9), (3, 3))
    with np.errstate(all="ignore"):
        affine[:3, :3] = axes.T * spacing_mm
        affine[:3, 3] = np.array(numbers_of(path, "Offset", origin, 3)) * unit_mm
    return affine


def _meta_voxels(path: Path, text: TextHeader) -> tuple[Path, int]:
    """Return the file with the voxels of a MetaImage, and where in it they begin."""
    skipped = text.fields.get("headersize", "0")
    if skipped != "0":
        raise VolumeError(
            f"{path} skips {printable(skipped)} bytes before its voxels (HeaderSize); save the "
            "volume as .mha"
        )
    file = meta_data_file(path)
    if file is None:
        return path, text.num_bytes
    if not file.exists():
        raise VolumeError(f"{path} lacks its voxels {file.name}; a volume needs both files")
    refuse_irregular(file)
    return file, 0


def _first_of(fields: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((fields[name] for name in names if name in fields), None)


def _is_true(text: str) -> bool:
    return text[:1].lower() in ("t", "1", "y")
