"""Where the voxels of an image lie: spacing, orientation, and whether two images share one grid.

Every array outside this package is in RAS: X grows to the patient's right, Y to the front, Z to the
top. A :class:`Geometry` also knows the axes of the file, so that a label map can be written back.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.affines import voxel_sizes

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.images.files import times

logger = logging.getLogger(__name__)

Affine = npt.NDArray[np.float64]

Orientation = npt.NDArray[np.float64]
"""(3, 2), as in nibabel: for each axis of an array, the axis that it becomes, and its sign."""

RAS: Orientation = nib.io_orientation(np.eye(4))

RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""Converts axes of ITK and DICOM (to the patient's left and back) to NIfTI's (to right and
front)."""

MILLIMETRES_PER_UNIT = {1: 1000.0, 3: 0.001}
"""Millimetres in a unit, by NIfTI's code of the unit: metre, micrometre; other codes count as
mm."""

MIN_SPACING_MM = 1e-9
MAX_SPACING_MM = 1e9
"""Spacings beyond these, a picometre and a thousand kilometres, are errors in a header."""

MIN_DETERMINANT = 1e-6
"""Determinant of the unit axis directions, 1 for right angles; below this, all lie in a plane."""

SHEARED_DEGREES = 0.1
"""Deviation from right angles above which axes are sheared; far above rounding in headers."""

FLOAT32_ROUNDING = 2.0**-22
"""Largest relative difference of two float32 roundings of one coordinate."""

MAX_DISTANCE = 0.4
"""Largest tolerance for corners of equal grids, as a fraction of the finest spacing."""

GEOMETRY_FIELDS = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code"),
    *("quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Geometry:
    """Where the voxels of an image lie, in RAS and in the axes of its file."""

    path: Path
    """The image's file; with several channel files, the first."""
    shape: Shape
    """Voxels along X, Y, Z."""
    num_channels: int
    spacing_mm: Spacing
    """Distance of neighbouring voxels along X, Y, Z, as the file states it."""
    affine: Affine
    """(4, 4): from RAS voxel indices to mm."""
    orientation: Orientation = field(repr=False)
    """How the axes of the file become X, Y, Z."""
    is_anatomical: bool = True
    """Whether the file states the orientation of its axes in the patient; if not, it is unknown
    which side is left or right."""
    has_spacing: bool = True
    """Whether the file states the spacing; if not, one voxel is the unit."""
    unit: str | None = None
    """Unit of length in a microscope's file, as OME names it; None: one that suits the spacing."""
    nifti_header: Any = field(repr=False)
    """A NIfTI header with only the geometry of the file, for writing label maps."""

    @property
    def stored_shape(self) -> Shape:
        """Voxels along each axis of the file."""
        i, j, k = (self.shape[int(axis)] for axis in self.orientation[:, 0])
        return (i, j, k)

    def as_stored(self) -> "Geometry":
        """Return the same grid with the axes of the file as X, Y, Z."""
        i, j, k = (int(axis) for axis in self.orientation[:, 0])
        turn = nib.orientations.ornt_transform(RAS, self.orientation)
        return replace(
            self,
            shape=self.stored_shape,
            spacing_mm=(self.spacing_mm[i], self.spacing_mm[j], self.spacing_mm[k]),
            affine=self.affine @ nib.orientations.inv_ornt_aff(turn, self.shape),
            orientation=RAS,
        )

    def box_in_file(self, box: Sequence[slice]) -> tuple[slice, slice, slice]:
        """Return a box along X, Y, Z as the box of an array with the axes of the file."""
        found = []
        for axis, sign in self.orientation:
            part, size = box[int(axis)], self.shape[int(axis)]
            found.append(part if sign > 0 else slice(size - part.stop, size - part.start))
        return found[0], found[1], found[2]

    def in_ras(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view in RAS of an array with the axes of the file."""
        view: npt.NDArray[Any] = nib.apply_orientation(np.asarray(stored), self.orientation)
        return view

    def as_in_file(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of an array in RAS that has the axes of the file."""
        turn = nib.orientations.ornt_transform(RAS, self.orientation)
        view: npt.NDArray[Any] = nib.apply_orientation(array, turn)
        return view


def geometry_of_affine(
    path: Path,
    shape: Sequence[int],
    affine: Affine,
    spacing_mm: Sequence[float] | None = None,
    is_anatomical: bool = True,
) -> Geometry:
    """Return the geometry of an array (I, J, K, C) with an affine in RAS and mm.

    The spacing along I, J, K comes from the affine unless the file states it. Raises VolumeError if
    the affine is impossible, or too imprecise in float32, in which segmentations store it.
    """
    grid = (shape[0], shape[1], shape[2])
    with np.errstate(all="ignore"):
        written = affine.astype(np.float32).astype(np.float64)
        tolerance_mm = _tolerance_mm(affine, grid, voxel_sizes(affine).tolist())
        is_held = _corners_apart_mm(affine, written, grid) <= tolerance_mm
    _refuse_impossible(path, affine, is_held)
    header = _empty_header(grid)
    header.set_qform(affine, code="scanner")
    header.set_sform(affine, code="scanner")
    header.set_xyzt_units("mm")
    found = geometry_of_nifti(
        path, shape, header, affine, spacing_mm or voxel_sizes(affine).tolist()
    )
    return replace(found, is_anatomical=is_anatomical)


def geometry_of_nifti(
    path: Path,
    shape: Sequence[int],
    header: Any,
    affine: Affine,
    spacing_mm: Sequence[float] | None = None,
) -> Geometry:
    """Return the geometry that a NIfTI header states for an array (I, J, K, C)."""
    is_anatomical = int(header["sform_code"]) > 0 or int(header["qform_code"]) > 0
    if not is_anatomical:
        logger.warning(
            "%s does not state its orientation (qform and sform codes are 0); its axes are taken "
            "as right to left, back to front, bottom to top",
            path,
        )
    unit_mm = MILLIMETRES_PER_UNIT.get(int(header["xyzt_units"]) & 7, 1.0)
    affine = np.array(affine, np.float64)
    affine[:3] *= unit_mm
    _refuse_impossible(path, affine)
    lengths = voxel_sizes(affine)
    stated = spacing_mm or unit_mm * np.abs(header["pixdim"][1:4].astype(np.float64))
    # If it agrees with an oblique affine, the stated spacing has less rounding noise.
    spacing = np.where(np.isclose(stated, lengths, rtol=1e-4, atol=0), stated, lengths).tolist()
    geometry = _empty_header(shape[:3], two=isinstance(header, nib.Nifti2Header))
    for name in GEOMETRY_FIELDS:
        geometry[name] = header[name]
    orientation = nib.io_orientation(affine)
    x, y, z = np.argsort(orientation[:, 0])  # the axes of the file that run along X, Y, Z
    return Geometry(
        path=path,
        shape=(shape[x], shape[y], shape[z]),
        num_channels=shape[3],
        spacing_mm=(spacing[x], spacing[y], spacing[z]),
        affine=affine @ nib.orientations.inv_ornt_aff(orientation, shape[:3]),
        orientation=orientation,
        is_anatomical=is_anatomical,
        nifti_header=geometry,
    )


def _empty_header(shape: Sequence[int], two: bool = False) -> Any:
    two = two or max(shape) > np.iinfo(np.int16).max
    header = nib.Nifti2Header() if two else nib.Nifti1Header()
    header.set_data_shape(shape)
    return header


def _refuse_impossible(path: Path, affine: Affine, is_held: bool = True) -> None:
    with np.errstate(all="ignore"):
        lengths = voxel_sizes(affine)
        is_flat = not abs(np.linalg.det(affine[:3, :3] / lengths)) >= MIN_DETERMINANT
        is_usual = MIN_SPACING_MM <= lengths.min() and lengths.max() <= MAX_SPACING_MM
    if not (is_held and is_usual and np.isfinite(affine).all()) or is_flat:
        raise VolumeError(
            f"{path} has an impossible affine: it begins at {times(affine[:3, 3])} mm, and "
            f"its spacing is {times(lengths)} mm; fix its header, or the unit in it"
        )


ONE_GRID = "bring both to one grid"
"""What to do about files of one case on different grids."""


def same_grid(a: Geometry, b: Geometry) -> str | None:
    """Return how the grids of two images differ; None if they agree, up to axis order and sign.

    Corners may differ by a tenth of the finest spacing, or by the rounding of float32 far from the
    origin. Only shapes are compared if one of the files states no spacing.
    """
    turn = axes_between(b.affine, a.affine)
    x, y, z = np.argsort(turn[:, 0])
    if a.shape != (b.shape[x], b.shape[y], b.shape[z]):
        return f"shapes {times(a.shape)} and {times(b.shape)} differ"
    if not (a.has_spacing and b.has_spacing):
        return None
    affine = b.affine @ nib.orientations.inv_ornt_aff(turn, b.shape)
    apart_mm = _corners_apart_mm(a.affine, affine, a.shape)
    if apart_mm > _tolerance_mm(a.affine, a.shape, a.spacing_mm):
        return f"affines differ, corners lie up to {apart_mm:.3g} mm apart"
    return None


def with_spacing_of(geometry: Geometry, other: Geometry) -> Geometry:
    """Return a geometry; if its file states no spacing, with that of another image of its grid."""
    if geometry.has_spacing or not other.has_spacing:
        return geometry
    shape, affine = (*geometry.shape, geometry.num_channels), np.diag([*other.spacing_mm, 1.0])
    found = geometry_of_affine(geometry.path, shape, affine, is_anatomical=False)
    return replace(found, unit=other.unit)


def axes_between(source: Affine, target: Affine) -> Orientation:
    """Return the order and direction of axes that best align an array with another grid.

    Unlike the nearest anatomical axes of both grids, they do not depend on rounding near 45
    degrees.
    """
    orientation: Orientation = nib.io_orientation(np.linalg.solve(target, source))
    return orientation


def shear_warning(geometry: Geometry) -> str | None:
    """Return a warning about a sheared image; None if its axes are at right angles."""
    if not is_sheared(geometry.affine):
        return None
    return (
        f"{geometry.path} has axes that deviate from a right angle by "
        f"{shear_degrees(geometry.affine):.3g} degrees, as with a tilted gantry: the network "
        "treats the grid as right-angled; volumes in mL and distances in mm take the tilt into "
        "account"
    )


def voxel_mm3(affine: Affine) -> float:
    """Return the volume of a voxel in mm3, also for axes that are not at right angles."""
    return float(abs(np.linalg.det(affine[:3, :3])))


def shear_degrees(affine: Affine) -> float:
    """Return the largest deviation of two axes from a right angle, in degrees."""
    directions = affine[:3, :3] / voxel_sizes(affine)
    cosines = np.abs(directions.T @ directions - np.eye(3))
    return math.degrees(math.asin(min(1.0, float(cosines.max()))))


def is_sheared(affine: Affine) -> bool:
    """Return whether axes are not at right angles, as in a CT with a tilted gantry."""
    return shear_degrees(affine) > SHEARED_DEGREES


def _corners_apart_mm(a: Affine, b: Affine, shape: Shape) -> float:
    return float(np.linalg.norm((_corners(a, shape) - _corners(b, shape)), axis=0).max())


def _tolerance_mm(affine: Affine, shape: Shape, spacing_mm: Sequence[float]) -> float:
    rounding_mm = FLOAT32_ROUNDING * float(np.abs(_corners(affine, shape)).max())
    return min(max(min(spacing_mm) / 10, rounding_mm), MAX_DISTANCE * min(spacing_mm))


def _corners(affine: Affine, shape: Shape) -> npt.NDArray[np.float64]:
    corners = np.indices((2, 2, 2)).reshape(3, -1) * (np.array(shape)[:, None] - 1)
    located: npt.NDArray[np.float64] = affine[:3, :3] @ corners + affine[:3, 3:]
    return located
