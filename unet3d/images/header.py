"""Where a volume lies: its header, read in RAS, and whether two volumes lie on one grid."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.formats import open_volume
from unet3d.images.grids import (
    MAX_SPACING_MM,
    MIN_SPACING_MM,
    axes_between,
    column_lengths,
    corner_tolerance_mm,
    corners_apart_mm,
    is_flat,
    is_sheared,
    rounded_mm,
    shear_degrees,
)
from unet3d.images.stored import StoredVolume, stored_axes

logger = logging.getLogger(__name__)

MILLIMETRES_PER_UNIT = {1: 1000.0, 3: 0.001}
"""By the codes of a NIfTI header for metre and micrometre; every other code counts as mm."""

RAS = nib.io_orientation(np.eye(4))
"""The orientation of every array outside this module, in nibabel's form."""

GEOMETRY_FIELDS = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code"),
    *("quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class VolumeHeader:
    """Where the voxels of a volume lie, in RAS and as they are stored."""

    path: Path
    """The file that it was read from; of several channel files the first."""
    shape: Shape
    """Voxels along X, Y, Z."""
    num_channels: int
    spacing_mm: Spacing
    """Distance of neighbouring voxels along X, Y, Z, rounded: the same in every orientation."""
    stored_spacing_mm: Spacing = field(repr=False)
    """That along each stored axis, not rounded: to the last bit of the file."""
    affine: npt.NDArray[np.float64]
    """(4, 4): from RAS voxel indices to mm."""
    stored_orientation: npt.NDArray[np.float64] = field(repr=False)
    """(3, 2): for each stored axis, the RAS axis and the direction, in nibabel's form."""
    stored_header: Any = field(repr=False)
    """A NIfTI header with nothing but the stored geometry, for ``write_label``."""

    @property
    def stored_shape(self) -> Shape:
        """Voxels along each axis as they are stored."""
        i, j, k = (self.shape[int(axis)] for axis in self.stored_orientation[:, 0])
        return (i, j, k)

    @property
    def exact_mm(self) -> Spacing:
        """The spacing along X, Y, Z to the last bit, as the readers of nnU-Net return it.

        That is the stored one, unless axes are turned: nibabel, which turns an image for nnU-Net,
        takes it from the affine then, in single precision.
        """
        if np.array_equal(self.stored_orientation, RAS):
            return self.stored_spacing_mm
        x, y, z = column_lengths(self.affine).astype(np.float32).tolist()
        return (x, y, z)

    def as_stored(self) -> "VolumeHeader":
        """Return the same, with the stored axes, in their direction, as X, Y, Z."""
        i, j, k = (int(axis) for axis in self.stored_orientation[:, 0])
        turn = nib.orientations.ornt_transform(RAS, self.stored_orientation)
        return replace(
            self,
            shape=self.stored_shape,
            spacing_mm=(self.spacing_mm[i], self.spacing_mm[j], self.spacing_mm[k]),
            affine=self.affine @ nib.orientations.inv_ornt_aff(turn, self.shape),
            stored_orientation=RAS,
        )


def read_header(path: Path | str) -> VolumeHeader:
    """Read where a volume lies, without its voxels.

    Args:
        path: The volume.

    Raises:
        VolumeError: The file cannot be read, or is no volume that can be oriented.
    """
    path = Path(path)
    return header_of(path, open_volume(path))


def same_grid(a: VolumeHeader, b: VolumeHeader, tolerance_mm: float | None = None) -> str | None:
    """Compare where two volumes lie, whatever their stored orientations.

    Args:
        a: One volume.
        b: The other.
        tolerance_mm: How far apart the same corner may lie; None: a tenth of the finest spacing,
            or more where single precision cannot tell so little.

    Returns:
        None if they share one grid, else a phrase that says what disagrees.
    """
    orientation = axes_between(b.affine, a.affine)
    x, y, z = np.argsort(orientation[:, 0])
    if a.shape != (b.shape[x], b.shape[y], b.shape[z]):
        return f"shapes {times(a.shape)} and {times(b.shape)} differ"
    affine = b.affine @ nib.orientations.inv_ornt_aff(orientation, b.shape)
    apart_mm = corners_apart_mm(a.affine, affine, a.shape)
    if tolerance_mm is None:
        tolerance_mm = corner_tolerance_mm(a.affine, a.shape, a.spacing_mm)
    if apart_mm > tolerance_mm:
        return f"affines differ, corners lie up to {apart_mm:.3g} mm apart"
    return None


def shear_warning(header: VolumeHeader) -> str | None:
    """Return what the user of a sheared volume must know; None where axes are at right angles."""
    if not is_sheared(header.affine):
        return None
    degrees = shear_degrees(header.affine)
    return (
        f"{header.path} has axes that miss a right angle by {degrees:.3g} degrees, as "
        "of a tilted gantry: the network sees its voxels on a right-angled grid; volumes in mL and "
        "distances in mm are those of the tilted one"
    )


def header_of(path: Path, stored: StoredVolume) -> VolumeHeader:
    """Return where an opened volume lies.

    Args:
        path: The volume, for messages.
        stored: From :func:`unet3d.images.formats.open_volume`.

    Raises:
        VolumeError: Its header does not say where its voxels lie.
    """
    unit_mm = 1.0
    if isinstance(stored.header, nib.Nifti1Header):
        unit_mm = MILLIMETRES_PER_UNIT.get(int(stored.header["xyzt_units"]) & 7, 1.0)
        _check_forms(path, stored)
    affine = np.array(stored.affine, dtype=np.float64)
    affine[:3] *= unit_mm
    lengths = column_lengths(affine)
    if not np.isfinite(affine[:3, 3]).all():
        raise VolumeError(f"{path} begins at {times(affine[:3, 3])} mm; fix its header")
    if not np.isfinite(affine).all() or not (lengths > 0).all():
        raise VolumeError(f"{path} has the spacing {times(lengths)} mm; fix its header")
    if lengths.min() < MIN_SPACING_MM or lengths.max() > MAX_SPACING_MM:
        raise VolumeError(
            f"{path} has the spacing {times(lengths)} mm, which no scan has; fix the spacing or "
            "its unit in the header"
        )
    if is_flat(affine):
        raise VolumeError(f"{path} has an affine that cannot be inverted; fix its header")
    *stored_shape, num_channels = stored_axes(path, stored)
    orientation = nib.io_orientation(affine)
    x, y, z = np.argsort(orientation[:, 0])  # the stored axes that run along X, Y, Z
    spacing_mm = _spacing_mm(stored, lengths, unit_mm)
    i, j, k = _exact_mm(stored, lengths, unit_mm)
    return VolumeHeader(
        path=path,
        shape=(stored_shape[x], stored_shape[y], stored_shape[z]),
        num_channels=num_channels,
        spacing_mm=(spacing_mm[x], spacing_mm[y], spacing_mm[z]),
        stored_spacing_mm=(i, j, k),
        affine=affine @ nib.orientations.inv_ornt_aff(orientation, stored_shape),
        stored_orientation=orientation,
        stored_header=_geometry(stored, stored_shape),
    )


def _check_forms(path: Path, stored: StoredVolume) -> None:
    if int(stored.header["sform_code"]) > 0:
        return
    # nibabel turns a spacing of zero into 1, so look at what the file has.
    spacing = stored.pixdim[: len(stored.voxels.shape)]
    if not (np.abs(spacing) > 0).all():
        raise VolumeError(f"{path} has the spacing {times(spacing)} mm; fix its header")
    if int(stored.header["qform_code"]) <= 0:
        logger.warning(
            "%s does not state its orientation (qform and sform codes are 0); its axes are taken "
            "as right to left, back to front, bottom to top",
            path,
        )


def _spacing_mm(
    stored: StoredVolume, lengths_mm: npt.NDArray[np.float64], unit_mm: float
) -> list[float]:
    """Return the rounded spacing of the stored axes, the same for every orientation of a scan.

    The spacing in the header has less rounding noise than the columns of an oblique affine.
    """
    zooms = [float(str(zoom)) for zoom in (*stored.header.get_zooms()[:3], 1.0, 1.0)[:3]]
    spacing_mm = _uncontradicted(np.array(zooms) * unit_mm, lengths_mm)
    return [rounded_mm(spacing) for spacing in spacing_mm]


def _exact_mm(
    stored: StoredVolume, lengths_mm: npt.NDArray[np.float64], unit_mm: float
) -> list[float]:
    """Return the spacing of the stored axes to the last bit."""
    said = np.abs([*stored.pixdim, 0.0, 0.0, 0.0][:3])  # of an MGH file nothing but the affine
    return _uncontradicted(said * unit_mm, lengths_mm)


def _uncontradicted(
    said_mm: npt.NDArray[np.float64], lengths_mm: npt.NDArray[np.float64]
) -> list[float]:
    """Return what is said, but what the affine says where they contradict each other."""
    agrees = np.isclose(said_mm, lengths_mm, rtol=1e-4, atol=0)
    found: list[float] = np.where(agrees, said_mm, lengths_mm).tolist()
    return found


def _geometry(stored: StoredVolume, stored_shape: list[int]) -> Any:
    two = isinstance(stored.header, nib.Nifti2Header) or max(stored_shape) > np.iinfo(np.int16).max
    header = nib.Nifti2Header() if two else nib.Nifti1Header()
    header.set_data_shape(stored_shape)
    if isinstance(stored.header, nib.Nifti1Header):
        for name in GEOMETRY_FIELDS:
            header[name] = stored.header[name]
    else:
        header.set_qform(stored.affine, code="scanner")
        header.set_sform(stored.affine, code="scanner")
        header.set_xyzt_units("mm")
    return header
