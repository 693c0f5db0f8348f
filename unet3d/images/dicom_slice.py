"""One DICOM slice: its header and its pixels, by pydicom, which is loaded only where one is read.

pydicom is an extra. GDCM, which other readers use for all of a file, does not end on some damaged
headers; here only compressed pixels reach it, once the header has been understood.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import times
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

# What it remarks on a header is either of no importance here, or refused from here.
logging.getLogger("pydicom").setLevel(logging.CRITICAL)

ATTRIBUTES = (
    *("SOPClassUID", "SeriesInstanceUID", "SeriesDescription", "SeriesNumber"),
    *("Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation"),
    *("BitsAllocated", "PixelRepresentation"),
    *("PixelSpacing", "ImageOrientationPatient", "ImagePositionPatient"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
)
"""All that is read of a header."""

UNCOMPRESSED = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")
DEFLATED = "1.2.840.10008.1.2.1.99"
"""Transfer syntaxes: the first of pixels as they are, the last of a whole object that is packed."""

STORED_BITS = (8, 16, 32)

SAME_DIRECTION = 1e-3
"""Difference of two direction cosines that are one."""

MAX_REASON_LETTERS = 200


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice:
    """The header of one slice."""

    path: Path
    series: str
    """UID of the series that it belongs to."""
    label: str
    """What people call the series."""
    shape: tuple[int, int]
    """Columns and rows."""
    dtype: np.dtype[Any]
    """Of its pixels, once slope and intercept are applied."""
    slope: float
    intercept: float
    """What a stored number is multiplied by, and what is added then."""
    spacing_mm: tuple[float, float]
    """Distance of columns, and of rows."""
    directions: npt.NDArray[np.float64]
    """(3, 2): where a row runs to and where a column runs to, in LPS, of length 1."""
    position: npt.NDArray[np.float64]
    """(3,): centre of the first pixel in mm, in LPS."""

    @property
    def normal(self) -> npt.NDArray[np.float64]:
        """Direction at right angles to the slice, (3,), in LPS."""
        return np.cross(self.directions[:, 0], self.directions[:, 1])


def read_slice(path: Path) -> Slice:
    """Read the header of a slice.

    Args:
        path: The file.

    Raises:
        VolumeError: It cannot be read, is no slice of a volume, or pydicom is not installed.
    """
    pydicom = _load_pydicom(path)
    with _explaining(path, "it is damaged, incomplete, or no image; move it out of the folder"):
        with open_regular(path) as file:
            header = pydicom.dcmread(
                file, stop_before_pixels=True, specific_tags=[*ATTRIBUTES, "TransferSyntaxUID"]
            )
            syntax = str(header.file_meta.get("TransferSyntaxUID", "") or "")
        values = {name: header.get(name) for name in ATTRIBUTES}
        if not values["Rows"] or not values["Columns"]:
            kind = printable(getattr(values["SOPClassUID"], "name", "not named"))
            raise VolumeError(
                f"{path} holds no image, or only the beginning of one ({kind}); move it out of the "
                "folder, or export the series again"
            )
        _refuse_syntax(path, pydicom, syntax)
        _refuse_other_than_grey(path, values)
        slope = float(1 if values["RescaleSlope"] is None else values["RescaleSlope"])
        intercept = float(values["RescaleIntercept"] or 0)
        if not math.isfinite(slope) or not math.isfinite(intercept) or slope == 0:
            raise VolumeError(
                f"{path} scales its pixels by {slope:g} and {intercept:g} (RescaleSlope, "
                "RescaleIntercept); fix its header"
            )
        dtype = _stored_type(path, values)
        shape = int(values["Columns"]), int(values["Rows"])
        if syntax in UNCOMPRESSED and math.prod(shape) * dtype.itemsize > path.stat().st_size:
            raise VolumeError(f"{path} is shorter than {times(shape)} pixels; it is incomplete")
        row_mm, column_mm = _numbers(path, values, "PixelSpacing", 2)
        if min(row_mm, column_mm) <= 0:
            shown = times((row_mm, column_mm))
            raise VolumeError(f"{path} has a PixelSpacing of {shown} mm; fix its header")
        number = values["SeriesNumber"]
        return Slice(
            path=path,
            series=str(values["SeriesInstanceUID"] or ""),
            label=str(
                values["SeriesDescription"] or ("" if number is None else f"series {number}")
            ),
            shape=shape,
            dtype=_scaled_type(dtype, slope, intercept),
            slope=slope,
            intercept=intercept,
            spacing_mm=(column_mm, row_mm),
            directions=_directions(path, values),
            position=np.array(_numbers(path, values, "ImagePositionPatient", 3)),
        )


def read_pixels(one: Slice) -> npt.NDArray[Any]:
    """Return the pixels of a slice, (columns, rows), its slope and intercept applied.

    Args:
        one: Its header.

    Raises:
        VolumeError: They cannot be read.
    """
    pydicom = _load_pydicom(one.path)
    with _explaining(one.path, "it is damaged or incomplete; export the series again"):
        with open_regular(one.path) as file:
            stored = np.asarray(pydicom.dcmread(file).pixel_array)
        if stored.shape != one.shape[::-1]:
            raise VolumeError(f"{one.path} has changed while it was read; run again")
        if (one.slope, one.intercept) == (1, 0):
            return stored.T
        if one.dtype.kind == "f":
            return (stored.T * one.slope + one.intercept).astype(one.dtype)
        return (stored.T.astype(np.int64) * int(one.slope) + int(one.intercept)).astype(one.dtype)


def _load_pydicom(path: Path) -> Any:
    try:
        import pydicom
        import pydicom.pixels
    except ImportError as error:
        raise VolumeError(
            f"reading {path} needs pydicom, which is not installed: pip install pydicom "
            'python-gdcm, which is the extra "itk" of unet3d'
        ) from error
    return pydicom


@contextmanager
def _explaining(path: Path, remedy: str) -> Iterator[None]:
    """Explain whatever a damaged file raises in pydicom, and keep its remarks from the terminal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (VolumeError, MemoryError):
        raise
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}; {remedy}") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise VolumeError(
            f"cannot read {path} as a slice: {printable(reason, MAX_REASON_LETTERS)}; {remedy}"
        ) from error


def _refuse_syntax(path: Path, pydicom: Any, syntax: str) -> None:
    """Refuse pixels that are compressed in a way that nothing here decodes."""
    if syntax in UNCOMPRESSED:
        return
    name = printable(pydicom.uid.UID(syntax).name) or "a way that it does not name"
    try:
        is_readable = syntax != DEFLATED and pydicom.pixels.get_decoder(syntax).is_available
    except NotImplementedError:
        is_readable = False
    if not is_readable:
        raise VolumeError(
            f"{path} is compressed as {name}, which cannot be read here: pip install python-gdcm "
            "reads most kinds; or decompress the series, as with gdcmconv --raw"
        )


def _refuse_other_than_grey(path: Path, values: dict[str, Any]) -> None:
    colours = str(values["PhotometricInterpretation"] or "not named")
    if values["SamplesPerPixel"] != 1 or not colours.startswith("MONOCHROME"):
        raise VolumeError(f"{path} is a colour image ({printable(colours)}); only grey can be used")
    if int(values["NumberOfFrames"] or 1) != 1:
        raise VolumeError(
            f"{path} holds {values['NumberOfFrames']} frames in one file; convert the series to "
            "NIfTI, as with dcm2niix"
        )
    if values["ModalityLUTSequence"]:
        raise VolumeError(
            f"{path} has a table that turns pixels into intensities (ModalityLUTSequence), which "
            "is not applied; convert the series to NIfTI"
        )


def _stored_type(path: Path, values: dict[str, Any]) -> np.dtype[Any]:
    bits = values["BitsAllocated"]
    if bits not in STORED_BITS:
        raise VolumeError(f"{path} has pixels of {bits} bits; only 8, 16 and 32 can be used")
    return np.dtype(f"{'i' if values['PixelRepresentation'] else 'u'}{bits // 8}")


def _scaled_type(stored: np.dtype[Any], slope: float, intercept: float) -> np.dtype[Any]:
    """Return the type of what is stored once it is scaled: integers where they stay integers."""
    if (slope, intercept) == (1, 0):
        return stored
    limits = np.iinfo(stored)
    ends = [end * slope + intercept for end in (int(limits.min), int(limits.max))]
    if not slope.is_integer() or not intercept.is_integer() or max(map(abs, ends)) >= 2.0**53:
        return np.dtype(np.float32)
    return np.result_type(*(np.min_scalar_type(int(end)) for end in ends))


def _directions(path: Path, values: dict[str, Any]) -> npt.NDArray[np.float64]:
    rows = np.reshape(_numbers(path, values, "ImageOrientationPatient", 6), (2, 3))
    if not np.allclose(rows @ rows.T, np.eye(2), atol=SAME_DIRECTION):
        raise VolumeError(
            f"{path} has an ImageOrientationPatient that is no pair of directions at right angles, "
            f"{times(rows.ravel())}; fix its header"
        )
    return rows.T


def _numbers(path: Path, values: dict[str, Any], name: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in values[name]]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise VolumeError(
            f"{path} does not say where it lies: its {name} is {printable(str(values[name]))}; it "
            "is no slice of a volume, move it out of the folder"
        )
    return numbers
