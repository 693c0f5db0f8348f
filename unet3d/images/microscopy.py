"""What formats of microscopes share: optional packages, lengths, and spacings that are unknown."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.errors import VolumeError
from unet3d.images.geometry import Geometry, geometry_of_affine
from unet3d.images.source import Reading

logger = logging.getLogger(__name__)

NAMES = {"nm": "nanometer", "µm": "micrometer", "mm": "millimeter"}
"""Names of :class:`~unet3d.images.units.Units` in OME's metadata."""

_warned: set[tuple[Path, bool]] = set()


def package(name: str, what: str) -> Any:
    """Return an optional package; VolumeError, which begins with ``what``, if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise VolumeError(
            f"{what} needs {name}: pip install 'unet3d-parallel[microscopy]'"
        ) from error


def length_mm(number: object, unit_mm: float | None) -> float | None:
    """Return a positive number of a file in mm; None if it is not one, or its unit is unknown."""
    try:
        length = float(str(number)) * (unit_mm or math.nan)
    except ValueError:
        return None
    # 10 nm are 1e-5 mm, not 9.999999999999999e-06
    return float(f"{length:.12g}") if 0 < length < math.inf else None


def placed(
    path: Path,
    shape: tuple[int, int, int, int],
    stated_mm: Sequence[float | None],
    reading: Reading,
    *,
    origin_mm: Sequence[float] = (0.0, 0.0, 0.0),
    unit: str | None = None,
) -> Geometry:
    """Return the geometry of an array (I, J, K, C), whose file states lengths along X, Y, Z.

    Unknown lengths (None) become the finest known one, or 1 mm. A warning says so once for all
    files in a folder.
    """
    stated_mm = reading.spacing_mm or stated_mm
    known = [mm for mm in stated_mm if mm is not None]
    has_spacing = len(known) == 3
    if not has_spacing and (path.parent, bool(known)) not in _warned:
        _warned.add((path.parent, bool(known)))
        unknown = ", ".join(axis for axis, mm in zip("XYZ", stated_mm, strict=True) if mm is None)
        taken = f"{min(known):.6g} mm" if known else "1 mm"
        message = "%s does not state the distance of voxels along %s, so %s is taken; %s"
        logger.warning(message, path, unknown, taken, "state it with --spacing")
    x, y, z = (min(known, default=1.0) if mm is None else mm for mm in stated_mm)
    affine = np.diag([x, y, z, 1.0])
    affine[:3, 3] = origin_mm
    found = geometry_of_affine(path, shape, affine, (x, y, z), is_anatomical=False)
    return replace(found, unit=unit, has_spacing=has_spacing)
