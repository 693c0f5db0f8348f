"""The seam of all formats: one file of an image, opened, whose voxels come when they are asked for.

A format is a module with a function that returns a :class:`Source`. A file that is mapped or
chunked gives an array that reads what is sliced out of it; a packed one is unpacked once.
"""

import os
import stat
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np

from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import times
from unet3d.images.geometry import Geometry
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.scratch import Scratch

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Voxels(Protocol):
    """An array (I, J, K, C) that is sliced as NumPy's are: in memory, mapped, or in chunks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along each axis."""
        ...

    def __getitem__(self, box: tuple[slice, ...], /) -> Any:
        """Return the voxels in a box, as NumPy can take them; nobody changes them."""
        ...


class Source:
    """One file of an image, or one series: its geometry, and its voxels on demand.

    An intensity is a stored number times ``slope`` plus ``inter``. ``read`` returns the voxels;
    ``unpacked_bytes`` is the room that this takes, 0 of a file that is mapped.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: np.dtype[Any],
        read: Callable[[Scratch], Voxels],
        *,
        slope: float = 1.0,
        inter: float = 0.0,
        unpacked_bytes: int = 0,
    ) -> None:
        refuse_unreal(geometry.path, dtype)
        self.geometry = geometry
        self.dtype = dtype
        self.slope, self.inter = slope, inter
        self.unpacked_bytes = unpacked_bytes
        self.scratch = Scratch()
        """Where packed voxels go; set before they are asked for."""
        self._read = read
        self._lock = Lock()

    @property
    def path(self) -> Path:
        """The file."""
        return self.geometry.path

    def voxels(self) -> Voxels:
        """Return the voxels, unpacked when they are first asked for.

        Raises:
            VolumeError: The file is damaged, or too large for the memory.
        """
        with self._lock:
            return self._voxels

    @cached_property
    def _voxels(self) -> Voxels:
        try:
            with explaining_memory(f"cannot read {self.path}"), np.errstate(all="ignore"):
                return self._read(self.scratch)
        except VolumeError:
            raise
        except Exception as error:  # OSError, EOFError, whatever a reader makes of damage
            raise unreadable(self.path, error) from error


def refuse_irregular(path: Path) -> None:
    """Refuse what would block or never end when it is read, and what is empty or not there."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}") from error
    if stat.S_IFMT(status.st_mode) in KINDS:
        kind = KINDS[stat.S_IFMT(status.st_mode)]
        raise VolumeError(f"{path} is {kind}, not a file; name a volume")
    if not status.st_size:
        raise VolumeError(f"{path} is empty (0 bytes)")


def refuse_unreal(path: Path, dtype: np.dtype[Any]) -> None:
    """Refuse voxels that are complex, colours, or anything else but real numbers."""
    if dtype.kind not in "buif":
        kind = "complex" if dtype.kind == "c" else "colour" if dtype.names else "unknown"
        raise VolumeError(f"{path} holds {kind} voxels; only real numbers can be used")


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
