"""Opens a folder of DICOM slices as one volume, if the series is complete.

The affine is computed from the position of every slice. Other readers assume that all slices lie as
far apart as the first two, which would hide a missing slice or a tilted gantry.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.distributed.ranks import num_cores
from unet3d.errors import VolumeError, reason_of, some
from unet3d.images.dicom_slice import DAMAGED, MARK, MARK_AT, SAME, Slice, read_pixels, read_slice
from unet3d.images.files import times
from unet3d.images.geometry import RAS_FROM_LPS, geometry_of_affine, is_sheared, shear_degrees
from unet3d.images.scratch import Scratch
from unet3d.images.source import AS_STATED, Reading, Source
from unet3d.inputs.ahead import in_threads
from unet3d.inputs.reading import open_regular

INDEX = "DICOMDIR"
"""Name of DICOM's table of contents of a folder."""

EVENLY = 0.1
"""Largest deviation of a slice along the normal, as a fraction of the slice spacing."""

ALIGNED = 0.25
"""Largest deviation of a slice within its plane, as a fraction of the pixel spacing."""

MAX_THREADS = 8


def is_dicom_file(path: Path) -> bool:
    """Return whether the content of a file is a DICOM object, such as one slice of a scan."""
    try:
        with open_regular(path) as file:
            file.seek(MARK_AT)
            return file.read(len(MARK)) == MARK
    except OSError:
        return False


def members(folder: Path) -> tuple[Path, ...]:
    """Return the DICOM files directly in a folder; if there are none, the folder itself."""
    files = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    listed = (path for path in files if path.name.upper() != INDEX and not path.is_dir())
    return tuple(filter(is_dicom_file, listed)) or (folder,)


def open_file(folder: Path, reading: Reading = AS_STATED) -> Source:
    """Read the headers of the slices in a folder, but not their pixels.

    File names and order do not matter. VolumeError if the slices are not one evenly spaced series.
    """
    try:
        files = members(folder)
        if files == (folder,):
            raise VolumeError(
                f"{folder} is a folder without slices (DICOM, or TIFFs of one page); name a volume"
            )
        _refuse_lost_slices(folder, files)
    except OSError as error:
        raise VolumeError(f"cannot list {folder}: {reason_of(error)}") from error
    slices = [read_slice(file) for file in files]
    examples = {one.SeriesInstanceUID: f'"{one.title}", such as {one.path.name}' for one in slices}
    if len(examples) > 1:
        raise VolumeError(
            f"{folder} holds {len(examples)} DICOM series, {some(list(examples.values()), 4)}; "
            "move each to a folder of its own"
        )
    if len(slices) < 2:
        raise VolumeError(f"{folder} holds one DICOM slice; a volume needs at least two")
    first = slices[0]
    for one in slices[1:]:
        _refuse_unlike(first, one)
    normal = np.cross(*first.directions.T)
    slices.sort(key=lambda one: float(normal @ one.ImagePositionPatient))
    shape = (*first.shape, len(slices), 1)
    geometry = geometry_of_affine(folder, shape, RAS_FROM_LPS @ _affine(folder, slices, normal))
    # Slices with the same scale, as in most series, keep their stored type, which takes half the
    # memory of float32.
    scales = {one.scale for one in slices}
    scale = scales.pop() if len(scales) == 1 else (1.0, 0.0)
    types = {one.dtype if one.scale == scale else np.dtype(np.float32) for one in slices}
    dtype = np.result_type(*types)
    dtype = np.dtype(np.float32) if dtype.kind == "f" else dtype

    def read(scratch: Scratch) -> npt.NDArray[Any]:
        voxels = scratch.empty(shape, dtype, f"{folder}: reading {times(shape)} voxels", "F")

        def fill(number: int) -> None:
            pixels, (slope, inter) = read_pixels(slices[number]), slices[number].scale
            with np.errstate(over="ignore"):  # an infinite voxel is refused later
                is_ready = (slope, inter) == scale
                voxels[:, :, number, 0] = pixels if is_ready else pixels * slope + inter

        # GDCM takes 40 ms for each slice.
        in_threads(fill, range(len(slices)), min(MAX_THREADS, num_cores()))
        return voxels

    num_bytes = math.prod(shape) * dtype.itemsize
    slope, inter = scale
    return Source(geometry, dtype, read, slope=slope, inter=inter, unpacked_bytes=num_bytes)


def _refuse_lost_slices(folder: Path, files: Sequence[Path]) -> None:
    """Refuse files that are named like the slices but are not DICOM: empty, cut off or damaged."""
    kinds = {_kind_of_name(file) for file in files}
    for path in sorted(set(folder.iterdir()) - set(files)):
        is_listed = not path.name.startswith(".") and path.name.upper() != INDEX
        if is_listed and _kind_of_name(path) in kinds and not path.is_dir():
            raise VolumeError(
                f"{path} is named like the slices beside it but is not a DICOM file; {DAMAGED}"
            )


def _kind_of_name(path: Path) -> str:
    """Return the ending of a name; without one, ``numbered`` if it has digits, else the name."""
    if re.search(r"[a-z_]", path.suffix, re.IGNORECASE):
        return path.suffix.lower()
    return "numbered" if re.search(r"\d", path.name) else path.name


def _refuse_unlike(first: Slice, one: Slice) -> None:
    if (
        one.shape != first.shape
        or not np.allclose(one.spacing_mm, first.spacing_mm, rtol=SAME, atol=0)
        or not np.allclose(one.directions, first.directions, rtol=0, atol=SAME)
    ):
        seen = [
            f"{times(each.shape)} pixels of {times(each.spacing_mm)} mm along "
            f"{times(each.ImageOrientationPatient)}"
            for each in (one, first)
        ]
        raise VolumeError(
            f"{one.path} has {seen[0]}, but {first.path.name} has {seen[1]}; keep only the slices "
            "of one volume in the folder"
        )


def _affine(
    folder: Path, slices: Sequence[Slice], normal: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the affine of sorted slices, (4, 4) in LPS; VolumeError if spaced unevenly."""
    first = slices[0]
    places = np.array([one.ImagePositionPatient for one in slices])
    span = places[-1] - places[0]
    steps = np.diff(places @ normal)
    nearest, widest = int(steps.argmin()), int(steps.argmax())
    if steps[nearest] < SAME:
        names = f"{slices[nearest].path.name} and {slices[nearest + 1].path.name}"
        raise VolumeError(
            f"{folder} has two slices at one position, {names}: copies, or several volumes in "
            "one series, such as time points; keep the slices of one volume"
        )
    affine = np.eye(4)
    affine[:3, :2] = first.directions * first.spacing_mm
    affine[:3, 2] = span / len(steps)
    affine[:3, 3] = places[0]
    drift_mm = float(np.linalg.norm(span - (span @ normal) * normal))
    if is_sheared(affine) and drift_mm > ALIGNED * min(first.spacing_mm):
        raise VolumeError(
            f"{folder} was scanned with a tilted gantry: its slices are shifted against each other "
            f"by {shear_degrees(affine):.3g} degrees; straighten the volume and save it as NIfTI, "
            "as dcm2niix does"
        )
    off = places - places[0] - np.arange(len(slices))[:, None] * affine[:3, 2]
    along_mm = off @ normal
    across_mm = np.linalg.norm(off - along_mm[:, None] * normal, axis=1)
    usual_mm, off_mm = float(np.median(steps)), np.linalg.norm(off, axis=1)
    is_even = np.abs(along_mm).max() <= EVENLY * usual_mm
    if not is_even or across_mm.max() > ALIGNED * min(first.spacing_mm):
        raise VolumeError(
            f"{folder} lacks slices, or they are not evenly stacked: "
            f"{slices[int(off_mm.argmax())].path.name} lies {off_mm.max():.3g} mm from its place; "
            f"the widest gap is {steps[widest]:.6g} mm instead of {usual_mm:.6g}, between "
            f"{slices[widest].path.name} and {slices[widest + 1].path.name}: export the whole "
            "series again, or resample it"
        )
    return affine
