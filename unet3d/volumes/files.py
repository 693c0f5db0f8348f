"""The files of volumes: their names, opening them once they look sound, writing them.

This is the only module that knows file endings, and that a NIfTI volume can be a pair of files,
``scan.hdr`` and ``scan.img``. Endings count in any case of their letters: ``SCAN.NII.GZ``,
``scan.Hdr`` with ``scan.IMG``.
"""

import gzip
import itertools
import logging
import math
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.openers import ImageOpener

from unet3d.atomic import creating, replacing
from unet3d.errors import VolumeError, reason_of

# nibabel writes each oddity of a header to stderr without naming the file. What it does not repair
# it also raises, and that is reported from here.
logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)

SUFFIXES = (".nii.gz", ".nii", ".hdr", ".img", ".mgz", ".mgh")
"""File endings of a volume; a NIfTI pair is named by its .hdr or its .img."""

PARTNERS = {".hdr": ".img", ".img": ".hdr"}

HEADER_BYTES = 540
"""Size of the larger of the two NIfTI headers."""

MAX_DEFLATE_RATIO = 1040
"""No gzip file grows more than about 1032 times when it is unpacked."""


def volume_suffix(path: Path) -> str:
    """Return the ending of a volume file in lower case, or nothing for another file."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def is_volume_file(path: Path) -> bool:
    """Tell by its name whether a file is a volume."""
    return bool(volume_suffix(path))


def is_nifti_file(path: Path) -> bool:
    """Tell by its name whether a file is a NIfTI volume in one file, which is what we write."""
    return volume_suffix(path) in (".nii", ".nii.gz")


def volume_stem(path: Path) -> str:
    """Return the name of a volume file without its ending: ``scan`` for ``scan.nii.gz``."""
    suffix = volume_suffix(path)
    return path.name[: -len(suffix)] if suffix else path.stem


def members(path: Path) -> tuple[Path, ...]:
    """Return all files of the volume that a file belongs to.

    Args:
        path: A volume file, whether it exists or not.

    Returns:
        The header and the voxels of a pair, in this order, if the partner of ``path`` exists; else
        ``path`` alone.
    """
    partner_suffix = PARTNERS.get(volume_suffix(path))
    if partner_suffix is None:
        return (path,)
    # A partner in the same case of letters comes first, then one in any other.
    letters = zip(path.suffix, partner_suffix, strict=True)
    alike = "".join(new.upper() if old.isupper() else new for old, new in letters)
    spellings = itertools.product(*zip(partner_suffix, partner_suffix.upper(), strict=True))
    for suffix in dict.fromkeys([alike, *map("".join, spellings)]):
        partner = path.with_suffix(suffix)
        if partner.is_file():
            return (path, partner) if partner_suffix == ".img" else (partner, path)
    return (path,)


def stands_for_volume(path: Path) -> bool:
    """Tell whether a file counts where volumes are listed: each pair counts once, as its header."""
    return is_volume_file(path) and members(path)[0] == path


def find_spelling(path: Path) -> Path:
    """Return the file of that name, whatever the case of its ending; the path itself if none is."""
    suffix = volume_suffix(path)
    if path.exists() or not suffix or not path.parent.is_dir():
        return path
    stem = volume_stem(path)
    for file in sorted(path.parent.iterdir()):
        if volume_suffix(file) == suffix and volume_stem(file) == stem:
            return file
    return path


def open_volume(path: Path) -> Any:
    """Return nibabel's image, its header read and its voxels not, once the file looks sound.

    Raises:
        VolumeError: The file is missing, damaged, or of a kind that cannot be used.
    """
    if not is_volume_file(path):
        raise VolumeError(f"{path} is not named like a volume; known: {', '.join(SUFFIXES)}")
    files = members(path)
    if volume_suffix(path) in PARTNERS and len(files) == 1 and path.is_file():
        partner = f"{path.stem}{PARTNERS[volume_suffix(path)]}"
        raise VolumeError(f"{path} lacks its partner {partner}; a pair needs both files")
    for file in files:
        _refuse_unlike_its_name(file)
    try:
        image = _load(*files)
        file_bytes = files[-1].stat().st_size
    except VolumeError:
        raise
    except Exception as error:  # a damaged header can raise anything in nibabel
        raise _unreadable(path, error) from error
    dtype, axes = image.get_data_dtype(), stored_axes(path, image)
    if dtype.kind not in "buif":
        kind = "complex" if dtype.kind == "c" else "colour"
        raise VolumeError(f"{path} holds {kind} voxels; only real numbers can be used")
    num_bytes = image.dataobj.offset + math.prod(axes) * dtype.itemsize
    if num_bytes > file_bytes * (MAX_DEFLATE_RATIO if _is_gzip_name(files[-1]) else 1):
        raise VolumeError(
            f"{path} claims the shape {times(image.shape)}, {num_bytes} bytes, but "
            f"{files[-1].name} has only {file_bytes}; it is damaged or incomplete"
        )
    return image


def stored_axes(path: Path, image: Any) -> tuple[int, int, int, int]:
    """Return the stored shape in voxels, padded to three axes, and the number of channels.

    Args:
        path: The file, for messages.
        image: nibabel's.

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

    Args:
        path: The file.
        image: From :func:`open_volume`.

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


def write_nifti(path: Path, image: Any, overwrite: bool = True) -> None:
    """Write a NIfTI file, which appears whole or not at all.

    Args:
        path: A name for which :func:`is_nifti_file` holds.
        image: nibabel's.
        overwrite: Whether a file of that name is replaced.

    Raises:
        FileExistsError: Something has the name and may not be replaced.
        OSError: The file cannot be written.
    """
    with (replacing if overwrite else creating)(path) as unfinished:
        # nibabel's save would change the case of letters in the ending.
        image.to_file_map({"image": nib.FileHolder(filename=str(unfinished))})


def times(numbers: Any) -> str:
    """Return numbers as messages show shapes and spacings: ``64x64x32``."""
    return "x".join(f"{number:.6g}" for number in numbers)


def _load(header: Path, voxels: Path | None = None) -> Any:
    """Return nibabel's image of one file or of a pair, by the format in the header.

    nibabel's own ``load`` derives the partner from the name, and finds it only where both endings
    are in lower case or both in upper case.
    """
    holder = nib.FileHolder(filename=str(header))
    if volume_suffix(header) in (".mgz", ".mgh"):
        return nib.MGHImage.from_file_map({"image": holder})
    with ImageOpener(str(header)) as stream:
        start = stream.read(HEADER_BYTES)
    if voxels is None:
        formats, file_map = (nib.Nifti1Image, nib.Nifti2Image), {"image": holder}
    else:
        formats = (nib.Nifti1Pair, nib.Nifti2Pair)
        file_map = {"header": holder, "image": nib.FileHolder(filename=str(voxels))}
    for format_ in formats:
        if format_.header_class.may_contain_header(start):
            return format_.from_file_map(file_map)
    if voxels is not None and nib.AnalyzeImage.header_class.may_contain_header(start):
        raise VolumeError(
            f"{header} is in the Analyze 7.5 format, which has no orientation; convert it to NIfTI"
        )
    raise VolumeError(f"cannot read {header}: it does not begin with a NIfTI header")


def _is_gzip_name(path: Path) -> bool:
    return volume_suffix(path) in (".nii.gz", ".mgz")


def _refuse_unlike_its_name(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(2)
    except OSError as error:
        raise VolumeError(f"cannot read {file}: {reason_of(error)}") from error
    if not start:
        raise VolumeError(f"{file} is empty (0 bytes)")
    if _is_gzip_name(file) and start != b"\x1f\x8b":
        raise VolumeError(f"{file} is not gzip-compressed, though its name says so; rename it")
    if not _is_gzip_name(file) and start == b"\x1f\x8b":
        raise VolumeError(f"{file} is gzip-compressed, though its name does not say so; rename it")


def _unreadable(path: Path, error: Exception) -> VolumeError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return VolumeError(f"cannot read {path}: {reason or type(error).__name__}")
