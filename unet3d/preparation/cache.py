"""The cache of prepared cases: one folder for each case, memory-mapped, shared by all processes.

::

    digests/<sha256 of the path>.json       what a volume file contained when it was last hashed
    intensities/<key>/intensities.npy       intensities inside the labels of one case, (N, C)
                      entry.json
    prepared/<key>/image.npy                float16 or float32 (C, X, Y, Z)
                   label.npy                class indices (X, Y, Z) in compressed chunks
                   foreground.npy           indices of voxels in X, Y, Z, component after component
                   components.npy           where each component ends in them
                   entry.json               spacing, number of components of each class

A key is a hash of what the files *contain* and of everything that was done to them, so an entry
is never stale. Every byte of an entry is checked when it is first opened in a run
(:mod:`unet3d.preparation.entries`); a damaged one is made anew. Of two processes that build the
same entry one wins, and the other uses its result.
"""

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from unet3d.atomic import make_folder, remove_leftovers, write_atomically
from unet3d.config import Spacing
from unet3d.errors import CacheError, VolumeError, reason_of
from unet3d.images.files import members
from unet3d.preparation.entries import (
    DamagedError,
    EntryRecord,
    Record,
    array_path,
    json_checksum,
    map_array,
    read_entry,
    write_entry,
)
from unet3d.preparation.foreground import Foreground, foreground_voxels
from unet3d.preparation.packed_label import PackedLabel, pack_label
from unet3d.records import recall, remember, writing_cache

logger = logging.getLogger(__name__)


class CaseRecord(EntryRecord):
    """The record of a prepared case."""

    arrays: ClassVar[tuple[str, ...]] = ("image", "label", "foreground", "components")

    spacing_mm: Spacing
    num_components: tuple[NonNegativeInt, ...]


class IntensitiesRecord(EntryRecord):
    """The record of the intensities inside the labels of a case."""

    arrays: ClassVar[tuple[str, ...]] = ("intensities",)


class DigestRecord(BaseModel):
    """What a volume file contained, and how to tell that it is still that file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """Time of the last change, which programs that copy cannot set back."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    checksum: int = 0
    """CRC-32 of everything else in the record."""

    def own_checksum(self) -> int:
        """Return what ``checksum`` must be."""
        return json_checksum(self.model_dump(exclude={"checksum"}))


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case on disk, resampled and normalised; its files are mapped, not read."""

    name: str
    folder: Path
    """Its entry in the cache."""
    spacing_mm: Spacing
    num_components: tuple[int, ...]
    """Connected components of each class; 0 for the background."""

    def image(self) -> npt.NDArray[np.floating[Any]]:
        """Return the normalised image, a read-only map of shape (C, X, Y, Z), float16 or float32.

        Raises:
            CacheError: The file is gone or damaged.
        """
        return map_array(array_path(self.folder, "image"))

    def label(self) -> PackedLabel:
        """Return the class indices, of shape (X, Y, Z); slicing them gives an array.

        Raises:
            CacheError: The file is gone or damaged.
        """
        return PackedLabel(array_path(self.folder, "label"))

    def foreground(self) -> Foreground:
        """Return voxels of each class, of which patches are centred on some.

        Raises:
            CacheError: A file is gone or damaged.
        """
        voxels = ends = np.empty(0, np.uint32)
        if any(self.num_components):  # an empty file cannot be mapped
            voxels = map_array(array_path(self.folder, "foreground"))
            ends = map_array(array_path(self.folder, "components"))
        return Foreground(voxels=voxels, ends=ends, num_components=self.num_components)


class Cache:
    """A cache folder."""

    def __init__(self, folder: Path | None) -> None:
        """Open the folder, and make it where there is none.

        Args:
            folder: The folder; None: ``unet3d`` in the user's cache folder.

        Raises:
            CacheError: It cannot be written to.
        """
        self.folder = (folder or _default_folder()).absolute()
        with writing_cache(self.folder):
            for name in ("", "digests", "intensities", "prepared"):
                make_folder(self.folder / name)
                remove_leftovers(self.folder / name)
            # Refuse a folder that cannot be written before hours go into a case.
            write_atomically(self.folder / "writable", lambda file: None)

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of the bytes of all files of a volume, hashing them only once.

        A file that keeps its path, size and time of modification is taken to be unchanged.

        Args:
            path: The volume; of a pair either file.

        Raises:
            VolumeError: A file cannot be read.
            CacheError: The cache folder cannot be written to.
        """
        try:
            return "-".join(self._digest(file.absolute()) for file in members(path))
        except OSError as error:
            raise VolumeError(
                f"cannot read {error.filename or path}: {reason_of(error)}"
            ) from error

    def _digest(self, path: Path) -> str:
        status = path.stat()
        name = os.fsencode(path)
        known = {
            "path": name.hex(),
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "ctime_ns": status.st_ctime_ns,
        }
        note = self.folder / "digests" / f"{hashlib.sha256(name).hexdigest()}.json"
        remembered = recall(note, _sound_digest)
        if remembered is not None and known.items() <= remembered.model_dump().items():
            return remembered.sha256
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        record = DigestRecord.model_validate({**known, "sha256": sha256})
        remember(note, {**record.model_dump(), "checksum": record.own_checksum()})
        return sha256

    def load_intensities(self, key: str) -> npt.NDArray[np.float32] | None:
        """Return what :meth:`save_intensities` put there, or None where nothing sound is."""
        folder = self.folder / "intensities" / key
        if _read(folder, IntensitiesRecord) is None:
            return None
        array: npt.NDArray[np.float32] = np.load(
            array_path(folder, "intensities"), allow_pickle=False
        )
        return array

    def save_intensities(self, key: str, array: npt.NDArray[np.float32]) -> None:
        """Keep an array (N, C) under a key.

        Raises:
            CacheError: The cache folder cannot be written to.
        """
        with writing_cache(self.folder):
            folder = self.folder / "intensities" / key
            write_entry(folder, IntensitiesRecord, {"intensities": array}, {})

    def load_case(self, key: str, name: str) -> PreparedCase | None:
        """Return a prepared case, or None where there is none or it is damaged.

        This reads all of it. What is returned, and its copies in other processes, map the arrays
        without another check.
        """
        folder = self.folder / "prepared" / key
        record = _read(folder, CaseRecord)
        if record is None:
            return None
        return PreparedCase(
            name=name,
            folder=folder,
            spacing_mm=record.spacing_mm,
            num_components=record.num_components,
        )

    def save_case(
        self,
        key: str,
        image: npt.NDArray[np.floating[Any]],
        label: npt.NDArray[np.unsignedinteger[Any]],
        spacing_mm: Spacing,
        num_classes: int,
    ) -> None:
        """Write a prepared case under a key.

        Args:
            key: Hash of the case's files and of the settings.
            image: Normalised, shape (C, X, Y, Z), float16 or float32.
            label: Class indices, shape (X, Y, Z), uint8 or uint16.
            spacing_mm: Their spacing.
            num_classes: Number of classes, the background included.

        Raises:
            CacheError: The folder is full or cannot be written to.
        """
        foreground = foreground_voxels(label, num_classes)
        arrays = {
            "image": image,
            "label": pack_label(label),
            "foreground": foreground.voxels,
            "components": foreground.ends,
        }
        notes = {
            "spacing_mm": tuple(map(float, spacing_mm)),
            "num_components": foreground.num_components,
        }
        with writing_cache(self.folder):
            write_entry(self.folder / "prepared" / key, CaseRecord, arrays, notes)


def _default_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unet3d"
    except RuntimeError as error:  # no HOME, and a user that the system does not know
        raise CacheError(
            "there is no cache folder, because this user has no home folder; set data.cache"
        ) from error


def _read(folder: Path, kind: type[Record]) -> Record | None:
    """Return the record of a sound entry; say so where an entry is damaged."""
    try:
        return read_entry(folder, kind)
    except DamagedError as error:
        logger.warning("%s is damaged (%s); a new one replaces it", folder, error)
        return None


def _sound_digest(tree: Any) -> DigestRecord:
    record = DigestRecord.model_validate(tree)
    if record.checksum != record.own_checksum():
        raise ValueError("it has another checksum")
    return record
