"""One DICOM slice of a volume: its header, checked by a model, and its pixels.

GDCM, through which SimpleITK reads DICOM, hangs on 8 of 1,000 slices with a few damaged bytes,
makes up pixels if a file has fewer than its header says, and accepts contradictory headers. So this
module parses the file itself: the parser only moves forward and never reads beyond the end of the
file. GDCM is used only to decompress the pixels of files that have passed the parser.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import times
from unet3d.inputs.plain_data import printable, validated
from unet3d.inputs.reading import open_regular

MARK, MARK_AT = b"DICM", 128
"""Magic bytes of every DICOM file after its preamble, and their offset."""

IMPLICIT, EXPLICIT = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1"
JPEGS = tuple(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91))
RUN_LENGTHS = "1.2.840.10008.1.2.5"
COMPRESSED = (*JPEGS, RUN_LENGTHS)
"""Transfer syntaxes that can be read, by their UIDs."""

TRANSFER_SYNTAX, PIXEL_DATA = 0x00020010, 0x7FE00010
ITEM_GROUP, ITEM, ITEM_END, SEQUENCE_END = 0xFFFE, 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
UNDEFINED = 0xFFFFFFFF
"""Length of an element that extends to a delimiter instead."""

LONG_VRS = set(b"OB OD OF OL OV OW SQ SV UC UN UR UT UV".split())
SHORT_VRS = set(b"AE AS AT CS DA DS DT FD FL IS LO LT PN SH SL SS ST TM UI UL US".split())
"""Value representations whose length fields have four bytes (long) and two bytes (short)."""

MAX_VALUE_BYTES = 2**12

SAME = 1e-3
"""Absolute tolerance for direction cosines and for positions in mm; relative tolerance for
spacings."""

DAMAGED = "it is damaged or incomplete: move it out of the folder, or export the series again"


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").strip("\0 ")


def _refuse(raw: bytes) -> None:
    raise ValueError("is present, but cannot be applied")


TEXT = BeforeValidator(_text)
COUNT = BeforeValidator(lambda raw: int.from_bytes(raw[:2], "little"))
NUMBERS = BeforeValidator(lambda raw: _text(raw).split("\\"))
UNUSABLE = Annotated[None, BeforeValidator(_refuse)]
"""These types say how the bytes of an element are read; ``UNUSABLE``: slices with it are
refused."""


class Slice(BaseModel):
    """A slice with a valid header: attributes have DICOM's names, and are read by their tags."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, loc_by_alias=False)

    path: Path
    start: int
    """Offset of the pixels in the file, in bytes."""
    is_compressed: bool
    SeriesDescription: Annotated[str, TEXT] = Field("", alias="0008103E")
    SeriesInstanceUID: Annotated[str, TEXT] = Field("", alias="0020000E")
    SeriesNumber: Annotated[str, TEXT] = Field("", alias="00200011")
    ImagePositionPatient: Annotated[tuple[float, float, float], NUMBERS] = Field(alias="00200032")
    ImageOrientationPatient: Annotated[tuple[float, float, float, float, float, float], NUMBERS] = (
        Field(alias="00200037")
    )
    SamplesPerPixel: Annotated[Literal[1], COUNT] = Field(1, alias="00280002")
    PhotometricInterpretation: Annotated[Literal["MONOCHROME1", "MONOCHROME2"], TEXT] = Field(
        alias="00280004"
    )
    NumberOfFrames: Annotated[Literal["1"], TEXT] = Field("1", alias="00280008")
    Rows: Annotated[PositiveInt, COUNT] = Field(alias="00280010")
    Columns: Annotated[PositiveInt, COUNT] = Field(alias="00280011")
    PixelSpacing: Annotated[tuple[PositiveFloat, PositiveFloat], NUMBERS] = Field(alias="00280030")
    BitsAllocated: Annotated[Literal[8, 16, 32], COUNT] = Field(alias="00280100")
    BitsStored: Annotated[PositiveInt, COUNT] = Field(alias="00280101")
    HighBit: Annotated[int, COUNT] = Field(alias="00280102")
    PixelRepresentation: Annotated[Literal[0, 1], COUNT] = Field(alias="00280103")
    RescaleIntercept: Annotated[float, TEXT] = Field(0.0, alias="00281052")
    RescaleSlope: Annotated[float, TEXT] = Field(1.0, alias="00281053")
    ModalityLUTSequence: UNUSABLE = Field(None, alias="00283000")
    FloatPixelData: UNUSABLE = Field(None, alias="7FE00008")
    DoubleFloatPixelData: UNUSABLE = Field(None, alias="7FE00009")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Slice":
        if not self.HighBit + 1 == self.BitsStored <= self.BitsAllocated:
            raise ValueError(
                f"has BitsStored {self.BitsStored} and HighBit {self.HighBit} of "
                f"{self.BitsAllocated} bits"
            )
        if not np.allclose(self.directions.T @ self.directions, np.eye(2), atol=SAME):
            raise ValueError("has an ImageOrientationPatient that is not at right angles")
        if self.RescaleSlope == 0:
            raise ValueError("has the RescaleSlope 0")
        if self.is_compressed and self.PhotometricInterpretation == "MONOCHROME1":
            raise ValueError("has compressed MONOCHROME1, which GDCM inverts")
        return self

    @property
    def title(self) -> str:
        """The name of the slice's series, for messages."""
        return printable(self.SeriesDescription or f"series {self.SeriesNumber}")

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and rows."""
        return self.Columns, self.Rows

    @property
    def spacing_mm(self) -> tuple[float, float]:
        """Distance of neighbouring columns, and of neighbouring rows."""
        return self.PixelSpacing[1], self.PixelSpacing[0]

    @property
    def directions(self) -> npt.NDArray[np.float64]:
        """(3, 2): unit vectors along a row and along a column, in LPS."""
        return np.reshape(self.ImageOrientationPatient, (2, 3)).T

    @property
    def scale(self) -> tuple[float, float]:
        """Slope and intercept to apply to pixels; GDCM applies them to compressed pixels itself."""
        return (1.0, 0.0) if self.is_compressed else (self.RescaleSlope, self.RescaleIntercept)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the pixels as :func:`read_pixels` returns them."""
        if self.is_compressed and (self.RescaleSlope, self.RescaleIntercept) != (1, 0):
            return np.dtype(np.float32)
        return np.dtype(f"<{'ui'[self.PixelRepresentation]}{self.BitsAllocated // 8}")


TAGS = {field.alias for field in Slice.model_fields.values() if field.alias}


def read_slice(path: Path) -> Slice:
    """Read the header of a slice; VolumeError if the file is damaged or the slice unusable."""
    try:
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            syntax, values, pixels = _elements(path, content)
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}; {DAMAGED}") from error
    except (ValueError, struct.error, RecursionError) as error:
        raise VolumeError(f"cannot read the header of {path}; {DAMAGED}") from error
    is_compressed = syntax in COMPRESSED
    try:
        place = {"path": path, "start": pixels.start, "is_compressed": is_compressed}
        one = validated(Slice, {**values, **place})
    except ValueError as error:
        raise VolumeError(
            f"{path} is not a usable slice: {error}; move it out of the folder, or convert "
            "the series to NIfTI, as with dcm2niix"
        ) from error
    num_bytes = 1 if is_compressed else math.prod(one.shape) * one.dtype.itemsize
    if pixels.stop - pixels.start < num_bytes:
        raise VolumeError(f"{path} ends before the last of {times(one.shape)} pixels; {DAMAGED}")
    return one


def _elements(path: Path, content: mmap.mmap) -> tuple[str, dict[str, bytes], slice]:
    """Return the UID of the transfer syntax, values by their tags, and the bytes of the pixels."""
    place = MARK_AT + len(MARK)
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
        if f"{tag:08X}" in TAGS and place > start:
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
        # Elements inside a value of unknown type (UN) have no explicit type.
        inside, mark = is_explicit and vr != b"UN", ITEM_END if tag == ITEM else SEQUENCE_END
        inner, end = 0, start
        while inner != mark:
            inner, _, end = _element(content, end, inside)
        return tag, start, end
    if start + length > len(content):
        raise ValueError("a value reaches beyond the end of the file")
    return tag, start, start + length


def read_pixels(one: Slice) -> npt.NDArray[Any]:
    """Return the pixels of a slice, (columns, rows); only compressed pixels are scaled, by GDCM."""
    if one.is_compressed:
        return _decompressed(one)
    try:
        with open_regular(one.path) as file:
            pixels = np.fromfile(file, one.dtype, math.prod(one.shape), offset=one.start)
        pixels = pixels.reshape(one.shape[::-1]).T
    except (OSError, ValueError) as error:
        raise VolumeError(f"cannot read {one.path}: it has changed; run again") from error
    unused = one.BitsAllocated - one.BitsStored
    if unused:  # the unused high bits may hold anything
        pixels = pixels << unused >> unused
    return pixels


def _decompressed(one: Slice) -> npt.NDArray[Any]:
    """Return decompressed pixels, (columns, rows), which GDCM has scaled."""
    import SimpleITK as sitk  # takes half a second

    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        pixels = sitk.GetArrayFromImage(sitk.ReadImage(str(one.path), imageIO="GDCMImageIO"))
        if pixels.shape != (1, *one.shape[::-1]):
            raise ValueError("the compressed image has another shape")
        turned: npt.NDArray[Any] = pixels[0].T
    except (RuntimeError, ValueError) as error:  # ITK and GDCM raise only RuntimeError
        raise VolumeError(f"cannot decompress the pixels of {one.path}; {DAMAGED}") from error
    return turned
