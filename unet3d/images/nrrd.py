"""Opening NRRD files, the format of 3D Slicer."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError
from unet3d.images.packed_voxels import (
    PackedVoxels,
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
from unet3d.images.text_headers import read_nrrd_header
from unet3d.inputs.plain_data import printable

NRRD_TYPES = {
    **dict.fromkeys(("signed char", "int8", "int8_t"), "i1"),
    **dict.fromkeys(("uchar", "unsigned char", "uint8", "uint8_t"), "u1"),
    **dict.fromkeys(
        ("short", "short int", "signed short", "signed short int", "int16", "int16_t"), "i2"
    ),
    **dict.fromkeys(("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"), "u2"),
    **dict.fromkeys(("int", "signed int", "int32", "int32_t"), "i4"),
    **dict.fromkeys(("uint", "unsigned int", "uint32", "uint32_t"), "u4"),
    **dict.fromkeys(
        ("longlong", "long long", "long long int", "signed long long", "signed long long int"), "i8"
    ),
    **dict.fromkeys(("int64", "int64_t"), "i8"),
    **dict.fromkeys(("ulonglong", "unsigned long long", "unsigned long long int"), "u8"),
    **dict.fromkeys(("uint64", "uint64_t"), "u8"),
    "float": "f4",
    "double": "f8",
}
"""NumPy's names of the types of voxels, by those of NRRD."""

LPS_SIGNS = {
    **dict.fromkeys(("left-posterior-superior", "lps"), (1.0, 1.0, 1.0)),
    **dict.fromkeys(("right-anterior-superior", "ras"), (-1.0, -1.0, 1.0)),
    **dict.fromkeys(("left-anterior-superior", "las"), (1.0, -1.0, 1.0)),
}
"""How the coordinates of each space of NRRD become those of LPS."""

NRRD_ENCODINGS = {"raw": False, "gzip": True, "gz": True}
"""Whether each encoding that can be read is compressed."""


def open_nrrd(path: Path) -> StoredVolume:
    """Read the header of an NRRD file, not its voxels, once the file looks sound.

    Args:
        path: The file.

    Raises:
        VolumeError: The file is missing, damaged, or of a kind that cannot be used.
    """
    refuse_irregular(path)
    if path.stat().st_size == 0:
        raise VolumeError(f"{path} is empty (0 bytes)")
    text = read_nrrd_header(path)
    fields = text.fields
    for name in ("datafile", "byteskip", "lineskip"):
        if fields.get(name, "0") != "0":
            raise VolumeError(
                f"{path} has its voxels elsewhere ({name} {printable(fields[name])!r}); save the "
                "volume as one file"
            )
    encoding = fields.get("encoding", "").lower()
    if encoding not in NRRD_ENCODINGS:
        raise VolumeError(f"{path} is encoded as {printable(encoding)!r}; save it as raw or gzip")
    refuse_other_axes(path, fields.get("dimension", ""))
    endian = fields.get("endian", "").lower()
    dtype = type_of(path, NRRD_TYPES, fields.get("type", "").lower(), endian == "big")
    if dtype.itemsize > 1 and endian not in ("big", "little"):
        raise VolumeError(f"{path} has the endian {printable(endian)!r}; it is big or little")
    packed = PackedVoxels(
        file=path,
        start=text.num_bytes,
        shape=shape_of(path, fields.get("sizes", "")),
        dtype=dtype,
        is_compressed=NRRD_ENCODINGS[encoding],
    )
    return opened(path, packed, _nrrd_affine(path, fields))


def _nrrd_affine(path: Path, fields: Mapping[str, str]) -> npt.NDArray[np.float64]:
    """Return where an NRRD volume lies, (4, 4) in LPS and mm."""
    space = fields.get("space", "").lower()
    if space and space not in LPS_SIGNS:
        raise VolumeError(
            f"{path} counts its places in the space {printable(space)!r}, which does not say where "
            "the patient's right, front and top are; save it in left-posterior-superior"
        )
    affine = np.eye(4)
    if "spacedirections" in fields:
        directions = re.findall(r"\(([^()]*)\)", fields["spacedirections"])
        rows = [
            numbers_of(path, "space directions", row.replace(",", " "), 3) for row in directions
        ]
        if len(rows) != 3:
            raise unplaced_error(path, "space directions", fields["spacedirections"])
        affine[:3, :3] = np.transpose(rows)
        origin = fields.get("spaceorigin", "(0,0,0)")
        affine[:3, 3] = numbers_of(path, "space origin", re.sub(r"[(),]", " ", origin), 3)
    else:
        affine[:3, :3] = np.diag(numbers_of(path, "spacings", fields.get("spacings", ""), 3))
    if not space or "spacedirections" not in fields:
        warn_of_orientation(path)
    unit_mm = unit_in_mm(path, fields.get("spaceunits", fields.get("units", "")))
    with np.errstate(all="ignore"):  # what becomes infinite is refused with the affine
        affine[:3] *= unit_mm * np.array(LPS_SIGNS.get(space, (1.0, 1.0, 1.0)))[:, None]
    return affine
