"""The seam of all formats: one file of an image, opened, whose voxels come when they are asked for.

A format is a module with a function that returns a :class:`Source`. A file that is mapped or
chunked gives an array that reads what is sliced out of it; a packed one is unpacked once.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import times
from unet3d.images.geometry import Geometry
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.scratch import Scratch, forget_pages
from unet3d.inputs.reading import open_regular

GZIP_MARK = b"\x1f\x8b"

Voxels = Any
"""An array (I, J, K, C) that is sliced as NumPy's are: in memory, mapped, or in chunks.

It returns the voxels in a box as NumPy can take them; nobody changes them."""


@dataclass(eq=False)
class Source:
    """One file of an image, or one series: its geometry, and its voxels on demand.

    An intensity is a stored number times ``slope`` plus ``inter``. ``read`` returns the voxels;
    ``unpacked_bytes`` is the room that this takes, 0 of a file that is mapped.
    """

    geometry: Geometry
    dtype: np.dtype[Any]
    read: Callable[[Scratch], Voxels]
    _: KW_ONLY
    slope: float = 1.0
    inter: float = 0.0
    unpacked_bytes: int = 0
    scratch: Scratch = field(default_factory=Scratch)
    """Where packed voxels go."""

    def __post_init__(self) -> None:
        if self.dtype.kind not in "buif":
            kinds = {"c": "complex", "V": "colour"}
            kind = kinds.get(self.dtype.kind, "unknown")
            raise VolumeError(f"{self.path} holds {kind} voxels; only real numbers can be used")
        self._lock = Lock()

    @property
    def is_scaled(self) -> bool:
        """Whether stored numbers are no intensities."""
        return (self.slope, self.inter) != (1.0, 0.0)

    @property
    def path(self) -> Path:
        """The file."""
        return self.geometry.path

    def voxels(self) -> Voxels:
        """Return the voxels, unpacked when they are first asked for."""
        with self._lock:
            return self._voxels

    def forget(self) -> None:
        """Give back the memory of what is mapped."""
        voxels = self.voxels()
        if isinstance(voxels, np.ndarray):
            forget_pages(voxels)

    @cached_property
    def _voxels(self) -> Voxels:
        try:
            with explaining_memory(f"cannot read {self.path}"), np.errstate(all="ignore"):
                return self.read(self.scratch)
        except VolumeError:
            raise
        except Exception as error:  # OSError, EOFError, whatever a reader makes of damage
            raise unreadable(self.path, error) from error


def beginning_of(path: Path) -> bytes:
    """Return the first bytes of a file; refuse one that is empty, and what is no regular file."""
    try:
        with open_regular(path) as file:
            start = file.read(2)
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}; name a volume") from error
    if not start:
        raise VolumeError(f"{path} is empty (0 bytes)")
    return start


def whole_axes(path: Path, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return a shape of one to many axes as (I, J, K, C), where it has no more than these."""
    x, y, z, num_channels, *further = (*shape, 1, 1, 1, 1)
    if min(x, y, z, num_channels, *further) < 1:
        raise VolumeError(f"{path} claims the shape {times(shape)}; it has no voxels")
    if max(further, default=1) > 1:
        raise VolumeError(
            f"{path} has {len(shape)} axes ({times(shape)}); at most three and one for channels "
            "can be used"
        )
    return x, y, z, num_channels


def unreadable(path: Path, error: Exception) -> VolumeError:
    """Return the error for a file that something fails to read."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return VolumeError(f"cannot read {path}: {reason or type(error).__name__}")
