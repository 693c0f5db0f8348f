"""Files of volumes: the table of formats, their endings, and which files form one volume.

Upper and lower case do not matter in endings: ``SCAN.NII.GZ``, ``scan.hdr`` with ``scan.IMG``.
"""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Format(NamedTuple):
    """A format: a module in this folder, imported when the first file of the format is opened.

    The module has ``open_file(path, reading)``, which returns a
    :class:`~unet3d.images.source.Source`. If a volume may have several files, it has
    ``members(path)``, which returns all files of the volume to which a file or folder belongs, the
    representative file first. If ``written`` is not
    empty, it also has ``write_labels(path, stored, geometry, names)``, which writes a label map
    with the axes of a scan's file, to a new file or into an empty folder, and
    ``label_names(path)``, which returns the names of label values.
    """

    module: str
    suffixes: tuple[str, ...]
    """Endings of files in lower case, or of folders."""
    written: tuple[str, ...] = ()
    """Endings of label maps that can be written, the usual one first."""
    is_folder: bool = False
    writer: str = ""
    """Optional package that writing needs; empty if none."""


NIFTI = Format(
    "nifti", (".nii.gz", ".nii", ".hdr", ".img", ".mgz", ".mgh"), written=(".nii.gz", ".nii")
)
TIFF = Format(
    "tiff",
    (".ome.tif", ".ome.tiff", ".tif", ".tiff"),
    written=(".tif", ".tiff"),
    writer="tifffile",
)
"""Files, and folders of slices that are files."""
DICOM = Format("dicom", (), is_folder=True)
"""Any other folder: whether it is a series of slices depends on its content."""

ZARR = Format("ome_zarr", (".ome.zarr", ".zarr"), (".ome.zarr", ".zarr"), True, writer="zarr")
"""A folder with one of these endings, or with one of :data:`ZARR_METADATA`."""

ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray")

MAX_EMPTY_GROUP_BYTES = 100
"""Size of a ``zarr.json`` that says nothing: the description of a volume is longer."""

ZIP_SUFFIXES = (".ome.zarr.zip", ".zarr.zip", ".ozx")

HDF5 = Format("hdf5", (".h5", ".hdf5", ".hdf"), written=(".h5", ".hdf5"), writer="h5py")
"""A file with one volume, or a dataset in a file: ``scan.h5:/raw``, or ``scan.h5/raw``."""

DATASET = re.compile(r"(.+?\.(?:h5|hdf5|hdf|zarr\.zip|ozx))(:/*|/+)(.+)", re.IGNORECASE | re.DOTALL)
"""A path in a file of several volumes, which is an HDF5 file or the zip file of a store."""

URL = re.compile(r"([a-z][a-z0-9+]+):/+(.+)", re.IGNORECASE)

FORMATS = (
    NIFTI,
    Format("itk", (".nrrd", ".mha", ".mhd")),
    TIFF,
    ZARR,
    HDF5,
    Format("ome_zarr", ZIP_SUFFIXES, written=ZARR.written),
    DICOM,
)

SUFFIXES = tuple(suffix for one in FORMATS for suffix in one.suffixes)
WRITTEN_SUFFIXES = tuple(dict.fromkeys(suffix for one in FORMATS for suffix in one.written))


def url_of(path: Path) -> str | None:
    """Return the URL for which a path stands, whose // pathlib shortens; None for other paths."""
    found = URL.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found and not os.path.lexists(path) else None


def place_of(path: Path) -> str:
    """Return a path or a URL as users write it."""
    return url_of(path) or str(path)


def file_and_dataset(path: Path) -> tuple[Path, str]:
    """Return the file of a volume, and the name of a dataset in it, which is usually empty."""
    match = DATASET.fullmatch(str(path))
    if match is None or (match[2][0] != ":" and not os.path.isfile(match[1]) and not url_of(path)):
        return path, ""
    return Path(match[1]), match[3]


def file_of(path: Path) -> Path:
    """Return the file or folder that holds a volume: ``scan.h5`` for ``scan.h5:/raw``."""
    return file_and_dataset(path)[0]


def is_there(path: Path) -> bool:
    """Return whether the file or folder of a volume exists; a server is not asked."""
    return bool(url_of(path)) or os.path.lexists(file_of(path))


def volume_suffix(path: Path) -> str:
    """Return the ending of a volume file in lower case; empty for any other file."""
    name = file_of(path).name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def format_of(path: Path) -> Format | None:
    """Return the format of a file or folder; None for a file without the ending of a volume.

    A name that does not exist yet has the format of its ending. URLs are zarr stores.
    """
    if url_of(path):
        return ZARR
    is_folder, suffix = os.path.isdir(path), volume_suffix(path)
    for one in FORMATS:
        if suffix in one.suffixes and (one.is_folder or not is_folder):
            return one
    return _folder_format(path) if is_folder else None


def _folder_format(folder: Path) -> Format:
    """Return the format of a folder without an ending; DICOM if its content is of no other."""
    if holds_store(folder):
        return ZARR
    return TIFF if module_of(TIFF).members(folder) != (folder,) else DICOM


def holds_store(folder: Path) -> bool:
    """Return whether a folder has the metadata of a zarr store.

    A group without attributes counts only if the folder is named like a store: napari-ome-zarr
    leaves the file of such a group two folders above labels that it has shown.
    """
    for name in ZARR_METADATA:
        file = os.path.join(folder, name)
        if os.path.isfile(file):
            is_empty = name == "zarr.json" and os.path.getsize(file) <= MAX_EMPTY_GROUP_BYTES
            return not is_empty or volume_suffix(folder) in ZARR.suffixes
    return False


def store_around(path: Path) -> Path | None:
    """Return a store in which a path lies or would lie; None if it is in no store."""
    return next(filter(holds_store, path.absolute().parents), None)


def module_of(one: Format) -> Any:
    """Return the module of a format."""
    return import_module(f"unet3d.images.{one.module}")


def is_volume_file(path: Path) -> bool:
    """Return whether a file has the ending of a volume."""
    return bool(volume_suffix(path))


def can_be_written(path: Path) -> bool:
    """Return whether a file has an ending to which label maps can be written."""
    return path.name.lower().endswith(WRITTEN_SUFFIXES)


def written_suffix(scan: Path) -> str:
    """Return the ending of a scan's segmentation: the scan's format, or NIfTI if not writable."""
    return ((format_of(scan) or NIFTI).written or NIFTI.written)[0]


def is_store(path: Path) -> bool:
    """Return whether a path is a store in a folder or at a URL."""
    return bool(os.path.isdir(path) or url_of(path)) and format_of(path) is ZARR


def is_collection(path: Path) -> bool:
    """Return whether a path is a folder that may hold volumes, and is not a store."""
    return os.path.isdir(path) and not is_store(path)


def is_picture(path: Path) -> bool:
    """Return whether a file is a TIFF of one page: a slice, or a picture beside volumes."""
    is_tiff = volume_suffix(path) in TIFF.suffixes and os.path.isfile(path)
    return is_tiff and bool(module_of(TIFF).is_page(path))


def is_volume_folder(path: Path) -> bool:
    """Return whether a path is a folder that is one volume, such as the slices of a scan."""
    return is_store(path) or (os.path.isdir(path) and members(path) != (path,))


def volume_stem(path: Path) -> str:
    """Return the name of a volume file without its ending: ``scan`` for ``scan.nii.gz``.

    A folder of DICOM slices has no ending: ``1.2.840`` is its whole name.
    """
    suffix, file = volume_suffix(path), file_of(path)
    if suffix:
        return file.name[: -len(suffix)]
    return path.name if os.path.isdir(path) else path.stem


def members(path: Path) -> tuple[Path, ...]:
    """Return all files of the volume to which a path belongs; the path need not exist."""
    one = format_of(path)
    find = None if one is None else getattr(module_of(one), "members", None)
    return find(path) if find else (path,)


def stands_for_volume(path: Path) -> bool:
    """Return whether a path represents its volume in a list: a pair is listed as its header."""
    return is_store(path) or (is_volume_file(path) and members(path)[0] == path)


def times(numbers: Any) -> str:
    """Return numbers as messages show shapes and spacings: ``64x64x32``."""
    return "x".join(f"{number:.6g}" for number in numbers)
