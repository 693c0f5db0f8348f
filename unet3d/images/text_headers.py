"""The text at the beginning of NRRD files and MetaImages.

A module of its own, because a MetaImage may have its voxels in a second file, which the search for
volumes must know.
"""

import re
from pathlib import Path

from unet3d.errors import VolumeError, reason_of
from unet3d.inputs.reading import open_regular

MAX_HEADER_BYTES = 2**20
"""Headers with the key/value pairs of hundreds of segments are shorter."""

NRRD_HEADER = re.compile(rb"NRRD000.*?\n\r?\n", re.DOTALL)
META_HEADER = re.compile(
    rb"[ \t]*\w+[ \t]*[=:].*?^[ \t]*ElementDataFile[ \t]*[=:][^\n]*\n",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
FIELD = re.compile(r"([^#:=]+)(?::(?!=)|=)(.*)")
"""``name: value`` of NRRD, whose ``name:=value`` is a remark, or ``name = value`` of MetaImage."""


def read_text_header(path: Path, is_nrrd: bool) -> tuple[dict[str, str], int]:
    """Return the fields of a header, by names in lower case without spaces, and its length."""
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
    """Return the second file of a MetaImage, whether it exists or not, or None if it has one file.

    Also None if the header cannot be read, or names anything else than one file beside it.
    """
    try:
        name = read_text_header(path, is_nrrd=False)[0]["elementdatafile"]
    except VolumeError:
        return None
    is_file = name == Path(name).name and name.upper() not in ("", "..", "LOCAL", "LIST")
    return path.with_name(name) if is_file and "%" not in name else None
