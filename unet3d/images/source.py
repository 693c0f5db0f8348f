"""The interface of all formats: one opened file of an image, whose voxels are read on demand.

The array of a mapped or chunked file reads what is sliced out of it; a compressed file is unpacked
once. A file may be damaged or malicious: before anything is allocated, the size that its header
claims is compared with the file's, and little more than the claimed size is ever unpacked.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from isal import igzip, isal_zlib

from unet3d.config import Reading as Reading
from unet3d.config import Shape
from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import times
from unet3d.images.geometry import Geometry
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.scratch import Scratch, forget_pages
from unet3d.inputs.reading import open_regular

DAMAGED = "it is damaged or incomplete: copy it again"

GZIP_MARK = b"\x1f\x8b"

MAX_TAIL_BYTES = 2**20
"""Most bytes that may follow the voxels, such as the footer of an MGH file."""

MAX_DEFLATE_RATIO = 1040
"""Bound on the ratio of unpacked to compressed size; gzip's highest is about 1032."""

PIECE_BYTES = 2**20

Packing = Literal["gzip", "zlib"] | None

Voxels = Any
"""An array (I, J, K, C) that is sliced like NumPy's: in memory, mapped, or in chunks.

Slicing it gives read-only voxels that NumPy can convert to an array."""


AS_STATED = Reading()
"""Users state nothing about a volume."""


@dataclass(eq=False)
class Source:
    """One file of an image, or one series: its geometry, and its voxels on demand.

    An intensity is a stored number times ``slope`` plus ``inter``. ``read`` returns the voxels;
    ``unpacked_bytes`` is the memory or disk space that it allocates, 0 for a mapped file.
    """

    geometry: Geometry
    dtype: np.dtype[Any]
    read: Callable[[Scratch], Voxels]
    _: KW_ONLY
    slope: float = 1.0
    inter: float = 0.0
    unpacked_bytes: int = 0
    channel_names: tuple[str, ...] = ()
    """Names of the channels that the file states, or none."""
    levels: tuple[Shape, ...] = ()
    """Voxels along X, Y, Z of each level of a pyramid, the finest first; other files have none."""
    reading: Reading = AS_STATED
    """What users stated when it was opened."""
    scratch: Scratch = field(default_factory=Scratch)
    """Where compressed voxels are unpacked."""

    def __post_init__(self) -> None:
        if self.dtype.kind not in "buif":
            kinds = {"c": "complex", "V": "colour"}
            kind = kinds.get(self.dtype.kind, "unknown")
            raise VolumeError(f"{self.path} holds {kind} voxels; only real numbers can be used")
        self._lock = Lock()

    @property
    def is_scaled(self) -> bool:
        """Whether intensities differ from the stored numbers."""
        return (self.slope, self.inter) != (1.0, 0.0)

    @property
    def path(self) -> Path:
        """The file."""
        return self.geometry.path

    def voxels(self) -> Voxels:
        """Return the voxels; compressed voxels are unpacked on first use."""
        with self._lock:
            return self._voxels

    def forget(self) -> None:
        """Release memory pages of mapped voxels."""
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
        except Exception as error:  # a damaged file can raise OSError, EOFError and others
            raise unreadable(self.path, error) from error


def beginning_of(path: Path) -> bytes:
    """Return the first two bytes of a file; VolumeError if it is empty or not a regular file."""
    try:
        with open_regular(path) as file:
            start = file.read(2)
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}; name a volume") from error
    if not start:
        raise VolumeError(f"{path} is empty (0 bytes)")
    return start


def whole_axes(path: Path, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return a shape as (I, J, K, C); VolumeError if it is empty or has more axes."""
    x, y, z, num_channels, *further = (*shape, 1, 1, 1, 1)
    if min(x, y, z, num_channels, *further) < 1:
        raise VolumeError(f"{path} claims the shape {times(shape)}; it has no voxels")
    if max(further, default=1) > 1:
        raise VolumeError(
            f"{path} has {len(shape)} axes ({times(shape)}); at most three and one for channels "
            "can be used"
        )
    return x, y, z, num_channels


def unreadable(path: Path | str, error: Exception) -> VolumeError:
    """Return the VolumeError for a file that could not be read."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    is_damage = type(error).__name__ in ("EOFError", "IsalError", "BadGzipFile", "BadZipFile")
    advice = f"; {DAMAGED}" if is_damage else ""
    return VolumeError(f"cannot read {path}: {reason or type(error).__name__}{advice}")


def source_in_file(
    geometry: Geometry,
    file: Path,
    shape: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    *,
    packing: Packing,
    packed_from: int = 0,
    offset: int = 0,
    order: Literal["C", "F"] = "F",
    slope: float = 1.0,
    inter: float = 0.0,
) -> Source:
    """Return voxels (I, J, K, C) in a file, which begin ``offset`` bytes after ``packed_from``.

    If they are compressed, the stream begins at ``packed_from``, and ``offset`` counts unpacked
    bytes.
    """
    path, num_bytes = geometry.path, math.prod(shape) * dtype.itemsize
    begin, file_bytes = offset if packing else packed_from + offset, file.stat().st_size
    if begin < 0 or begin + num_bytes > file_bytes * (MAX_DEFLATE_RATIO if packing else 1):
        raise VolumeError(
            f"{path} claims the shape {times(shape)}, {num_bytes} bytes from byte {begin} on, but "
            f"{file.name} has only {file_bytes}; {DAMAGED}"
        )
    if not packing:
        _refuse_tail(path, file_bytes - begin - num_bytes)

    def read(scratch: Scratch) -> npt.NDArray[Any]:
        if packing is None:
            return np.memmap(str(file), dtype, "r", packed_from + offset, shape, order)
        voxels = scratch.empty(shape, dtype, f"{path}: reading {times(shape)} voxels", order)
        target = memoryview(voxels.reshape(-1, order=order).view(np.uint8).data)
        unpack = _unpack_gzip if packing == "gzip" else _unpack_zlib
        _refuse_tail(path, unpack(file, packed_from, offset, target))
        return voxels

    unpacked_bytes = 0 if packing is None else num_bytes
    return Source(geometry, dtype, read, slope=slope, inter=inter, unpacked_bytes=unpacked_bytes)


def _refuse_tail(path: Path, num_bytes: int) -> None:
    """Refuse a file with many bytes after the voxels: the shape in its header may be too small."""
    if num_bytes > MAX_TAIL_BYTES:
        raise VolumeError(
            f"{path} has more than {MAX_TAIL_BYTES} bytes after the voxels that its "
            "header describes; it is damaged, or the shape in its header is wrong"
        )


def _unpack_gzip(path: Path, start: int, offset: int, target: memoryview) -> int:
    """Fill ``target`` from a gzip file, check it, and return the number of bytes that follow."""
    with path.open("rb") as file:
        file.seek(start)
        with igzip.open(file, "rb") as packed:  # type: ignore[no-untyped-call]
            skipped = packed.seek(offset)  # a wrong offset takes time, but no memory
            done = 0
            while count := packed.readinto(target[done : done + PIECE_BYTES]):
                done += count
            if skipped < offset or done < len(target):
                raise EOFError(f"its packed voxels end after {done} of {len(target)} bytes")
            tail_bytes = 0
            while tail_bytes <= MAX_TAIL_BYTES and (count := len(packed.read(PIECE_BYTES))):
                tail_bytes += count
    return tail_bytes


def _unpack_zlib(path: Path, start: int, offset: int, target: memoryview) -> int:
    """Fill ``target`` from a zlib stream, as :func:`_unpack_gzip` does from a gzip file."""
    inflater, done, tail_bytes = isal_zlib.decompressobj(), 0, 0
    with path.open("rb") as file:
        file.seek(start)
        while not inflater.eof and tail_bytes <= MAX_TAIL_BYTES:
            packed = inflater.unconsumed_tail or file.read(PIECE_BYTES)
            part = inflater.decompress(packed, min(PIECE_BYTES, len(target) - done) or PIECE_BYTES)
            if not packed and not part:
                raise EOFError("its packed voxels ended before its checksum")
            if done == len(target):
                tail_bytes += len(part)
            else:
                target[done : done + len(part)] = part
                done += len(part)
    if done < len(target):
        raise EOFError(f"its packed voxels end after {done} of {len(target)} bytes")
    return tail_bytes
