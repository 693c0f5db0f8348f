"""Opens NRRD files and MetaImages; one model validates the headers of both formats.

ITK trusts a file: a header can crash the process or name any file of the system, a missing spacing
becomes 1 mm, and damaged compressed voxels are read without an error. So headers are read here, and
:func:`~unet3d.images.source.source_in_file` maps or unpacks voxels if the file size fits.
"""

import logging
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from nibabel.affines import voxel_sizes
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field

from unet3d.errors import VolumeError, reason_of, some
from unet3d.images.geometry import RAS_FROM_LPS, Affine, geometry_of_affine
from unet3d.images.source import AS_STATED, Packing, Reading, Source, beginning_of, source_in_file
from unet3d.images.units import unit_mm
from unet3d.inputs.plain_data import printable, shown, validated
from unet3d.inputs.reading import open_regular

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**20
"""Largest header: even the key/value pairs of hundreds of segments are shorter."""

NRRD_HEADER = re.compile(rb"NRRD000.*?\n\r?\n", re.DOTALL)
META_HEADER = re.compile(
    rb"[ \t]*\w+[ \t]*[=:].*?^[ \t]*ElementDataFile[ \t]*[=:][^\n]*\n",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
FIELD = re.compile(r"([^#:=]+)(?::(?!=)|=)(.*)")
"""``name: value`` of NRRD, where ``name:=value`` is a comment, or ``name = value`` of MetaImage."""

TYPES = {
    **dict.fromkeys(("signed char", "int8", "int8_t", "met_char"), "i1"),
    **dict.fromkeys(("uchar", "unsigned char", "uint8", "uint8_t", "met_uchar"), "u1"),
    **dict.fromkeys(("short", "short int", "signed short", "signed short int"), "i2"),
    **dict.fromkeys(("int16", "int16_t", "met_short"), "i2"),
    **dict.fromkeys(("ushort", "unsigned short", "unsigned short int"), "u2"),
    **dict.fromkeys(("uint16", "uint16_t", "met_ushort"), "u2"),
    **dict.fromkeys(("int", "signed int", "int32", "int32_t", "met_int", "met_long"), "i4"),
    **dict.fromkeys(("uint", "unsigned int", "uint32", "uint32_t", "met_uint", "met_ulong"), "u4"),
    **dict.fromkeys(("longlong", "long long", "long long int", "signed long long"), "i8"),
    **dict.fromkeys(("signed long long int", "int64", "int64_t", "met_long_long"), "i8"),
    **dict.fromkeys(("ulonglong", "unsigned long long", "unsigned long long int"), "u8"),
    **dict.fromkeys(("uint64", "uint64_t", "met_ulong_long"), "u8"),
    **{"float": "f4", "met_float": "f4", "double": "f8", "met_double": "f8"},
}
"""NumPy's names of voxel types, by their names in either format."""

SPACE_KINDS = {"domain", "space", "???", "none"}
"""NRRD's kinds of spatial axes; all others are for colours, vectors, channels or time."""

RAS_FROM_SPACE = {
    **dict.fromkeys(("left-posterior-superior", "lps"), RAS_FROM_LPS),
    **dict.fromkeys(("right-anterior-superior", "ras"), np.eye(4)),
    **dict.fromkeys(("left-anterior-superior", "las"), np.diag([-1.0, 1.0, 1.0, 1.0])),
}
"""Conversion from each space to RAS, by the space's name in NRRD."""


NRRD_ONLY = {
    *("dimension", "sizes", "type", "kinds", "space", "spacings", "spacedirections"),
    *("spaceorigin", "spaceunits", "units", "datafile", "byteskip", "lineskip"),
}


def _unit_mm(text: str) -> float:
    """Return a header's unit of length in mm; 1 if it names none, ValueError if axes differ."""
    units = set(text.replace('"', " ").split()) - {"?", "none", "unknown"}
    lengths_mm = {unit_mm(name) for name in units}
    if len(lengths_mm) > 1 or None in lengths_mm:
        raise ValueError(f"{shown(text)} is not one unit of length, such as mm, for all axes")
    return next(iter(lengths_mm), None) or 1.0


def _one_of(known: Collection[str]) -> AfterValidator:
    def check(text: str) -> str:
        if text not in known:
            raise ValueError(f"{shown(text)} is not one of {some(list(known))}")
        return text

    return AfterValidator(check)


def _kinds(text: str) -> str:
    if not SPACE_KINDS.issuperset(text.split()):
        raise ValueError(f"{shown(text)} are not all spatial axes")
    return text


NUMBERS = BeforeValidator(lambda text: re.findall(r"[^\s(),]+", text))
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Length = Annotated[float, Field(gt=0, le=1e12)]
Size = Annotated[int, Field(gt=0, lt=2**31)]
Point = Annotated[tuple[Number, Number, Number], NUMBERS]
Matrix = Annotated[list[Number], Field(min_length=9, max_length=9), NUMBERS]
Nothing = Literal["", "0"]


def _named(default: Any, *names: str) -> Any:
    """Return a field with its names in files, NRRD's name first."""
    return Field(default, validation_alias=AliasChoices(*names))


class Header(BaseModel):
    """The relevant fields of either format, in lower case without spaces.

    Many are here only to refuse any value except the usual one.
    """

    dimension: Literal["3"] = _named(..., "dimension", "ndims")
    sizes: Annotated[tuple[Size, Size, Size], NUMBERS] = _named(..., "sizes", "dimsize")
    type: Annotated[str, _one_of(TYPES)] = _named(..., "type", "elementtype")
    endian: Literal["", "little", "big"] = ""
    is_big_endian: bool = _named(False, "binarydatabyteordermsb", "elementbyteordermsb")
    encoding: Literal["raw", "gzip", "gz"]
    compresseddata: bool = False
    binarydata: Literal["true", "t", "1"]
    datafile: Nothing = ""
    byteskip: Nothing = ""
    lineskip: Nothing = ""
    headersize: Nothing = ""
    elementnumberofchannels: Literal["1"] = "1"
    elementtointensityfunctionslope: Literal["1", "1.0"] = "1"
    elementtointensityfunctionoffset: Literal["0", "0.0"] = "0"
    kinds: Annotated[str, AfterValidator(_kinds)] = ""
    space: Annotated[str, _one_of(RAS_FROM_SPACE)] = "lps"
    origin: Point = _named((0, 0, 0), "spaceorigin", "offset", "position", "origin")
    directions: Matrix | None = _named(
        None, "spacedirections", "transformmatrix", "orientation", "rotation"
    )
    spacing: Annotated[tuple[Length, Length, Length], NUMBERS] | None = _named(
        None, "spacings", "elementspacing", "elementsize"
    )
    unit_mm: Annotated[float, BeforeValidator(_unit_mm)] = _named(
        1.0, "spaceunits", "units", "distanceunits"
    )


def members(path: Path) -> tuple[Path, ...]:
    """Return a file and, for a MetaImage with a separate file of voxels, that file."""
    voxels = None if path.suffix.lower() == ".nrrd" else meta_data_file(path)
    # pathlib would raise for a long name
    return (path, voxels) if voxels is not None and os.path.isfile(voxels) else (path,)


def open_file(path: Path, reading: Reading = AS_STATED) -> Source:
    """Read and validate the header of an NRRD file or a MetaImage, but not its voxels."""
    beginning_of(path)
    is_nrrd = path.suffix.lower() == ".nrrd"
    fields, start = read_text_header(path, is_nrrd)
    file = None if is_nrrd else meta_data_file(path)
    name = fields.get("elementdatafile", "LOCAL")
    if file is None and name.upper() != "LOCAL":
        raise VolumeError(
            f'{path} names "{printable(name)}" as the file of its voxels; only one file in the '
            "same folder can be used: save the volume as .mha"
        )
    if file is not None:
        if not os.path.exists(file):  # pathlib would raise for a long name
            raise VolumeError(
                f"{path} lacks the file of its voxels, {printable(file.name)}; a volume needs both "
                "files"
            )
        beginning_of(file)
    found = {key: text.lower() for key, text in fields.items()}
    if is_nrrd:
        found["binarydata"] = "true"
    else:  # in a MetaImage, fields with NRRD's names have no meaning
        found = {key: text for key, text in found.items() if key not in NRRD_ONLY}
        found.update(encoding="raw", endian="little")
    try:
        header = validated(Header, found)
        affine, spacing_mm = _placed(header, is_nrrd)
    except ValueError as error:
        raise VolumeError(
            f"{path} has a header that cannot be used: {error}; save it as one file with three "
            "spatial axes and one number per voxel, raw or compressed by gzip"
        ) from error
    is_anatomical = header.directions is not None and not (is_nrrd and "space" not in fields)
    if not is_anatomical:
        logger.warning(
            "%s does not state its orientation; its axes are taken as right to left, front to "
            "back, bottom to top",
            path,
        )
    shape = (*header.sizes, 1)
    is_packed = header.encoding != "raw" or header.compresseddata
    is_big_endian = header.endian == "big" or header.is_big_endian
    packing: Packing = ("gzip" if is_nrrd else "zlib") if is_packed else None
    return source_in_file(
        geometry_of_affine(path, shape, affine, spacing_mm, is_anatomical),
        file or path,
        shape,
        np.dtype(f"{'>' if is_big_endian else '<'}{TYPES[header.type]}"),
        packing=packing,
        packed_from=0 if file else start,
    )


def _placed(header: Header, is_nrrd: bool) -> tuple[Affine, list[float]]:
    """Return the affine in RAS and mm, and the spacing."""
    if not header.endian and not TYPES[header.type].endswith("1"):
        raise ValueError("endian is missing")
    affine = np.eye(4)
    if is_nrrd and header.directions is not None:
        affine[:3, :3] = np.reshape(header.directions, (3, 3)).T
        spacing = voxel_sizes(affine)
        affine[:3, 3] = header.origin
    elif header.spacing is not None:
        spacing = np.array(header.spacing)
        directions = np.eye(3) if header.directions is None else header.directions
        affine[:3, :3] = np.reshape(directions, (3, 3)).T * spacing
        if not is_nrrd:  # without directions, NRRD's origin and space mean nothing
            affine[:3, 3] = header.origin
    else:
        raise ValueError("the spacing is missing")
    turn = RAS_FROM_LPS if header.directions is None else RAS_FROM_SPACE[header.space]
    affine = turn @ affine
    affine[:3] *= header.unit_mm
    return affine, (header.unit_mm * spacing).tolist()


def read_text_header(path: Path, is_nrrd: bool) -> tuple[dict[str, str], int]:
    """Return a header's fields, by names in lower case without spaces, and its size in bytes."""
    try:
        with open_regular(path) as file:
            start = file.read(MAX_HEADER_BYTES)
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}") from error
    header = (NRRD_HEADER if is_nrrd else META_HEADER).match(start)
    if header is None:
        raise VolumeError(
            f"cannot read {path}: it does not begin with a whole header of "
            f"{'NRRD' if is_nrrd else 'MetaImage'}; it is damaged, or of another format"
        )
    try:
        text = header[0].decode()
    except UnicodeDecodeError:
        text = header[0].decode("latin-1")
    found = filter(None, map(FIELD.match, text.split("\n")))
    fields = {field[1].lower().replace(" ", "").strip(): field[2].strip() for field in found}
    return fields, header.end()


def meta_data_file(path: Path) -> Path | None:
    """Return the file of voxels that a MetaImage names, whether it exists or not.

    None if there is no second file, if the header cannot be read, or if it names anything but one
    file in the same folder.
    """
    try:
        name = read_text_header(path, is_nrrd=False)[0]["elementdatafile"]
    except VolumeError:
        return None
    is_file = name == Path(name).name and name.upper() not in ("", "..", "LOCAL", "LIST")
    return path.with_name(name) if is_file and "%" not in name else None
