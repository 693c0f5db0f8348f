"""Opening volume files: only what is sound gets through, the rest is refused with its reason."""

import gzip
import logging
import math
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError

# nibabel writes each oddity of a header to stderr without naming the file. What it does not mend
# it also raises, and that is reported from here.
logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)

SUFFIXES = (".nii.gz", ".nii", ".hdr", ".img", ".mgz", ".mgh")
"""File endings of a volume; a NIfTI pair is named by its .hdr or its .img."""

MAX_DEFLATE_RATIO = 1040
"""No gzip file grows more than about 1032 times when it is unpacked."""


def is_volume_file(path: Path) -> bool:
    """Tell by its name whether a file is a volume."""
    return path.name.lower().endswith(SUFFIXES)


def volume_stem(path: Path) -> str:
    """Return the name of a volume file without its ending: ``scan`` for ``scan.nii.gz``."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem


def open_volume(path: Path) -> Any:
    """Return nibabel's image, its header read and its voxels not, once the file looks sound.

    Raises:
        VolumeError: The file is missing, damaged, or of a kind that cannot be used.
    """
    if not is_volume_file(path):
        raise VolumeError(f"{path} is not named like a volume; known: {', '.join(SUFFIXES)}")
    for file in _files_of(path):
        _refuse_unlike_its_name(path, file)
    try:
        image = nib.load(path)
        data = Path(image.file_map["image"].filename)
        file_bytes = data.stat().st_size
    except Exception as error:  # a damaged header can raise anything in nibabel
        raise _unreadable(path, error) from error
    nifti = isinstance(image, nib.Nifti1Pair)
    if not nifti and not isinstance(image, nib.MGHImage):
        raise VolumeError(
            f"{path} is in the Analyze 7.5 format, which has no orientation; convert it to NIfTI"
        )
    dtype, axes = image.get_data_dtype(), stored_axes(path, image)
    if dtype.kind not in "buif":
        kind = "complex" if dtype.kind == "c" else "colour"
        raise VolumeError(f"{path} holds {kind} voxels; only real numbers can be used")
    num_bytes = image.dataobj.offset + math.prod(axes) * dtype.itemsize
    if num_bytes > file_bytes * (MAX_DEFLATE_RATIO if _is_gzip_name(data) else 1):
        raise VolumeError(
            f"{path} claims the shape {times(image.shape)}, {num_bytes} bytes, but {data.name} has "
            f"only {file_bytes}; it is damaged or incomplete"
        )
    return image


def stored_axes(path: Path, image: Any) -> tuple[int, int, int, int]:
    """Return the stored shape in voxels, padded to three axes, and the number of channels.

    Raises:
        VolumeError: There are no voxels, or more axes than these.
    """
    x, y, z, num_channels, *further = (*(int(size) for size in image.shape), 1, 1, 1, 1)
    if min(x, y, z, num_channels, *further) < 1:
        raise VolumeError(f"{path} claims the shape {times(image.shape)}; it has no voxels")
    if max(further, default=1) > 1:
        raise VolumeError(
            f"{path} has {len(image.shape)} axes ({times(image.shape)}); "
            "at most three and one for channels can be used"
        )
    return x, y, z, num_channels


def stored_voxels(path: Path, image: Any) -> npt.NDArray[Any]:
    """Read the voxels as they are stored, with the scaling in the header applied.

    Raises:
        VolumeError: The file is damaged, or too large for the memory.
    """
    try:
        if not _is_gzip_name(path):
            voxels: npt.NDArray[Any] = np.asanyarray(image.dataobj)
            return voxels
        with gzip.open(path) as stream:
            proxy = type(image).from_file_map({"image": nib.FileHolder(fileobj=stream)}).dataobj
            voxels = np.asanyarray(proxy)
            while stream.read(1 << 20):  # gzip checks its checksum only at the end of the file
                pass
            return voxels
    except Exception as error:  # OSError, EOFError, zlib.error, MemoryError, nibabel's own, ...
        raise _unreadable(path, error) from error


def times(numbers: Any) -> str:
    """Return numbers as messages show shapes and spacings: ``64x64x32``."""
    return "x".join(f"{number:.6g}" for number in numbers)


def _files_of(path: Path) -> tuple[Path, ...]:
    partners = {".hdr": ".img", ".img": ".hdr", ".HDR": ".IMG", ".IMG": ".HDR"}
    if path.suffix not in partners:
        return (path,)
    partner = path.with_suffix(partners[path.suffix])
    if path.is_file() and not partner.exists():
        raise VolumeError(f"{path} lacks its partner {partner.name}; a pair needs both files")
    return (path, partner)


def _is_gzip_name(path: Path) -> bool:
    return path.suffix.lower() in (".gz", ".mgz")


def _refuse_unlike_its_name(path: Path, file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(2)
    except OSError as error:
        raise VolumeError(f"cannot read {file}: {error.strerror}") from error
    if not start:
        raise VolumeError(f"{file} is empty (0 bytes)")
    if _is_gzip_name(path) and start != b"\x1f\x8b":
        raise VolumeError(f"{file} is not gzip-compressed, though its name says so; rename it")
    if not _is_gzip_name(path) and start == b"\x1f\x8b":
        raise VolumeError(f"{file} is gzip-compressed, though its name does not say so; rename it")


def _unreadable(path: Path, error: Exception) -> VolumeError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return VolumeError(f"cannot read {path}: {reason or type(error).__name__}")
