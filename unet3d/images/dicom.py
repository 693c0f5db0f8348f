"""Opening a folder of DICOM slices as one volume, once they are all of it.

Where slices lie is computed from the position of each, because readers of series take the distance
of the first two for all: that would close a gap, and straighten a tilted gantry. Compressed pixels
are unpacked by SimpleITK, once the structure of the file is known to be sound.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError, reason_of, some
from unet3d.images.dicom_elements import COMPRESSED, REMEDY, read_elements
from unet3d.images.files import DICOM_INDEX, is_dicom_folder, members, times
from unet3d.images.geometry import (
    RAS_FROM_LPS,
    geometry_of_affine,
    is_sheared,
    shear_degrees,
)
from unet3d.images.scratch import Scratch
from unet3d.images.source import Source
from unet3d.inputs.ahead import in_threads
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

TAGS = {
    **{
        "SeriesInstanceUID": 0x0020000E,
        "SeriesDescription": 0x0008103E,
        "SeriesNumber": 0x00200011,
    },
    **{"Rows": 0x00280010, "Columns": 0x00280011, "SamplesPerPixel": 0x00280002},
    **{"NumberOfFrames": 0x00280008, "PhotometricInterpretation": 0x00280004},
    **{"BitsAllocated": 0x00280100, "BitsStored": 0x00280101, "HighBit": 0x00280102},
    **{"PixelRepresentation": 0x00280103, "PixelSpacing": 0x00280030},
    **{"ImageOrientationPatient": 0x00200037, "ImagePositionPatient": 0x00200032},
    **{"RescaleSlope": 0x00281053, "RescaleIntercept": 0x00281052},
    **{"ModalityLUTSequence": 0x00283000, "FloatPixelData": 0x7FE00008},
    **{"DoubleFloatPixelData": 0x7FE00009},
}
"""All that is read of a header."""

SAME_DIRECTION = 1e-3
"""Difference of two direction cosines that are one."""

SAME_SPACING = 1e-3
"""Relative difference of two spacings that are one."""

SAME_PLACE_MM = 1e-3
"""Slices that lie nearer to one another lie at one place."""

EVENLY = 0.1
"""How far a slice may lie above or below its place, as a part of the distance of slices."""

ALIGNED = 0.25
"""How far it may lie to the side, as a part of the distance of pixels."""

MAX_THREADS = 8

MISSING = 1.5
"""From so many times the usual distance on, slices are missing."""


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
    stored: np.dtype[Any]
    """Type of the numbers in the file, little-endian."""
    bits: int
    """How many bits of them count."""
    start: int
    """The byte at which the pixels begin."""
    is_compressed: bool
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

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the pixels once they are scaled."""
        is_scaled = (self.slope, self.intercept) != (1, 0)
        return np.dtype(np.float32) if is_scaled else self.stored.newbyteorder("=")


def open_series(folder: Path) -> Source:
    """Read the headers of the slices in a folder, and not their pixels.

    The slices of one series, in any order and under any names, or the reason why they are none.
    """
    try:
        if not is_dicom_folder(folder):
            raise VolumeError(f"{folder} is a folder without DICOM slices; name a volume")
        files = members(folder)
        _refuse_lost_slices(folder, files)
    except OSError as error:
        raise VolumeError(f"cannot list {folder}: {reason_of(error)}") from error
    slices = [read_slice(file) for file in files]
    _refuse_several_series(folder, slices)
    if len(slices) < 2:
        raise VolumeError(f"{folder} holds one DICOM slice; a volume needs at least two")
    _refuse_unlike(slices)
    normal = slices[0].normal
    slices.sort(key=lambda one: float(one.position @ normal))
    shape = (*slices[0].shape, len(slices), 1)
    first = slices[0]
    # Most series have one scale, and stay as they are stored: half of float32.
    scales = {(one.slope, one.intercept) for one in slices}
    is_stored = len(scales) == 1 and not any(one.is_compressed for one in slices)
    types = {one.stored.newbyteorder("=") if is_stored else one.dtype for one in slices}
    is_real = any(dtype.kind == "f" for dtype in types)
    # As an image is in the end; NumPy would take float64 for one that has integers too.
    dtype = np.dtype(np.float32) if is_real else np.result_type(*types)

    def read(scratch: Scratch) -> npt.NDArray[Any]:
        voxels = scratch.empty(shape, dtype, f"{folder}: reading {times(shape)} voxels", "F")

        def fill(number: int) -> None:
            with np.errstate(over="ignore"):  # an infinite voxel is refused later
                one = slices[number]
                voxels[:, :, number, 0] = stored_pixels(one) if is_stored else read_pixels(one)

        # GDCM takes 40 ms for each slice.
        in_threads(fill, range(len(slices)), min(MAX_THREADS, num_cores()))
        return voxels

    geometry = geometry_of_affine(folder, shape, RAS_FROM_LPS @ _affine(folder, slices))
    slope, inter = (first.slope, first.intercept) if is_stored else (1.0, 0.0)
    num_bytes = math.prod(shape) * dtype.itemsize
    return Source(geometry, dtype, read, slope=slope, inter=inter, unpacked_bytes=num_bytes)


def read_slice(path: Path) -> Slice:
    """Read the header of a slice."""
    elements = read_elements(path, TAGS.values())
    values = {name: elements.values[tag] for name, tag in TAGS.items() if tag in elements.values}
    shape = _count(values, "Columns"), _count(values, "Rows")
    pixels = elements.pixels or slice(0, 0)
    is_compressed = elements.syntax in COMPRESSED
    colours = printable(_text(values, "PhotometricInterpretation") or "not named")
    is_grey = _count(values, "SamplesPerPixel", 1) == 1 and colours.startswith("MONOCHROME")
    frames = _text(values, "NumberOfFrames") or "1"
    bits = _count(values, "BitsAllocated")
    used = _count(values, "BitsStored", bits)
    highest = _count(values, "HighBit", used - 1)
    num_bytes = math.prod(shape) * bits // 8
    is_short = not is_compressed and pixels.stop - pixels.start < num_bytes
    is_float = "FloatPixelData" in values or "DoubleFloatPixelData" in values
    _refuse(
        path,
        (is_float, "has floating-point pixels (FloatPixelData); convert the series to NIfTI"),
        (not (pixels.stop and all(shape)), f"holds no image, or only the start of one; {REMEDY}"),
        (not is_grey, f"is a colour image ({colours}); only grey can be used"),
        (
            is_compressed and colours != "MONOCHROME2",
            f"is compressed and {colours}, which GDCM inverts; decompress the series, as with "
            "gdcmconv --raw",
        ),
        (
            frames != "1",
            f"holds {printable(frames)} frames in one file; convert the series to NIfTI, as with "
            "dcm2niix",
        ),
        (
            "ModalityLUTSequence" in values,
            "has a table that turns pixels into intensities (ModalityLUTSequence), which is not "
            "applied; convert the series to NIfTI",
        ),
        (bits not in (8, 16, 32), f"has pixels of {bits} bits; only 8, 16 and 32 can be used"),
        (
            not 1 <= used <= bits or highest != used - 1,
            f"has BitsStored {used} and HighBit {highest} of {bits} bits, which cannot be used; "
            "convert the series to NIfTI",
        ),
        (is_short, f"is shorter than {times(shape)} pixels; it is incomplete"),
    )
    (slope,) = _numbers(path, values, "RescaleSlope", 1, default="1")
    (intercept,) = _numbers(path, values, "RescaleIntercept", 1, default="0")
    row_mm, column_mm = _numbers(path, values, "PixelSpacing", 2)
    cosines = np.reshape(_numbers(path, values, "ImageOrientationPatient", 6), (2, 3))
    is_right_angled = np.allclose(cosines @ cosines.T, np.eye(2), atol=SAME_DIRECTION)
    _refuse(
        path,
        (slope == 0, "multiplies its pixels by 0 (RescaleSlope); fix its header"),
        (
            min(row_mm, column_mm) <= 0,
            f"has a PixelSpacing of {times((row_mm, column_mm))} mm; fix its header",
        ),
        (
            not is_right_angled,
            "has an ImageOrientationPatient that is no pair of directions at right angles, "
            f"{times(cosines.ravel())}; fix its header",
        ),
    )
    number = _text(values, "SeriesNumber")
    return Slice(
        path=path,
        series=_text(values, "SeriesInstanceUID"),
        label=_text(values, "SeriesDescription") or (f"series {number}" if number else ""),
        shape=shape,
        stored=np.dtype(f"<{'i' if _count(values, 'PixelRepresentation') else 'u'}{bits // 8}"),
        bits=used,
        start=pixels.start,
        is_compressed=is_compressed,
        slope=slope,
        intercept=intercept,
        spacing_mm=(column_mm, row_mm),
        directions=cosines.T,
        position=np.array(_numbers(path, values, "ImagePositionPatient", 3)),
    )


def read_pixels(one: Slice) -> npt.NDArray[Any]:
    """Return the pixels of a slice, (columns, rows), its slope and intercept applied."""
    if one.is_compressed:
        return _decompressed(one)
    pixels = stored_pixels(one)
    return pixels if one.dtype == one.stored else pixels * one.slope + one.intercept


def stored_pixels(one: Slice) -> npt.NDArray[Any]:
    """Return the stored numbers of a slice that is not compressed, (columns, rows)."""
    try:
        with open_regular(one.path) as file:
            file.seek(one.start)
            content = file.read(math.prod(one.shape) * one.stored.itemsize)
        pixels = np.frombuffer(content, one.stored).reshape(one.shape[::-1]).T
    except (OSError, ValueError) as error:
        raise VolumeError(f"cannot read {one.path}: it has changed; run again") from error
    unused = 8 * one.stored.itemsize - one.bits
    if unused:  # their content means something else, or nothing
        pixels = pixels << unused >> unused
    return pixels


def _decompressed(one: Slice) -> npt.NDArray[Any]:
    """Return compressed pixels, (columns, rows), which GDCM scales."""
    import SimpleITK as sitk  # takes half a second

    sitk.ProcessObject.SetGlobalWarningDisplay(False)
    try:
        pixels = sitk.GetArrayFromImage(sitk.ReadImage(str(one.path), imageIO="GDCMImageIO"))
    except RuntimeError as error:  # every error of ITK and GDCM
        raise VolumeError(
            f"cannot read {one.path} as a slice: its pixels cannot be decompressed; it is damaged "
            "or incomplete, export the series again"
        ) from error
    if pixels.shape != (1, *one.shape[::-1]):
        raise VolumeError(f"{one.path} has {times(pixels.shape)} pixels; export the series again")
    turned: npt.NDArray[Any] = pixels[0].T
    return turned


def _refuse_lost_slices(folder: Path, files: Sequence[Path]) -> None:
    """Refuse files that are named like the slices but are no DICOM: empty, cut off or damaged."""
    kinds = {_kind_of_name(file) for file in files}
    for path in sorted(set(folder.iterdir()) - set(files)):
        if path.name.startswith(".") or path.name.upper() == DICOM_INDEX or path.is_dir():
            continue
        if _kind_of_name(path) in kinds:
            raise VolumeError(
                f"{path} is named like the slices beside it but is no DICOM file: it is empty, cut "
                f"off or damaged; {REMEDY}"
            )


def _kind_of_name(path: Path) -> str:
    """Return the ending of a name; of one without, whether it is a word like README."""
    if re.search(r"[a-z_]", path.suffix, re.IGNORECASE):
        return path.suffix.lower()
    return "numbered" if re.search(r"\d", path.name) else path.name


def _refuse(path: Path, *faults: tuple[bool, str]) -> None:
    for is_there, fault in faults:
        if is_there:
            raise VolumeError(f"{path} {fault}")


def _text(values: Mapping[str, bytes], name: str) -> str:
    value = values.get(name, b"").strip(b"\0 ")
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _count(values: Mapping[str, bytes], name: str, default: int = 0) -> int:
    return int.from_bytes(values[name][:2], "little") if values.get(name) else default


def _numbers(
    path: Path, values: Mapping[str, bytes], name: str, count: int, default: str = ""
) -> list[float]:
    text = _text(values, name) or default
    try:
        numbers = [float(part) for part in text.split("\\")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise VolumeError(
            f"{path} has the {name} {printable(text)!r} instead of {count} numbers; it is no slice "
            "of a volume, move it out of the folder"
        )
    return numbers


def _refuse_several_series(folder: Path, slices: Sequence[Slice]) -> None:
    by_uid: dict[str, list[Slice]] = {}
    for one in slices:
        by_uid.setdefault(one.series, []).append(one)
    if len(by_uid) > 1:
        series = [
            f'"{printable(group[0].label)}" ({len(group)} of the files, such as '
            f"{group[0].path.name})"
            for group in by_uid.values()
        ]
        raise VolumeError(
            f"{folder} holds {len(series)} DICOM series: {some(series, 4)}; move each to a folder "
            "of its own"
        )


def _refuse_unlike(slices: Sequence[Slice]) -> None:
    first = slices[0]
    for one in slices[1:]:
        if one.shape != first.shape:
            unlike = f"{times(one.shape)} pixels instead of {times(first.shape)}"
        elif not np.allclose(one.spacing_mm, first.spacing_mm, rtol=SAME_SPACING, atol=0):
            unlike = f"pixels of {times(one.spacing_mm)} mm instead of {times(first.spacing_mm)}"
        elif not np.allclose(one.directions, first.directions, rtol=0, atol=SAME_DIRECTION):
            unlike = "another orientation, such as a localizer"
        else:
            continue
        raise VolumeError(
            f"{one.path} is unlike {first.path.name}, it has {unlike}; keep only the slices of one "
            "volume in the folder"
        )


def _affine(folder: Path, slices: Sequence[Slice]) -> npt.NDArray[np.float64]:
    """Return where stacked slices lie, (4, 4) in LPS.

    Raises:
        VolumeError: Two are at one place, some are missing, or they do not stand above each other.
    """
    first, last = slices[0], slices[-1]
    places = np.array([one.position for one in slices])
    heights = places @ first.normal
    steps = np.diff(heights)
    if steps.min() < SAME_PLACE_MM:
        lower = int(steps.argmin())
        names = f"{slices[lower].path.name} and {slices[lower + 1].path.name}"
        raise VolumeError(
            f"{folder} has two slices at one place, {names}: copies, or several volumes in one "
            "series, such as points in time; keep the slices of one"
        )
    usual = float(np.median(steps))
    _refuse_gaps(folder, slices, steps, usual)
    affine = np.eye(4)
    affine[:3, :2] = first.directions * first.spacing_mm
    affine[:3, 2] = (last.position - first.position) / (len(slices) - 1)
    affine[:3, 3] = first.position
    span = last.position - first.position
    drift_mm = float(np.linalg.norm(span - (span @ first.normal) * first.normal))
    if is_sheared(affine) and drift_mm > ALIGNED * min(first.spacing_mm):
        raise VolumeError(
            f"{folder} was scanned with a tilted gantry: its slices are shifted against each other "
            f"by {shear_degrees(affine):.3g} degrees; straighten the volume and save it as NIfTI, "
            "as dcm2niix does"
        )
    even = affine[:3, 3] + np.arange(len(slices))[:, None] * affine[:3, 2]
    along_mm = (places - even) @ first.normal
    across_mm = np.linalg.norm(places - even - along_mm[:, None] * first.normal, axis=1)
    off = np.maximum(np.abs(along_mm) / usual / EVENLY, across_mm / min(first.spacing_mm) / ALIGNED)
    if off.max() > 1:
        worst = int(off.argmax())
        raise VolumeError(
            f"{folder} has slices that are not evenly stacked: {slices[worst].path.name} lies "
            f"{np.linalg.norm(places[worst] - even[worst]):.3g} mm from its place "
            f"({steps.min():.6g} to {steps.max():.6g} mm apart); resample the series, or leave out "
            "slices until they are even"
        )
    return affine


def _refuse_gaps(
    folder: Path, slices: Sequence[Slice], steps: npt.NDArray[np.float64], usual: float
) -> None:
    between = [
        f"{lower.path.name} and {upper.path.name} ({step:.6g} mm)"
        for (lower, upper), step in zip(pairwise(slices), steps, strict=True)
        if step > MISSING * usual
    ]
    if between:
        raise VolumeError(
            f"{folder} lacks slices between {some(between, 3)}; elsewhere they are {usual:.6g} mm "
            "apart: export the whole series again"
        )
