"""Opening a folder of DICOM slices as one volume, once they are all of it.

Where slices lie is computed from the position of each, because readers of series take the distance
of the first two for all: that would close a gap, and straighten a tilted gantry. What is no evenly
stacked volume is refused with the reason.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError, reason_of, some
from unet3d.images.dicom_slice import SAME_DIRECTION, Slice, read_pixels, read_slice
from unet3d.images.files import is_dicom_folder, members, times
from unet3d.images.grids import is_sheared, shear_degrees
from unet3d.images.nifti_like import stored_like_nifti
from unet3d.images.scratch import Scratch
from unet3d.images.stored import StoredVolume
from unet3d.inputs.plain_data import printable

SAME_SPACING = 1e-3
"""Relative difference of two spacings that are one."""

SAME_PLACE_MM = 1e-3
"""Slices that lie nearer to one another lie at one place."""

EVENLY = 0.1
"""How far a slice may lie above or below its place, as a part of the distance of slices."""

ALIGNED = 0.25
"""How far it may lie to the side, as a part of the distance of pixels."""

MISSING = 1.5
"""From so many times the usual distance on, slices are missing."""


class SeriesVoxels:
    """The voxels of slices in their order."""

    slope, inter, offset, is_mapped = 1.0, 0.0, 0, False

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._slices = tuple(slices)
        self.shape = (*slices[0].shape, len(slices))
        types = {one.dtype for one in slices}
        is_real = any(dtype.kind == "f" for dtype in types)
        # As an image is in the end; NumPy would take float64 for one that has integers too.
        self.dtype = np.dtype(np.float32) if is_real else np.result_type(*types)

    def read(self, scratch: Scratch, what: str) -> npt.NDArray[Any]:
        """Return them, one slice after the other."""
        voxels = scratch.empty(self.shape, self.dtype, what, "F")
        for number, one in enumerate(self._slices):
            voxels[:, :, number] = read_pixels(one)
        return voxels


def open_series(folder: Path) -> StoredVolume:
    """Read the headers of the slices in a folder, and not their pixels.

    Args:
        folder: Holds the slices of one series, in any order and under any names.

    Raises:
        VolumeError: There are none, they are of several series, they are not evenly stacked, one
            cannot be read, or pydicom is not installed.
    """
    try:
        if not is_dicom_folder(folder):
            raise VolumeError(f"{folder} is a folder without DICOM slices; name a volume")
        files = members(folder)
    except OSError as error:
        raise VolumeError(f"cannot list {folder}: {reason_of(error)}") from error
    slices = [read_slice(file) for file in files]
    _refuse_several_series(folder, slices)
    if len(slices) < 2:
        raise VolumeError(f"{folder} holds one DICOM slice; a volume needs at least two")
    _refuse_unlike(slices)
    normal = slices[0].normal
    slices.sort(key=lambda one: float(one.position @ normal))
    return stored_like_nifti(folder, SeriesVoxels(slices), _affine(folder, slices))


def _refuse_several_series(folder: Path, slices: Sequence[Slice]) -> None:
    counts: dict[str, int] = {}
    for one in slices:
        counts[one.series] = counts.get(one.series, 0) + 1
    if len(counts) == 1:
        return
    label_of = {one.series: one.label for one in slices}
    series = [
        f'"{printable(label_of[uid])}" ({count} of the files, such as '
        f"{next(one.path.name for one in slices if one.series == uid)})"
        for uid, count in counts.items()
    ]
    raise VolumeError(
        f"{folder} holds {len(counts)} DICOM series: {some(series, 4)}; move each to a folder of "
        "its own"
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
    gaps = np.flatnonzero(steps > MISSING * usual)
    if not len(gaps):
        return
    neighbours = list(pairwise(one.path.name for one in slices))
    between = [f"{' and '.join(neighbours[gap])} ({steps[gap]:.6g} mm)" for gap in gaps]
    raise VolumeError(
        f"{folder} lacks slices between {some(between, 3)}; elsewhere they are {usual:.6g} mm "
        "apart: export the whole series again"
    )
