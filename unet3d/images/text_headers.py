"""The text at the beginning of NRRD files and MetaImages.

It is read without SimpleITK, because a MetaImage may have its voxels in a second file, which the
search for volumes must know.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unet3d.errors import VolumeError, reason_of
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

MAX_HEADER_BYTES = 2**20
"""Headers with the key/value pairs of hundreds of segments are shorter."""

META_LINE = re.compile(r"\s*(\w+)\s*[=:]\s*(.*)")


@dataclass(frozen=True, kw_only=True)
class TextHeader:
    """The fields of a header, by names in lower case without spaces, and its length."""

    fields: Mapping[str, str]
    num_bytes: int


def read_nrrd_header(path: Path) -> TextHeader:
    """Read the header of an NRRD file, which ends with an empty line."""
    start = _start(path)
    if not start.startswith(b"NRRD000"):
        raise VolumeError(f"cannot read {path}: it does not begin with an NRRD header")
    fields: dict[str, str] = {}
    position = 0
    while True:
        line, position = _line(path, start, position)
        if not line:
            return TextHeader(fields=fields, num_bytes=position)
        name, separator, value = line.partition(":")
        # "name:=value" is a remark of the program that wrote the file.
        if separator and not line.startswith("#") and not value.startswith("="):
            fields[name.lower().replace(" ", "")] = value.strip()


def read_meta_header(path: Path) -> TextHeader:
    """Read the header of a MetaImage, which ends with the name of the file with the voxels."""
    start = _start(path)
    fields: dict[str, str] = {}
    position = 0
    while "elementdatafile" not in fields:
        line, position = _line(path, start, position)
        match = META_LINE.fullmatch(line)
        if match is None:
            shown = printable(line, 40)
            raise VolumeError(f'cannot read {path}: "{shown}" is no line of a MetaImage header')
        fields[match[1].lower()] = match[2].strip()
    return TextHeader(fields=fields, num_bytes=position)


def meta_data_file(path: Path) -> Path | None:
    """Return the second file of a MetaImage, whether it exists or not, or None if it has one file.

    Also None if the header cannot be read; a name that is not of one file beside it is an error.
    """
    try:
        name = read_meta_header(path).fields["elementdatafile"]
    except VolumeError:
        return None
    if name.upper() == "LOCAL":
        return None
    if not name or name != Path(name).name or name == ".." or "%" in name or name == "LIST":
        raise VolumeError(
            f'{path} names "{printable(name)}" as the file of its voxels; only one file in the '
            "same folder can be used: save the volume as .mha"
        )
    return path.with_name(name)


def _start(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(MAX_HEADER_BYTES)
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}") from error


def _line(path: Path, start: bytes, position: int) -> tuple[str, int]:
    """Return a line of a header, and where the next one begins."""
    end = start.find(b"\n", position)
    if end < 0:
        raise VolumeError(
            f"cannot read {path}: its header does not end within the first {len(start)} bytes; it "
            "is damaged, or of another format"
        )
    try:
        return start[position:end].decode("utf-8").rstrip("\r"), end + 1
    except UnicodeDecodeError:
        return start[position:end].decode("latin-1").rstrip("\r"), end + 1
