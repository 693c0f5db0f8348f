"""The cache folder: digests of files and prepared cases, shared by all processes.

::

    contents/<sha256 of the path>.json  the digest of a file or a store when it was last hashed
    examined/<key>.json                 measurements of the voxels of a case
    planned/<key>.json                  measurements of a data set, which decide its preparation
    prepared/<key>/                     an entry: a case, resampled and normalised
        image.npy                       float16 or float32 (C, X, Y, Z)
        label.npy                       class indices (X, Y, Z), uint8 or uint16
        foreground.npy, components.npy  see :mod:`unet3d.preparation.foreground`
        meta.json                       shape, type and size of each array; spacing

A key is a hash of the *content* of files and of all steps of preparation, so an entry is never
stale. An entry is written under a temporary name and renamed when it is complete; opening it checks
the size of each file, and a damaged entry is rebuilt. If two processes make the same entry, one
wins, and the other uses its result.
"""

import hashlib
import logging
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.atomic import (
    make_folder,
    publish_folder,
    remove_leftovers,
    unfinished_folder,
    users_cache,
    write_atomically,
)
from unet3d.config import Shape, Spacing
from unet3d.errors import CacheError, VolumeError, reason_of
from unet3d.images.files import ZARR, file_and_dataset, file_of, is_store, members, module_of
from unet3d.inputs.plain_data import key_of
from unet3d.preparation.foreground import Foreground, foreground_voxels
from unet3d.records import (
    read_record,
    recall,
    remember,
    write_record,
    writing_cache,
)

logger = logging.getLogger(__name__)

META = "meta.json"


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case on disk, resampled and normalised; its files are mapped, not read."""

    name: str
    folder: Path
    arrays: Mapping[str, tuple[tuple[int, ...], str, int]]
    """Shape, NumPy's type name and file size in bytes of each array, when the case was opened."""
    spacing_mm: Spacing
    num_components: tuple[int, ...]
    """Number of connected components of each class that :meth:`foreground` has."""

    @property
    def shape(self) -> Shape:
        """Voxels along X, Y, Z."""
        x, y, z = self.arrays["label"][0]
        return (x, y, z)

    def image(self) -> npt.NDArray[np.floating[Any]]:
        """Return the normalised image (C, X, Y, Z), a read-only map of float16 or float32."""
        return self.array("image")

    def label(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the class indices (X, Y, Z), a read-only map of uint8 or uint16."""
        return self.array("label")

    def foreground(self) -> Foreground:
        """Return voxels of each class, on which patches can be centred."""
        return Foreground(
            voxels=self.array("foreground"),
            ends=self.array("components"),
            num_components=self.num_components,
        )

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a read-only map of an array; CacheError if its file is gone or damaged."""
        path = self.folder / f"{name}.npy"
        shape, dtype, size = self.arrays[name]
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            # The record replaces the file's header, whose reading takes a tenth of a patch's time.
            num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
            return np.ndarray(shape, dtype, content, size - num_bytes)
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{path} is gone or damaged since training began; run again to prepare it, and "
                "do not change the folder of data.cache during a run"
            ) from error


class Cache:
    """A cache folder; None is ``unet3d`` in the user's cache folder."""

    def __init__(self, folder: Path | None) -> None:
        """Make the folder if there is none; CacheError if it cannot be written to."""
        self.folder = (folder or users_cache()).absolute()
        with writing_cache(self.folder):
            for name in ("", "contents", "examined", "planned", "prepared"):
                make_folder(self.folder / name)
                remove_leftovers(self.folder / name)
            # Refuse a folder that cannot be written before hours go into a case.
            write_atomically(self.folder / "writable", lambda file: None)

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of the bytes of all files of a volume, hashing them only once.

        A file with the same path, size and times counts as unchanged. VolumeError if one cannot be
        read.
        """
        try:
            if is_store(path):
                return self._digest(path, module_of(ZARR).files_of(path))
            files, dataset = map(file_of, members(path)), file_and_dataset(path)[1]
            digest = "-".join(self._digest(file, [str(file)]) for file in files)
            return key_of([dataset, digest]) if dataset else digest
        except OSError as error:
            where = error.filename or path
            raise VolumeError(f"cannot read {where}: {reason_of(error)}") from error

    def _digest(self, path: Path, files: Sequence[str]) -> str:
        """Return the digest of a file or, with the names of its files, of a store."""
        name = os.fsencode(path.absolute())
        # Copying programs restore the modification time (mtime), but not the change time (ctime).
        states = [(file.removeprefix(str(path)), os.stat(file)) for file in files]
        times = [(file, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for file, one in states]
        now = {"path": name.hex(), "files": key_of(times)}
        record = self.folder / "contents" / f"{hashlib.sha256(name).hexdigest()}.json"
        known = recall(record, dict)
        if known is None or known != {**now, "sha256": known.get("sha256")}:
            digests = [_sha256(file) for file in files]
            named = [(one, digest) for (one, _), digest in zip(states, digests, strict=True)]
            known = {**now, "sha256": digests[0] if files == [str(path)] else key_of(named)}
            remember(record, known)
        return str(known["sha256"])

    def load_case(self, key: str, name: str) -> PreparedCase | None:
        """Return the case that was saved under a key, and call it ``name``.

        None if there is no such case, or it is damaged.
        """
        folder = self.folder / "prepared" / key
        if not os.path.lexists(folder):
            return None
        try:
            return _opened(folder, name)
        except (OSError, ValueError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else error
            logger.warning("%s is damaged (%s); a new one replaces it", folder, reason)
            return None

    def has_case(self, key: str) -> bool:
        """Return whether there is a complete case; a damaged one causes no warning."""
        try:
            _opened(self.folder / "prepared" / key, "")
        except (OSError, ValueError):
            return False
        return True

    def save_case(
        self,
        key: str,
        image: npt.NDArray[np.floating[Any]],
        label: npt.NDArray[np.unsignedinteger[Any]],
        spacing_mm: Spacing,
        num_classes: int,
    ) -> None:
        """Write an image (C, X, Y, Z) and its class indices (X, Y, Z) as a prepared case.

        A complete case of a faster process stays.
        """
        found = foreground_voxels(label, num_classes)
        arrays: dict[str, npt.NDArray[Any]] = {"image": image, "label": label}
        arrays |= {"foreground": found.voxels, "components": found.ends}
        folder = self.folder / "prepared" / key
        with writing_cache(self.folder), unfinished_folder(folder) as unfinished:
            content = {
                name: (array.shape, array.dtype.str, _write(unfinished / f"{name}.npy", array))
                for name, array in arrays.items()
            }
            record = {"key": key, "arrays": content, "num_components": found.num_components}
            write_record(unfinished / META, {**record, "spacing_mm": list(map(float, spacing_mm))})
            try:
                if not self.has_case(key):
                    publish_folder(unfinished, folder, replace=True)
            except OSError:  # another process may have published the case by now
                if not self.has_case(key):
                    raise


def _sha256(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _opened(folder: Path, name: str) -> PreparedCase:
    """Return a case; OSError or ValueError unless each file has the size in the case's record."""
    content = read_record(folder / META)
    if content["key"] != folder.name:
        raise ValueError("it belongs to another entry")
    arrays = {}
    for part, (shape, dtype, size) in content["arrays"].items():
        path = folder / f"{part}.npy"
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"{path.name} has another size")
        arrays[part] = (tuple(shape), dtype, size)
    x, y, z = content["spacing_mm"]
    counts = tuple(content["num_components"])
    return PreparedCase(
        name=name, folder=folder, arrays=arrays, spacing_mm=(x, y, z), num_components=counts
    )


def _write(path: Path, array: npt.NDArray[Any]) -> int:
    """Write a .npy file and return its size; ``np.save`` would not say that a disk is full."""
    array = np.ascontiguousarray(array)
    with path.open("xb") as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)
        return file.tell()
