"""One DICOM slice of a volume: its header, checked by a model, and its pixels.

Compressed pixels are unpacked by SimpleITK, once the structure of the file is known to be sound.
"""

import math
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

from unet3d.errors import VolumeError
from unet3d.images.dicom_elements import COMPRESSED, REMEDY, read_elements
from unet3d.images.files import times
from unet3d.inputs.plain_data import validated
from unet3d.inputs.reading import open_regular

SAME_DIRECTION = 1e-3
"""Difference of two direction cosines that are one."""


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").strip("\0 ")


def _refuse(raw: bytes) -> None:
    raise ValueError("is there, which cannot be applied")


TEXT = BeforeValidator(_text)
COUNT = BeforeValidator(lambda raw: int.from_bytes(raw[:2], "little"))
NUMBERS = BeforeValidator(lambda raw: _text(raw).split("\\"))
UNUSABLE = Annotated[None, BeforeValidator(_refuse)]
"""What the bytes of an element stand for."""


class Slice(BaseModel):
    """A slice whose header can be used: attributes by their names in DICOM, read by their tags."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, loc_by_alias=False)

    path: Path
    start: int
    """The byte at which the pixels begin."""
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
        if not np.allclose(self.directions.T @ self.directions, np.eye(2), atol=SAME_DIRECTION):
            raise ValueError("has an ImageOrientationPatient that is not at right angles")
        if self.RescaleSlope == 0:
            raise ValueError("has the RescaleSlope 0")
        if self.is_compressed and self.PhotometricInterpretation == "MONOCHROME1":
            raise ValueError("has compressed MONOCHROME1, which GDCM inverts")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and rows."""
        return self.Columns, self.Rows

    @property
    def spacing_mm(self) -> tuple[float, float]:
        """Distance of columns, and of rows."""
        return self.PixelSpacing[1], self.PixelSpacing[0]

    @property
    def directions(self) -> npt.NDArray[np.float64]:
        """(3, 2): where a row runs to and where a column runs to, in LPS, of length 1."""
        return np.reshape(self.ImageOrientationPatient, (2, 3)).T

    @property
    def scale(self) -> tuple[float, float]:
        """What pixels are multiplied by, and what is added; GDCM does it with compressed ones."""
        return (1.0, 0.0) if self.is_compressed else (self.RescaleSlope, self.RescaleIntercept)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the pixels, not scaled but for compressed ones."""
        if self.is_compressed and (self.RescaleSlope, self.RescaleIntercept) != (1, 0):
            return np.dtype(np.float32)
        return np.dtype(f"<{'ui'[self.PixelRepresentation]}{self.BitsAllocated // 8}")


TAGS = {field.alias for field in Slice.model_fields.values() if field.alias}


def read_slice(path: Path) -> Slice:
    """Read the header of a slice."""
    syntax, values, pixels = read_elements(path, TAGS)
    is_compressed = syntax in COMPRESSED
    try:
        place = {"path": path, "start": pixels.start, "is_compressed": is_compressed}
        one = validated(Slice, {**values, **place})
    except ValueError as error:
        raise VolumeError(
            f"{path} is no slice that can be used: {error}; move it out of the folder, or convert "
            "the series to NIfTI, as with dcm2niix"
        ) from error
    num_bytes = 1 if is_compressed else math.prod(one.shape) * one.dtype.itemsize
    if pixels.stop - pixels.start < num_bytes:
        raise VolumeError(f"{path} ends before the last of {times(one.shape)} pixels; {REMEDY}")
    return one


def read_pixels(one: Slice) -> npt.NDArray[Any]:
    """Return the pixels of a slice, (columns, rows), as they are stored or GDCM has scaled them."""
    if one.is_compressed:
        return _decompressed(one)
    try:
        with open_regular(one.path) as file:
            file.seek(one.start)
            content = file.read(math.prod(one.shape) * one.dtype.itemsize)
        pixels = np.frombuffer(content, one.dtype).reshape(one.shape[::-1]).T
    except (OSError, ValueError) as error:
        raise VolumeError(f"cannot read {one.path}: it has changed; run again") from error
    unused = one.BitsAllocated - one.BitsStored
    if unused:  # their content means something else, or nothing
        pixels = pixels << unused >> unused
    return pixels


def _decompressed(one: Slice) -> npt.NDArray[Any]:
    """Return compressed pixels, (columns, rows), which GDCM scales."""
    import SimpleITK as sitk  # takes half a second

    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        pixels = sitk.GetArrayFromImage(sitk.ReadImage(str(one.path), imageIO="GDCMImageIO"))
        if pixels.shape != (1, *one.shape[::-1]):
            raise ValueError("the compressed image has another shape")
        turned: npt.NDArray[Any] = pixels[0].T
    except (RuntimeError, ValueError) as error:  # every error of ITK and GDCM is the first
        raise VolumeError(f"cannot decompress the pixels of {one.path}; {REMEDY}") from error
    return turned
