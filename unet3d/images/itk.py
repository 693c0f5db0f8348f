"""Opening NRRD files and MetaImages, whose headers SimpleITK reads.

ITK trusts a file: one header ends the process, another names any file of the system, a missing
spacing becomes 1 mm, and damaged compressed voxels are read without an error. So SimpleITK gets a
copy of the header that has only the fields named here, each with as many numbers as belong there.
The voxels are mapped or unpacked by the code for NIfTI, once the size of the file fits.
"""

import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.errors import VolumeError
from unet3d.images.file_voxels import Packing, source_in_file
from unet3d.images.geometry import RAS_FROM_LPS, geometry_of_affine
from unet3d.images.source import Source, refuse_irregular
from unet3d.images.text_headers import meta_data_file, read_text_header
from unet3d.inputs.plain_data import printable

logger = logging.getLogger(__name__)

NRRD_VALUES = {
    "dimension": ("3",),
    "encoding": ("raw", "gzip", "gz"),
    "space": (
        *("", "left-posterior-superior", "lps", "right-anterior-superior", "ras"),
        *("left-anterior-superior", "las"),
    ),
    **dict.fromkeys(("datafile", "byteskip", "lineskip"), ("", "0")),
}
META_VALUES = {
    "ndims": ("3",),
    "binarydata": ("true", "t", "1"),
    "headersize": ("", "0"),
    "elementnumberofchannels": ("", "1"),
    "elementtointensityfunctionslope": ("", "1", "1.0"),
    "elementtointensityfunctionoffset": ("", "0", "0.0"),
    "elementtype": (
        *("met_char", "met_uchar", "met_short", "met_ushort", "met_int", "met_uint", "met_long"),
        *("met_ulong", "met_long_long", "met_ulong_long", "met_float", "met_double"),
    ),
}
"""The only values that a volume may have in these fields; "" where a field is left out."""

NRRD_NUMBERS = {"sizes": 3, "spacings": 3, "space directions": 9, "space origin": 3}
META_NUMBERS = {
    **{"DimSize": 3, "ElementSpacing": 3, "ElementSize": 3},
    **{"TransformMatrix": 9, "Orientation": 9, "Rotation": 9},
    **{"Offset": 3, "Position": 3, "Origin": 3},
}
"""How many numbers each field of the geometry has."""

NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"

SPACINGS = {"spacedirections", "spacings", "elementspacing", "elementsize"}
DIRECTIONS = {"spacedirections", "transformmatrix", "orientation", "rotation"}
UNITS = ("spaceunits", "units", "distanceunits")
"""Fields of either format, in lower case and without spaces."""

MAX_NUMBER = 1e12
"""ITK replaces much larger lengths by 1."""

SIZES = r"([1-9][0-9]{0,8}(\s+|$)){3}"
"""ITK shortens larger ones."""

SPACE_KINDS = {"domain", "space", "???", "none"}
"""Kinds of NRRD's axes; every other kind is one of colours, vectors, channels or time."""

MILLIMETRES = {
    **dict.fromkeys(("mm", "millimeter", "millimeters"), 1.0),
    **dict.fromkeys(("um", "µm", "μm", "micron", "microns", "micrometer", "micrometers"), 1e-3),
    **{"cm": 10.0, "m": 1000.0},
}
"""By the units of length that headers name; ITK takes all of them as mm."""


def open_itk(path: Path) -> Source:
    """Read the header of an NRRD file or a MetaImage, not its voxels, once the file looks sound."""
    refuse_irregular(path)
    is_nrrd = path.suffix.lower() == ".nrrd"
    fields, num_bytes = read_text_header(path, is_nrrd)
    _refuse_other_values(path, fields, NRRD_VALUES if is_nrrd else META_VALUES)
    data_file = None if is_nrrd else meta_data_file(path)
    if data_file is not None:
        if not data_file.exists():
            raise VolumeError(
                f"{path} lacks its voxels {data_file.name}; a volume needs both files"
            )
        refuse_irregular(data_file)
    unit_mm = _unit_in_mm(path, fields)
    reader, dtype = _read_by_simpleitk(path, is_nrrd, fields)
    if fields.keys().isdisjoint(DIRECTIONS) or (is_nrrd and "space" not in fields):
        logger.warning(
            "%s does not state its orientation; its axes are taken as right to left, front to "
            "back, bottom to top",
            path,
        )
    orders = ("binarydatabyteordermsb", "elementbyteordermsb")
    is_big_endian = fields.get("endian", "").lower() == "big" or any(
        _is_true(fields, name) for name in orders
    )
    is_packed = fields.get("encoding", "raw").lower() != "raw" or _is_true(fields, "compresseddata")
    start = 0 if data_file else num_bytes
    affine_lps = np.eye(4)
    i, j, k = (unit_mm * spacing for spacing in reader.GetSpacing())
    affine_lps[:3, :3] = np.reshape(reader.GetDirection(), (3, 3)) * (i, j, k)
    affine_lps[:3, 3] = unit_mm * np.array(reader.GetOrigin())
    shape = (*reader.GetSize(), 1)
    geometry = geometry_of_affine(path, shape, RAS_FROM_LPS @ affine_lps, (i, j, k))
    dtype = dtype.newbyteorder(">" if is_big_endian else "<")
    packing: Packing = ("gzip" if is_nrrd else "zlib") if is_packed else None
    return source_in_file(
        geometry, data_file or path, shape, dtype, packing=packing, packed_from=start
    )


def _refuse_other_values(
    path: Path, fields: Mapping[str, str], allowed: Mapping[str, tuple[str, ...]]
) -> None:
    for name, values in allowed.items():
        if fields.get(name, "").lower() not in values:
            raise VolumeError(
                f"{path} has {name} {printable(fields.get(name, ''))!r}, not "
                f"{' or '.join(filter(None, values))}; save it as a volume of three axes and one "
                "number in each voxel, in one file, raw or compressed by gzip"
            )
    kinds = fields.get("kinds", "")
    if not SPACE_KINDS.issuperset(kinds.lower().split()):
        raise VolumeError(
            f"{path} has axes of the kinds {printable(kinds)!r}; only axes of space can be used: "
            "save each channel, component or point in time as a volume of its own"
        )


def _read_by_simpleitk(
    path: Path, is_nrrd: bool, fields: Mapping[str, str]
) -> tuple[Any, np.dtype[Any]]:
    """Return SimpleITK's reader, which has read a copy of the header, and the type of a voxel."""
    import SimpleITK as sitk  # takes half a second

    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    sizes = fields.get("sizes" if is_nrrd else "dimsize", "")
    if not re.fullmatch(SIZES, sizes):
        raise VolumeError(f"{path} claims the shape {printable(sizes)!r}; it is damaged")
    copied = _numbers(path, fields, NRRD_NUMBERS if is_nrrd else META_NUMBERS)
    if is_nrrd:
        first = {"type": fields.get("type", ""), "dimension": "3"}
        if "spacedirections" in fields:
            first["space"] = fields.get("space", "left-posterior-superior")
        else:  # an origin without a space is none
            copied.pop("space origin", None)
        copied = {**first, **copied, "endian": fields.get("endian", ""), "encoding": "raw"}
    else:
        last = {"ElementType": fields["elementtype"], "ElementDataFile": "LOCAL"}
        copied = {"ObjectType": "Image", "NDims": "3", **copied, **last}
    separator = ": " if is_nrrd else " = "
    lines = [f"{name}{separator}{text}\n" for name, text in copied.items() if text]
    reader = sitk.ImageFileReader()
    reader.SetImageIO("NrrdImageIO" if is_nrrd else "MetaImageIO")
    with tempfile.NamedTemporaryFile(suffix=".nrrd" if is_nrrd else ".mha") as file:
        file.write("".join(["NRRD0004\n", *lines, "\n"] if is_nrrd else lines).encode())
        file.flush()
        reader.SetFileName(file.name)
        try:
            reader.ReadImageInformation()
            voxel = sitk.GetArrayFromImage(sitk.Image([1, 1, 1], reader.GetPixelID()))
        except RuntimeError as error:  # every error of ITK
            reason = printable(str(error).splitlines()[-1].partition(": ")[2])
            raise VolumeError(f"cannot read {path}: {reason}; fix its header") from error
    if min(reader.GetSpacing()) <= 0:
        raise _unplaced_error(path, "spacing", str(reader.GetSpacing()))
    return reader, voxel.dtype


def _numbers(path: Path, fields: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, str]:
    """Return the fields of the geometry, each with as many numbers as belong there."""
    if fields.keys().isdisjoint(SPACINGS):
        raise _unplaced_error(path, "spacing", "")
    found = {name: fields.get(name.lower().replace(" ", "")) for name in counts}
    copied = {name: text for name, text in found.items() if text is not None}
    for name, text in copied.items():
        parts = re.findall(r"[^\s(),]+" if name.startswith("space ") else r"\S+", text)
        are_numbers = all(re.fullmatch(NUMBER, part) for part in parts)
        if (
            len(parts) != counts[name]
            or not are_numbers
            or max(map(abs, map(float, parts))) > MAX_NUMBER
        ):
            raise _unplaced_error(path, name, text)
    return copied


def _unplaced_error(path: Path, name: str, text: str) -> VolumeError:
    return VolumeError(
        f"{path} does not say where its voxels lie: its {name} is {printable(text)!r}; fix its "
        "header"
    )


def _unit_in_mm(path: Path, fields: Mapping[str, str]) -> float:
    """Return the unit of length that a header names once, or for each axis; mm if it names none."""
    text = next((fields[name] for name in UNITS if name in fields), "")
    units = set(text.lower().replace('"', " ").split()) - {"?", "none", "unknown"}
    if len(units) > 1 or not units <= MILLIMETRES.keys():
        raise VolumeError(
            f"{path} has the units of length {printable(text)!r}; known are mm, um, cm and m, the "
            "same for all axes"
        )
    return MILLIMETRES[units.pop()] if units else 1.0


def _is_true(fields: Mapping[str, str], name: str) -> bool:
    return fields.get(name, "")[:1].lower() in ("t", "y", "1")
