"""Opening NIfTI and MGH volumes, once they look sound, and reading voxels as they are stored.

A file may be damaged, or made to do harm. So nothing is read but regular files; the header is taken
from a few bytes, without what follows it; its claims are compared with the size of the file before
anything is allocated; and of a compressed file no more is unpacked than those claims.
"""

import gzip
import io
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.volumeutils import apply_read_scaling

from unet3d.errors import VolumeError, reason_of
from unet3d.images.files import (
    PARTNERS,
    is_gzip_file,
    members,
    times,
    volume_suffix,
)
from unet3d.images.memory_limits import explaining_memory, refuse_beyond_memory
from unet3d.images.scratch import Scratch
from unet3d.images.voxels import FileVoxels, StoredVoxels

HEADER_BYTES = 540
"""Size of the larger of the two NIfTI headers."""

MAX_AXES = 7
"""What the NIfTI format has room for."""

MAX_OFFSET_BYTES = 2**28
"""Where the voxels begin at the latest: extensions fill a few MB at most."""

MAX_TAIL_BYTES = 2**20
"""What may follow the voxels, such as the footer of an MGH file."""

MAX_DEFLATE_RATIO = 1040
"""No gzip file grows more than about 1032 times when it is unpacked."""

GZIP_START_BYTES = 2**17
"""In so many bytes of a gzip file its own header ends, and the volume's is complete. What comes
before these may have any length in the format: names, empty parts."""

GZIP_OVERHEAD = 1 / 8
"""A gzip file is no larger than its content by more than this part, whatever it is made of."""

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredVolume:
    """A volume whose header has been read and whose voxels have not."""

    header: Any
    """nibabel's, of the format of the file; of other formats one of NIfTI with the geometry."""
    voxels: StoredVoxels
    """What reads the voxels."""
    affine: npt.NDArray[np.float64]
    """(4, 4): from the indices of a stored voxel to the header's unit of length."""
    pixdim: tuple[float, ...]
    """The spacing as the file has it, where nibabel's header replaces 0 by 1 or has fewer digits;
    empty in an MGH file."""


def open_nifti(path: Path) -> StoredVolume:
    """Read the header of a NIfTI or MGH volume, not its voxels, once the file looks sound.

    Raises:
        VolumeError: The file is missing, damaged, or of a kind that cannot be used.
    """
    files = members(path)
    if volume_suffix(path) in PARTNERS and len(files) == 1 and path.is_file():
        partner = f"{path.stem}{PARTNERS[volume_suffix(path)]}"
        raise VolumeError(f"{path} lacks its partner {partner}; a pair needs both files")
    for file in files:
        refuse_irregular(file)
        _refuse_unlike_its_name(file)
    try:
        with np.errstate(all="ignore"):  # NaN and infinity are refused by what reads the header
            volume = _load(*files)
    except VolumeError:
        raise
    except Exception as error:  # a damaged header can raise anything in nibabel
        raise _unreadable(path, error) from error
    refuse_unreal(path, volume.voxels.dtype)
    refuse_false_claims(path, files[-1], volume, is_gzip_file(files[-1]))
    return volume


def refuse_irregular(path: Path) -> None:
    """Refuse what would block or never end when it is read: pipes, sockets, devices.

    Args:
        path: The file; links are followed.

    Raises:
        VolumeError: It is no regular file, or cannot be looked at.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise VolumeError(f"cannot read {path}: {reason_of(error)}") from error
    if stat.S_IFMT(mode) in KINDS:
        raise VolumeError(f"{path} is {KINDS[stat.S_IFMT(mode)]}, not a file; name a volume")


def refuse_unreal(path: Path, dtype: np.dtype[Any]) -> None:
    """Refuse voxels that are no real numbers.

    Args:
        path: The volume, for the message.
        dtype: The type of its voxels.

    Raises:
        VolumeError: They are complex, colours, or something else.
    """
    if dtype.kind not in "buif":
        kind = "complex" if dtype.kind == "c" else "colour" if dtype.names else "unknown"
        raise VolumeError(f"{path} holds {kind} voxels; only real numbers can be used")


def stored_axes(path: Path, volume: StoredVolume) -> tuple[int, int, int, int]:
    """Return the stored shape in voxels, padded to three axes, and the number of channels.

    Args:
        path: The file, for messages.
        volume: From ``open_volume``.

    Raises:
        VolumeError: There are no voxels, or more axes than these.
    """
    x, y, z, num_channels, *further = (*volume.voxels.shape, 1, 1, 1, 1)
    if min(x, y, z, num_channels, *further) < 1:
        raise VolumeError(f"{path} claims the shape {times(volume.voxels.shape)}; it has no voxels")
    if max(further, default=1) > 1:
        raise VolumeError(
            f"{path} has {len(volume.voxels.shape)} axes ({times(volume.voxels.shape)}); "
            "at most three and one for channels can be used"
        )
    return x, y, z, num_channels


def raw_voxels(path: Path, volume: StoredVolume, scratch: Scratch) -> npt.NDArray[Any]:
    """Read the voxels as they are stored, without the scaling in the header.

    Args:
        path: The volume.
        volume: From ``open_volume``.
        scratch: Where they go, unless they are mapped.

    Returns:
        The shape is that of :func:`stored_axes`; nobody may change it.

    Raises:
        VolumeError: The file is damaged, or too large for the memory.
    """
    axes = stored_axes(path, volume)
    try:
        with explaining_memory(f"cannot read {path}"), np.errstate(all="ignore"):
            stored = volume.voxels.read(scratch, f"{path}: reading {times(axes)} voxels")
            return stored.reshape(axes)
    except VolumeError:
        raise
    except Exception as error:  # OSError, EOFError, an error of ISA-L's, ...
        raise _unreadable(path, error) from error


def scaled_voxels(path: Path, volume: StoredVolume, copied_bytes: int) -> npt.NDArray[Any]:
    """Read the voxels with the scaling in the header applied.

    Args:
        path: The volume.
        volume: From ``open_volume``.
        copied_bytes: What the caller will allocate beside them for each voxel.

    Returns:
        The shape is that of :func:`stored_axes`.

    Raises:
        VolumeError: The file is damaged, or too large for the memory.
    """
    voxels = volume.voxels
    axes = stored_axes(path, volume)
    is_scaled = (voxels.slope, voxels.inter) != (1, 0)
    read_bytes = (0 if voxels.is_mapped else voxels.dtype.itemsize) + (8 if is_scaled else 0)
    refuse_beyond_memory(
        math.prod(axes) * (read_bytes + copied_bytes),
        f"{path}: reading {times(axes)} voxels",
        "use a machine with more, or cut the volume into pieces",
    )
    stored = raw_voxels(path, volume, Scratch())
    if not is_scaled:
        return stored
    # Numbers that overflow become infinite, and are counted as such.
    with explaining_memory(f"cannot read {path}"), np.errstate(all="ignore"):
        scaled: npt.NDArray[Any] = apply_read_scaling(
            np.asarray(stored), voxels.slope, voxels.inter
        )
        return scaled


def _load(header: Path, voxels: Path | None = None) -> StoredVolume:
    """Read the header of one file or of a pair, by the format that it has.

    nibabel's own ``load`` derives the partner from the name, and finds it only where both endings
    are in lower case or both in upper case. It also reads the extensions of the header.
    """
    start = _start(header)
    if volume_suffix(header) in (".mgz", ".mgh"):
        return _stored(nib.MGHImage, header, nib.MGHImage.header_class(start), ())
    single = voxels is None
    formats = (nib.Nifti1Image, nib.Nifti2Image) if single else (nib.Nifti1Pair, nib.Nifti2Pair)
    for format_ in formats:
        if format_.header_class.may_contain_header(start):
            raw = start[: format_.header_class.template_dtype.itemsize]
            unchanged = format_.header_class(raw, check=False)
            if not 1 <= unchanged["dim"][0] <= MAX_AXES:
                num_axes = unchanged["dim"][0]
                raise VolumeError(f"{header} claims to have {num_axes} axes; it is damaged")
            if np.isinf([unchanged["scl_slope"], unchanged["scl_inter"]]).any():
                raise VolumeError(f"{header} scales its voxels by infinity; fix its header")
            pixdim = tuple(unchanged["pixdim"][1:4].tolist())
            return _stored(format_, voxels or header, format_.header_class(raw), pixdim)
    if not single and nib.AnalyzeImage.header_class.may_contain_header(start):
        raise VolumeError(
            f"{header} is in the Analyze 7.5 format, which has no orientation; convert it to NIfTI"
        )
    raise VolumeError(f"cannot read {header}: it does not begin with a NIfTI header")


def _start(file: Path) -> bytes:
    """Return as many bytes as the header of a volume has, or fewer at the end of a file."""
    if not is_gzip_file(file):
        with file.open("rb") as stream:
            return stream.read(HEADER_BYTES)
    with file.open("rb") as stream:
        compressed = io.BytesIO(stream.read(GZIP_START_BYTES))
    try:
        with gzip.GzipFile(fileobj=compressed) as unpacked:
            return unpacked.read(HEADER_BYTES)
    except EOFError as error:
        if len(compressed.getvalue()) < GZIP_START_BYTES:
            raise
        raise VolumeError(
            f"cannot read {file}: its first {GZIP_START_BYTES} bytes hold no header of a volume"
        ) from error


def _stored(format_: Any, voxels: Path, header: Any, pixdim: tuple[float, ...]) -> StoredVolume:
    proxy = format_.ImageArrayProxy(str(voxels), header)  # which knows the format's rules
    return StoredVolume(
        header=header,
        voxels=FileVoxels(
            voxels,
            tuple(int(size) for size in proxy.shape),
            proxy.dtype,
            offset=int(proxy.offset),
            order=proxy.order,
            slope=float(proxy.slope),
            inter=float(proxy.inter),
            is_packed=is_gzip_file(voxels),
            max_tail_bytes=MAX_TAIL_BYTES,
        ),
        affine=np.array(header.get_best_affine(), np.float64),
        pixdim=pixdim,
    )


def refuse_false_claims(path: Path, file: Path, volume: StoredVolume, is_compressed: bool) -> None:
    """Refuse a header that does not describe the file with the voxels.

    Args:
        path: The volume, for messages.
        file: The file with the voxels.
        volume: What its header says.
        is_compressed: Whether the voxels are compressed.

    Raises:
        VolumeError: There are no voxels, too many axes, or the file is shorter or longer.
    """
    stored_axes(path, volume)
    try:
        file_bytes = file.stat().st_size
    except OSError as error:
        raise VolumeError(f"cannot read {file}: {reason_of(error)}") from error
    voxels = volume.voxels
    offset, voxel_bytes = voxels.offset, math.prod(voxels.shape) * voxels.dtype.itemsize
    if not 0 <= offset <= MAX_OFFSET_BYTES:
        raise VolumeError(f"{path} claims that its voxels begin at byte {offset}; it is damaged")
    num_bytes = offset + voxel_bytes
    if num_bytes > file_bytes * (MAX_DEFLATE_RATIO if is_compressed else 1):
        raise VolumeError(
            f"{path} claims the shape {times(volume.voxels.shape)}, {num_bytes} bytes, but "
            f"{file.name} has only {file_bytes}; it is damaged or incomplete"
        )
    # Of a compressed file the tail is known once it is unpacked; but the file may not be so long
    # that it holds more, however little that unpacks to.
    overhead = int(num_bytes * GZIP_OVERHEAD) + GZIP_START_BYTES if is_compressed else 0
    refuse_long_tail(path, file_bytes - num_bytes - overhead)


def refuse_long_tail(path: Path, tail_bytes: int) -> None:
    """Refuse a file that goes on for long after its voxels.

    Args:
        path: The volume, for messages.
        tail_bytes: What follows the voxels.

    Raises:
        VolumeError: That is more than a format puts there.
    """
    if tail_bytes > MAX_TAIL_BYTES:
        raise VolumeError(
            f"{path} goes on for more than {MAX_TAIL_BYTES} bytes after the voxels that its header "
            "describes; it is damaged, or the shape in its header is wrong"
        )


def _refuse_unlike_its_name(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(2)
    except OSError as error:
        raise VolumeError(f"cannot read {file}: {reason_of(error)}") from error
    if not start:
        raise VolumeError(f"{file} is empty (0 bytes)")
    is_gzip = start == b"\x1f\x8b"
    if is_gzip_file(file) and not is_gzip:
        raise VolumeError(f"{file} is not gzip-compressed, though its name says so; rename it")
    if not is_gzip_file(file) and is_gzip:
        raise VolumeError(f"{file} is gzip-compressed, though its name does not say so; rename it")


def _unreadable(path: Path, error: Exception) -> VolumeError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return VolumeError(f"cannot read {path}: {reason or type(error).__name__}")
