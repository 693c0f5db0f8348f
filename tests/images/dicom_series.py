"""DICOM series in folders, written with pydicom alone."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SERIES = "1.2.826.0.1.3680043.8.498.1"

LPS_FROM_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def write_slice(path: Path, pixels: npt.NDArray[Any], **attributes: Any) -> Path:
    """Write one slice of pixels (rows, columns); ``attributes`` replace those of a plain CT."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    slice_ = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    bits = 8 * pixels.dtype.itemsize
    plain: dict[str, Any] = {
        "SOPClassUID": CTImageStorage,
        "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
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
    }
    for name, value in {**plain, **attributes}.items():
        if value is not None:
            setattr(slice_, name, value)
    slice_.PixelData = pixels.tobytes() + bytes(pixels.nbytes % 2)
    slice_.save_as(path, enforce_file_format=True)
    return path


def change(path: Path, **attributes: Any) -> None:
    """Change attributes of a slice; None takes one away."""
    import pydicom

    slice_ = pydicom.dcmread(path)
    for name, value in attributes.items():
        if value is None:
            delattr(slice_, name)
        else:
            setattr(slice_, name, value)
    slice_.save_as(path)


def write_series(
    folder: Path,
    array: npt.NDArray[Any],
    affine: npt.NDArray[np.float64] | None = None,
    **attributes: Any,
) -> Path:
    """Write a volume (X, Y, Z) as slices across its third axis, whatever that is in the patient.

    Args:
        folder: New.
        array: The stored numbers.
        affine: (4, 4) in RAS, as NIfTI has it; its third axis is at right angles to the others.
        attributes: What replaces those of a plain CT.
    """
    affine = np.diag([0.7, 0.8, 2.5, 1.0]) if affine is None else affine
    lps = LPS_FROM_RAS @ affine
    column_mm, row_mm = np.linalg.norm(lps[:3, :2], axis=0)
    directions = [*(lps[:3, 0] / column_mm), *(lps[:3, 1] / row_mm)]
    for number in range(array.shape[2]):
        # Names say nothing about the order.
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
