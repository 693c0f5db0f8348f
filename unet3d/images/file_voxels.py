"""Voxels in a part of a file: mapped where they are, or unpacked once.

A file may be damaged, or made to do harm: what its header claims is compared with its size before
anything is allocated, and of a packed file no more is unpacked than that.
"""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from isal import igzip, isal_zlib

from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.geometry import Geometry
from unet3d.images.scratch import Scratch
from unet3d.images.source import Source

MAX_OFFSET_BYTES = 2**28
"""Where the voxels begin at the latest: extensions fill a few MB at most."""

MAX_TAIL_BYTES = 2**20
"""What may follow the voxels, such as the footer of an MGH file."""

MAX_DEFLATE_RATIO = 1040
"""No gzip file grows more than about 1032 times when it is unpacked."""

PIECE_BYTES = 2**20

Packing = Literal["gzip", "zlib"] | None


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
    """Return voxels (I, J, K, C) in a file, behind an offset in what is packed from some byte on.

    An intensity is a stored number times ``slope`` plus ``inter``.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    begin = offset if packing else packed_from + offset
    _refuse_false_claims(geometry.path, file, shape, begin, num_bytes, packing)

    def read(scratch: Scratch) -> npt.NDArray[Any]:
        if packing is None:
            return np.memmap(str(file), dtype, "r", packed_from + offset, shape, order)
        what = f"{geometry.path}: reading {times(shape)} voxels"
        voxels = scratch.empty(shape, dtype, what, order)
        target = memoryview(voxels.reshape(-1, order=order).view(np.uint8).data)
        unpack = _unpack_gzip if packing == "gzip" else _unpack_zlib
        tail_bytes = unpack(file, packed_from, offset, target)
        _refuse_tail(geometry.path, tail_bytes)
        return voxels

    unpacked_bytes = 0 if packing is None else num_bytes
    return Source(geometry, dtype, read, slope=slope, inter=inter, unpacked_bytes=unpacked_bytes)


def _refuse_false_claims(
    path: Path,
    file: Path,
    shape: tuple[int, ...],
    offset: int,
    num_bytes: int,
    packing: Packing,
) -> None:
    """Refuse a header that does not describe the file with the voxels."""
    if not 0 <= offset <= MAX_OFFSET_BYTES:
        raise VolumeError(f"{path} claims that its voxels begin at byte {offset}; it is damaged")
    file_bytes = file.stat().st_size
    if offset + num_bytes > file_bytes * (MAX_DEFLATE_RATIO if packing else 1):
        raise VolumeError(
            f"{path} claims the shape {times(shape)}, {offset + num_bytes} bytes, but {file.name} "
            f"has only {file_bytes}; it is damaged or incomplete"
        )
    if not packing:
        _refuse_tail(path, file_bytes - offset - num_bytes)


def _refuse_tail(path: Path, tail_bytes: int) -> None:
    if tail_bytes > MAX_TAIL_BYTES:
        raise VolumeError(
            f"{path} goes on for more than {MAX_TAIL_BYTES} bytes after the voxels that its header "
            "describes; it is damaged, or the shape in its header is wrong"
        )


def _unpack_gzip(path: Path, start: int, offset: int, target: memoryview) -> int:
    """Fill memory from all members of a gzip file, check them, and return how much follows."""
    with path.open("rb") as file:
        file.seek(start)
        with igzip.open(file, "rb") as packed:  # type: ignore[no-untyped-call]
            skipped = len(packed.read(offset))
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
    """Do the same with one zlib stream, in which the voxels come first."""
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
