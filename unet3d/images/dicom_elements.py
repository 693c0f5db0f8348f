"""The elements of a DICOM file as far as its pixels.

GDCM, by which SimpleITK reads DICOM, hangs on 8 of 1,000 slices with a few damaged bytes, and makes
up pixels where a file has fewer than its header says. So the structure of a file is read
here, where every step goes forward and nothing reaches beyond the file.
"""

import mmap
import struct
from collections.abc import Collection
from pathlib import Path

from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import DICOM_MARK, DICOM_MARK_AT
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

IMPLICIT, EXPLICIT = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1"
JPEGS = tuple(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91))
RUN_LENGTHS = "1.2.840.10008.1.2.5"
COMPRESSED = (*JPEGS, RUN_LENGTHS)
"""Transfer syntaxes that can be read, by their UIDs."""

TRANSFER_SYNTAX, PIXEL_DATA = 0x00020010, 0x7FE00010
ITEM_GROUP, ITEM, ITEM_END, SEQUENCE_END = 0xFFFE, 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
UNDEFINED = 0xFFFFFFFF
"""The length of an element that goes on until an element says that it ends."""

LONG_VRS = set(b"OB OD OF OL OV OW SQ SV UC UN UR UT UV".split())
SHORT_VRS = set(b"AE AS AT CS DA DS DT FD FL IS LO LT PN SH SL SS ST TM UI UL US".split())
"""Types of values whose lengths have four bytes, and two."""

MAX_VALUE_BYTES = 2**12

REMEDY = "it is damaged or incomplete, move it out of the folder, or export the series again"


def read_elements(path: Path, tags: Collection[str]) -> tuple[str, dict[str, bytes], slice]:
    """Read the elements with these tags, in hexadecimal digits, of which none is empty.

    Returns the UID of the transfer syntax; the beginning of each value; and which bytes of the file
    are the pixels or their compressed fragments, none where there are no pixels.
    """
    try:
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _elements(path, content, tags)
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}; {REMEDY}") from error
    except (ValueError, struct.error, RecursionError) as error:
        raise VolumeError(f"cannot read the header of {path}; {REMEDY}") from error


def _elements(
    path: Path, content: mmap.mmap, tags: Collection[str]
) -> tuple[str, dict[str, bytes], slice]:
    place = DICOM_MARK_AT + len(DICOM_MARK)
    syntax = ""
    while content[place : place + 2] == b"\x02\x00":
        tag, start, place = _element(content, place, is_explicit=True)
        if tag == TRANSFER_SYNTAX:
            syntax = content[start:place].decode("latin-1").strip("\0 ")
    if syntax not in (IMPLICIT, EXPLICIT, *COMPRESSED):
        raise VolumeError(
            f"{path} is compressed or stored in a way that cannot be read here (transfer syntax "
            f"{printable(syntax) or 'not named'}); decompress the series, as with gdcmconv --raw"
        )
    values: dict[str, bytes] = {}
    while place < len(content):
        tag, start, place = _element(content, place, is_explicit=syntax != IMPLICIT)
        if f"{tag:08X}" in tags and place > start:
            values.setdefault(f"{tag:08X}", content[start : min(place, start + MAX_VALUE_BYTES)])
        if tag == PIXEL_DATA:
            return syntax, values, slice(start, place)
    return syntax, values, slice(0, 0)


def _element(content: mmap.mmap, place: int, is_explicit: bool) -> tuple[int, int, int]:
    """Return the tag of an element, and where its value begins and ends."""
    group, number, length = struct.unpack_from("<HHI", content, place)
    tag, vr, start = group << 16 | number, b"", place + 8
    if is_explicit and group != ITEM_GROUP:
        vr = content[place + 4 : place + 6]
        if vr in LONG_VRS:
            (length,) = struct.unpack_from("<I", content, place + 8)
            start = place + 12
        elif vr in SHORT_VRS:
            length >>= 16
        else:
            raise ValueError("there is no such type of values")
    if length == UNDEFINED:
        # A value of an unknown type has its elements without types.
        inside = is_explicit and vr != b"UN"
        return tag, start, _end(content, start, inside, ITEM_END if tag == ITEM else SEQUENCE_END)
    if start + length > len(content):
        raise ValueError("a value reaches beyond the end of the file")
    return tag, start, start + length


def _end(content: mmap.mmap, place: int, is_explicit: bool, mark: int) -> int:
    """Return where a sequence or an item ends that goes on until a mark."""
    while True:
        tag, _, place = _element(content, place, is_explicit)
        if tag == mark:
            return place
