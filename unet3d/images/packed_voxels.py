"""What NRRD files and MetaImages have in common: fields of text, then packed voxels.

They are read here, because ITK's own readers trust a file: one header ends the process, another
makes them open any file that it names, a spacing that is missing becomes 1, and a MetaImage whose
compressed voxels are damaged is read without an error. So what the text of a header says is
understood in the few forms that volumes have, and the rest is refused; its claims are compared
with the size of the file, and voxels are unpacked to the checksum at their end, and no more than
the header claims. The tests compare every kind with SimpleITK.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.images.nifti_like import stored_like_nifti
from unet3d.images.stored import StoredVolume, refuse_false_claims
from unet3d.images.voxels import FileVoxels
from unet3d.inputs.plain_data import printable

logger = logging.getLogger(__name__)

MILLIMETRES = {
    **dict.fromkeys(("mm", "millimeter", "millimeters"), 1.0),
    **dict.fromkeys(("um", "µm", "μm", "micron", "microns", "micrometer", "micrometers"), 1e-3),
    "cm": 10.0,
    "m": 1000.0,
}
"""By the units of length that headers name; ITK takes all of them as mm."""

MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PackedVoxels:
    """Where the voxels of a volume are, and in which form."""

    file: Path
    """The file that has them."""
    start: int
    """The byte at which they begin."""
    shape: Shape
    """Voxels along each axis, the fastest first."""
    dtype: np.dtype[Any]
    """Their type and the order of their bytes."""
    is_compressed: bool
    """Whether they are packed as zlib or gzip do it."""


def opened(
    path: Path,
    packed: PackedVoxels,
    affine_lps: npt.NDArray[np.float64],
    spacing_mm: Spacing | None = None,
) -> StoredVolume:
    """Return a volume, once its header has been compared with its file.

    Args:
        path: The volume.
        packed: Where its voxels are.
        affine_lps: (4, 4): from the indices of a stored voxel to mm, to the left, back and top.
        spacing_mm: Along each stored axis, where the file has it; None: that of the affine.

    Raises:
        VolumeError: The file is shorter or longer, or no NIfTI file can lie there.
    """
    voxels = FileVoxels(
        packed.file,
        packed.shape,
        packed.dtype,
        offset=0 if packed.is_compressed else packed.start,
        is_packed=packed.is_compressed,
        packed_from=packed.start,
    )
    volume = stored_like_nifti(path, voxels, affine_lps, spacing_mm)
    refuse_false_claims(path, packed.file, volume, packed.is_compressed)
    return volume


def refuse_other_axes(path: Path, num_axes: str) -> None:
    """Refuse a volume of another number of axes than three, which is text here."""
    if num_axes != "3":
        raise VolumeError(
            f"{path} has {printable(num_axes)!r} axes; only three can be used: save each channel, "
            "point in time or layer as a volume of its own"
        )


def shape_of(path: Path, text: str) -> Shape:
    """Return the shape that three numbers in text claim."""
    sizes = [int(size) if re.fullmatch(r"[0-9]{1,10}", size) else 0 for size in text.split()]
    if len(sizes) != 3 or not all(1 <= size <= MAX_SIZE for size in sizes):
        raise VolumeError(f"{path} claims the shape {printable(text)!r}; it is damaged")
    return sizes[0], sizes[1], sizes[2]


def type_of(path: Path, known: Mapping[str, str], text: str, is_big_endian: bool) -> np.dtype[Any]:
    """Return the type of voxels that is known under a name."""
    name = " ".join(text.split())
    if name not in known:
        raise VolumeError(
            f"{path} holds voxels of the type {printable(text)!r}; only single real numbers can be "
            "used"
        )
    return np.dtype(known[name]).newbyteorder(">" if is_big_endian else "<")


def unit_in_mm(path: Path, text: str) -> float:
    """Return the unit of length that a header names once, or for each axis; mm if it names none."""
    units = {unit.lower() for unit in text.replace('"', " ").split()} - {"?", "none", "unknown"}
    known = {MILLIMETRES.get(unit) for unit in units} or {1.0}
    unit_mm = known.pop()
    if known or unit_mm is None:
        raise VolumeError(
            f"{path} has the units of length {printable(text)!r}; known are mm, um, cm and m, the "
            "same for all axes"
        )
    return unit_mm


def numbers_of(path: Path, name: str, text: str, count: int) -> list[float]:
    """Return so many finite numbers from text; what is named so is refused with its name."""
    numbers = [number_of(part) for part in text.split()]
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise unplaced_error(path, name, text)
    return numbers


def unplaced_error(path: Path, name: str, text: str) -> VolumeError:
    """Return the error for a field that should say where a volume lies, and does not."""
    return VolumeError(
        f"{path} does not say where its voxels lie: its {name} is {printable(text)!r}; fix its "
        "header"
    )


def warn_of_orientation(path: Path) -> None:
    """Warn that the axes of a volume may be others than those that are assumed."""
    logger.warning(
        "%s does not state its orientation; its axes are taken as right to left, front to back, "
        "bottom to top",
        path,
    )


def number_of(text: str) -> float:
    """Return the number in text; NaN where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
