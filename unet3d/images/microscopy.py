"""What formats of microscopes share: optional packages, lengths, and spacings that are unknown."""

import logging
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from unet3d.config import Spacing
from unet3d.errors import VolumeError

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


def whole_spacing(path: Path, stated_mm: Sequence[float | None], remedy: str) -> Spacing:
    """Return a spacing along X, Y, Z in which lengths may be unknown (None).

    They become the finest known one, or 1 mm. A warning ends with ``remedy``; it is given once for
    all files in a folder.
    """
    known = [mm for mm in stated_mm if mm is not None]
    if len(known) < 3 and (path.parent, bool(known)) not in _warned:
        _warned.add((path.parent, bool(known)))
        unknown = ", ".join(axis for axis, mm in zip("XYZ", stated_mm, strict=True) if mm is None)
        taken = f"{min(known):.6g} mm" if known else "1 mm"
        message = "%s does not state the distance of voxels along %s, so %s is taken; %s"
        logger.warning(message, path, unknown, taken, remedy)
    x, y, z = (min(known, default=1.0) if mm is None else mm for mm in stated_mm)
    return (x, y, z)
