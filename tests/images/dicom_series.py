"""DICOM series in folders, written element by element."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SERIES = "1.2.826.0.1.3680043.8.498.1"
CT = "1.2.840.10008.5.1.4.1.1.2"
EXPLICIT, IMPLICIT = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2"

LPS_FROM_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])

ELEMENTS = {
    "SOPClassUID": (0x00080016, "UI"),
    "SOPInstanceUID": (0x00080018, "UI"),
    "Modality": (0x00080060, "CS"),
    "SeriesDescription": (0x0008103E, "LO"),
    "StudyInstanceUID": (0x0020000D, "UI"),
    "SeriesInstanceUID": (0x0020000E, "UI"),
    "SeriesNumber": (0x00200011, "IS"),
    "InstanceNumber": (0x00200013, "IS"),
    "ImagePositionPatient": (0x00200032, "DS"),
    "ImageOrientationPatient": (0x00200037, "DS"),
    "SamplesPerPixel": (0x00280002, "US"),
    "PhotometricInterpretation": (0x00280004, "CS"),
    "NumberOfFrames": (0x00280008, "IS"),
    "Rows": (0x00280010, "US"),
    "Columns": (0x00280011, "US"),
    "PixelSpacing": (0x00280030, "DS"),
    "BitsAllocated": (0x00280100, "US"),
    "BitsStored": (0x00280101, "US"),
    "HighBit": (0x00280102, "US"),
    "PixelRepresentation": (0x00280103, "US"),
    "RescaleIntercept": (0x00281052, "DS"),
    "RescaleSlope": (0x00281053, "DS"),
    "ModalityLUTSequence": (0x00283000, "SQ"),
    "PrivateCreator": (0x00290010, "LO"),
    "FloatPixelData": (0x7FE00008, "OF"),
    "DoubleFloatPixelData": (0x7FE00009, "OD"),
    "PixelData": (0x7FE00010, "OW"),
}
"""The tag and the type of each attribute."""

WRITTEN: dict[Path, tuple[npt.NDArray[Any], dict[str, Any]]] = {}
"""The array and attributes from which each file was written."""


def write_slice(path: Path, pixels: npt.NDArray[Any], **attributes: Any) -> Path:
    """Write one slice of pixels (rows, columns); ``attributes`` replace those of a plain CT.

    An attribute that is None is left out; bytes are written as they are; ``syntax`` is the transfer
    syntax.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITTEN[path] = (pixels, attributes)
    path.write_bytes(slice_bytes(pixels, **attributes))
    return path


def slice_bytes(
    pixels: npt.NDArray[Any], syntax: str = EXPLICIT, fragments: bytes = b"", **attributes: Any
) -> bytes:
    """Return the file of a slice; compressed fragments take the place of its pixels."""
    bits = 8 * pixels.dtype.itemsize
    plain: dict[str, Any] = {
        "SOPClassUID": CT,
        "SOPInstanceUID": "1.2.3.4",
        "StudyInstanceUID": SERIES,
        "SeriesInstanceUID": SERIES,
        "SeriesDescription": "Abdomen",
        "Modality": "CT",
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        "PixelSpacing": [0.8, 0.7],
        "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
        "ImagePositionPatient": [0, 0, 0],
        "PixelData": pixels.tobytes(),
    }
    meta = element(0x00020002, "UI", CT) + element(0x00020010, "UI", syntax)
    values = {ELEMENTS[name]: value for name, value in {**plain, **attributes}.items()}
    written = [
        element(tag, vr, value, is_explicit=syntax != IMPLICIT)
        for (tag, vr), value in sorted(values.items(), key=lambda item: item[0])
        if value is not None
    ]
    if fragments:
        written[-1] = b"\xe0\x7f\x10\x00OB\0\0\xff\xff\xff\xff" + fragments
    length = element(0x00020000, "UL", struct.pack("<I", len(meta)))
    return bytes(128) + b"DICM" + length + meta + b"".join(written)


def element(tag: int, vr: str, value: Any, is_explicit: bool = True) -> bytes:
    """Return an element of a DICOM file."""
    if vr == "US" and not isinstance(value, bytes):
        value = struct.pack("<H", value)
    elif not isinstance(value, bytes):
        value = "\\".join(map(str, value if isinstance(value, list) else [value])).encode()
    value += (b"\0" if vr in ("UI", "OW", "OF", "OD") else b" ") * (len(value) % 2)
    head = struct.pack("<HH", tag >> 16, tag & 0xFFFF)
    if not is_explicit:
        return head + struct.pack("<I", len(value)) + value
    if vr in ("OW", "OB", "OF", "OD", "SQ", "UN"):
        return head + vr.encode() + struct.pack("<HI", 0, len(value)) + value
    return head + vr.encode() + struct.pack("<H", len(value)) + value


def change(path: Path, **attributes: Any) -> None:
    """Change attributes of a slice; None removes one."""
    pixels, former = WRITTEN[path]
    write_slice(path, pixels, **{**former, **attributes})


def in_order(series: Path) -> list[Path]:
    """Return the slices of a series in the order in which they were written."""
    return sorted(series.iterdir(), key=lambda path: WRITTEN[path][1]["InstanceNumber"])


def write_series(
    folder: Path,
    array: npt.NDArray[Any],
    affine: npt.NDArray[np.float64] | None = None,
    **attributes: Any,
) -> Path:
    """Write a volume (X, Y, Z) as slices across its third axis, whatever its patient axis.

    Args:
        folder: The folder to create.
        array: The stored numbers.
        affine: (4, 4) in RAS, as in NIfTI; the third axis is perpendicular to the others.
        attributes: Attributes that replace those of a plain CT.
    """
    affine = np.diag([0.7, 0.8, 2.5, 1.0]) if affine is None else affine
    lps = LPS_FROM_RAS @ affine
    column_mm, row_mm = np.linalg.norm(lps[:3, :2], axis=0)
    directions = [*(lps[:3, 0] / column_mm), *(lps[:3, 1] / row_mm)]
    for number in range(array.shape[2]):
        # The names of the files say nothing about their order.
        name = f"IM{(7 * number + 3) % 10007:05d}"
        write_slice(
            folder / name,
            np.ascontiguousarray(array[:, :, number].T),
            **{
                "PixelSpacing": [f"{row_mm:.10g}", f"{column_mm:.10g}"],
                "ImageOrientationPatient": [f"{cosine:.12f}" for cosine in directions],
                "ImagePositionPatient": [f"{x:.9f}" for x in lps[:3, 3] + number * lps[:3, 2]],
                "InstanceNumber": number + 1,
                **attributes,
            },
        )
    return folder
