"""The files of volumes: their names, and writing them.

This is the only module that knows file endings, and that a volume can be several files: a NIfTI
volume ``scan.hdr`` and ``scan.img``, a MetaImage ``scan.mhd`` and what it names, a DICOM series a
folder of slices. Endings count in any case of their letters: ``SCAN.NII.GZ``, ``scan.hdr`` with
``scan.IMG``.
"""

import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import nibabel as nib
from isal import igzip_threaded

from unet3d.atomic import replacing
from unet3d.distributed.ranks import num_cores
from unet3d.images.text_headers import meta_data_file
from unet3d.inputs.reading import open_regular

# nibabel writes each oddity of a header to stderr without naming the file. What it does not repair
# it also raises, and that is reported from here.
logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)

META_SUFFIXES = (".mha", ".mhd")
"""File endings of a MetaImage in one file, and in two."""

ITK_SUFFIXES = (".nrrd", *META_SUFFIXES)

SUFFIXES = (".nii.gz", ".nii", ".hdr", ".img", ".mgz", ".mgh", *ITK_SUFFIXES)
"""File endings of a volume; a NIfTI pair is named by its .hdr or its .img."""

PARTNERS = {".hdr": ".img", ".img": ".hdr"}

PACKING_LEVEL = 2
"""Of ISA-L, which packs label maps as small as zlib's level 1, five times as fast."""

PACKING_THREADS = 4
"""The disk is no faster."""

DICOM_MARK = b"DICM"
DICOM_MARK_AT = 128
"""What every DICOM file has after its preamble, whatever it is called."""

DICOM_INDEX = "DICOMDIR"
"""A table of contents, in DICOM's own form."""


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


def is_dicom_file(path: Path) -> bool:
    """Tell by its content whether a file is a DICOM object, such as one slice of a scan."""
    try:
        with open_regular(path) as file:
            file.seek(DICOM_MARK_AT)
            return file.read(len(DICOM_MARK)) == DICOM_MARK
    except OSError:
        return False


def is_dicom_folder(path: Path) -> bool:
    """Tell whether a path is a folder with DICOM files in it, not in folders below."""
    return next(_dicom_files(path), None) is not None


def volume_stem(path: Path) -> str:
    """Return the name of a volume file without its ending: ``scan`` for ``scan.nii.gz``.

    A folder, as of DICOM slices, has no ending: ``1.2.840`` is its whole name.
    """
    suffix = volume_suffix(path)
    if suffix:
        return path.name[: -len(suffix)]
    return path.name if os.path.isdir(path) else path.stem


def members(path: Path) -> tuple[Path, ...]:
    """Return all files of the volume that a file belongs to, whether it exists or not.

    They are the header and the voxels of a pair, in this order, if the partner exists; the DICOM
    files of a folder; else the file alone.
    """
    if os.path.isdir(path):
        return tuple(_dicom_files(path)) or (path,)
    if volume_suffix(path) in META_SUFFIXES:
        voxels = meta_data_file(path)
        if voxels is None or not os.path.isfile(voxels):  # pathlib would raise for a long name
            return (path,)
        return path, voxels
    partner_suffix = PARTNERS.get(volume_suffix(path))
    if partner_suffix is None:
        return (path,)
    # A partner in the same case of letters comes first.
    spellings = (partner_suffix, partner_suffix.upper())
    for suffix in reversed(spellings) if path.suffix.isupper() else spellings:
        partner = path.with_suffix(suffix)
        if os.path.isfile(partner):
            return (path, partner) if partner_suffix == ".img" else (partner, path)
    return (path,)


def stands_for_volume(path: Path) -> bool:
    """Tell whether a file counts where volumes are listed: each pair counts once, as its header."""
    return is_volume_file(path) and members(path)[0] == path


def _dicom_files(folder: Path) -> Iterator[Path]:
    if not os.path.isdir(folder):
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.upper() == DICOM_INDEX:
            continue
        if not path.is_dir() and is_dicom_file(path):
            yield path


def write_nifti(path: Path, image: Any, overwrite: bool = True) -> None:
    """Write an image of nibabel's as a NIfTI file, which appears whole or not at all.

    FileExistsError: something has the name, and it may not be replaced.
    """
    with replacing(path, may_exist=overwrite) as unfinished:
        if volume_suffix(path) != ".nii.gz":
            # nibabel's save would change the case of letters in the ending.
            image.to_file_map({"image": nib.FileHolder(filename=str(unfinished))})
            return
        threads = min(PACKING_THREADS, num_cores())
        with (
            unfinished.open("wb") as file,
            igzip_threaded.open(file, "wb", PACKING_LEVEL, threads=threads) as packed,  # type: ignore[no-untyped-call]
        ):
            image.to_file_map({"image": nib.FileHolder(fileobj=_Onward(packed))})


class _Onward(io.RawIOBase):
    """A stream that is written from its beginning to its end, where nibabel asks for its place."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self._place = 0

    def write(self, content: Any) -> int:
        written = self._stream.write(content)
        self._place += written
        return written

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = 0) -> int:
        if whence or place < self._place:
            raise OSError("what is packed cannot be written again")
        self.write(bytes(place - self._place))
        return place


def times(numbers: Any) -> str:
    """Return numbers as messages show shapes and spacings: ``64x64x32``."""
    return "x".join(f"{number:.6g}" for number in numbers)
