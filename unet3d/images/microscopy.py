"""What formats of microscopes share: optional packages, lengths, and spacings that are unknown."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.images.chunked import ChunkedVoxels
from unet3d.images.files import file_of, times, url_of
from unet3d.images.geometry import Geometry, geometry_of_affine
from unet3d.images.source import Reading, Source, whole_axes
from unet3d.images.units import Units, unit_mm
from unet3d.inputs.plain_data import printable

logger = logging.getLogger(__name__)

NAMES = {"nm": "nanometer", "µm": "micrometer", "mm": "millimeter"}
"""Names of :class:`~unet3d.images.units.Units` in OME's metadata."""

_warned: set[tuple[Path, str]] = set()


def warn_once(path: Path | str, message: str, *details: object) -> None:
    """Log a warning about a file, which comes first in it, once for all files in its folder."""
    key = (file_of(Path(path)).parent, message)
    if key not in _warned:
        _warned.add(key)
        logger.warning(message, path, *details)


def package(name: str, what: str) -> Any:
    """Return an optional package; VolumeError, which begins with ``what``, if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise VolumeError(
            f"{what} needs {name}: pip install 'unet3d-parallel[microscopy]'"
        ) from error


def named_axes(
    path: Path | str, shape: Sequence[int], stated: Sequence[str], reading: Reading
) -> tuple[str, ...]:
    """Return the names of the axes of an array, as users state them, or else its file.

    They include x, y and z; of others than t and c there is only one position. Label maps may lack
    axes c and t that users state.
    """
    axes = tuple(reading.axes or stated)
    for name in ("c", "t"):
        if len(axes) > len(shape):
            axes = tuple(one for one in axes if one != name)
    sizes = dict(zip(axes, shape, strict=False))
    if len(shape) < 3:
        raise VolumeError(f"{path} has {times(shape)} pixels; it is a picture, not a volume")
    if len(axes) != len(shape) or len(sizes) < len(axes) or not {*"zyx"} <= sizes.keys():
        named = f"named {printable(','.join(axes))}" if axes else "without names"
        raise VolumeError(
            f"{path} has {len(shape)} axes ({times(shape)}) {named}; a volume needs z, y and x, "
            "each once: name all axes with --axes, such as czyx"
        )
    for name, size in sizes.items():
        if name not in (*"tczyx",) and size > 1:
            raise VolumeError(
                f"{path} has {size} positions along its axis {printable(name)}; if they are points "
                "in time or channels, name it t or c with --axes"
            )
    return axes


def point_in_time(path: Path | str, number: int, reading: Reading) -> int:
    """Return which of a number of points in time to read; of one, a choice does not matter."""
    if number == 1:
        return 0
    if reading.time is None:
        raise VolumeError(
            f"{path} has {number} points in time; choose one with --time, 0 to {number - 1}, or if "
            "they are planes, name the axes with --axes, such as zyx"
        )
    if not 0 <= reading.time < number:
        raise VolumeError(
            f"{path} has no point in time {reading.time}; --time may be 0 to {number - 1}"
        )
    return reading.time


def length_mm(number: object, one_mm: float | None) -> float | None:
    """Return a positive number of a file in mm; None if it is not one, or its unit is unknown."""
    try:
        length = float(str(number)) * (one_mm or math.nan)
    except ValueError:
        return None
    # 10 nm are 1e-5 mm, not 9.999999999999999e-06
    return float(f"{length:.12g}") if 0 < length < math.inf else None


def source_of_array(
    path: Path,
    array: Any,
    axes: Sequence[str],
    reading: Reading,
    *,
    spacing_mm: Sequence[float | None],
    origin_mm: Sequence[float] = (0.0, 0.0, 0.0),
    unit: str | None = None,
    channel_names: tuple[str, ...] = (),
    levels: tuple[Shape, ...] = (),
) -> Source:
    """Return a volume over an array in chunks, whose axes have names.

    Unknown lengths (None) along X, Y, Z become the finest known one, or 1 mm. A warning says so
    once for all files in a folder.
    """
    volume = url_of(path) or path
    number = dict(zip(axes, array.shape, strict=True)).get("t", 1)
    voxels = ChunkedVoxels(volume, array, axes, point_in_time(volume, number, reading))
    known = [mm for mm in spacing_mm if mm is not None]
    has_spacing = len(known) == 3
    if not has_spacing:
        unknown = ", ".join(axis for axis, mm in zip("XYZ", spacing_mm, strict=True) if mm is None)
        taken = f"{min(known):.6g} mm" if known else "1 mm"
        said = f"along {unknown}, so {taken} is taken; state it with --spacing"
        warn_once(path, f"%s does not state the distance of voxels {said}")
    x, y, z = (min(known, default=1.0) if mm is None else mm for mm in spacing_mm)
    affine = np.diag([x, y, z, 1.0])
    affine[:3, 3] = origin_mm
    shape = whole_axes(path, voxels.shape)
    geometry = geometry_of_affine(path, shape, affine, (x, y, z), is_anatomical=False)
    return Source(
        replace(geometry, unit=unit, has_spacing=has_spacing),
        voxels.dtype,
        lambda scratch: voxels,
        channel_names=channel_names if len(channel_names) == geometry.num_channels else (),
        levels=levels,
    )


def written_place(geometry: Geometry) -> tuple[Spacing, list[float]]:
    """Return the spacing and the origin of a scan along the axes of its file, in mm.

    The origin is 0 if the axes of the scan are turned, which these formats cannot store.
    """
    stored = geometry.as_stored()
    origin_mm = [0.0] * 3 if is_turned(stored) else stored.affine[:3, 3].tolist()
    return stored.spacing_mm, origin_mm


def is_turned(geometry: Geometry) -> bool:
    """Return whether axes do not run along X, Y, Z, which formats of microscopes cannot store."""
    turned = geometry.affine[:3, :3] - np.diag(geometry.spacing_mm)
    return bool(np.abs(turned).max() > 1e-3 * min(geometry.spacing_mm))


def states_spacing(geometry: Geometry) -> bool:
    """Return whether labels state the spacing of a scan: not if all of it is the 1 mm assumed."""
    return geometry.has_spacing or set(geometry.spacing_mm) != {1.0}


def unit_name(mm: float | None) -> str | None:
    """Return OME's name of a unit with a length in mm; None for other units."""
    return next((name for symbol, name in NAMES.items() if unit_mm(symbol) == mm), None)


def written_unit(geometry: Geometry) -> str:
    """Return the symbol of the unit of a scan's file, or else of one that suits its spacing."""
    symbols = {name: symbol for symbol, name in NAMES.items()}
    return symbols.get(geometry.unit or "", Units.of(geometry.spacing_mm).length)


def rounded(values: Any) -> list[float]:
    """Return numbers without the rounding errors of their conversion to mm and back."""
    return [float(f"{value:.12g}") for value in values]
