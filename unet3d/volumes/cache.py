"""The cache of prepared cases: one folder for each case, memory-mapped, shared by all processes.

::

    digests/<sha256 of the path>.json       what a volume file contained when it was last hashed
    intensities/<key>.npy                   intensities inside the labels of one case
    prepared/<key>/image.npy                float32 (C, X, Y, Z)
                   label.npy                class indices (X, Y, Z)
                   foreground.npy           voxel coordinates, class after class, (N, 3)
                   entry.json               written last: shapes, spacing, size of each file

A key is a hash of what the files *contain* and of everything that was done to them, so an entry
is never stale. An entry appears whole or not at all. Of two processes that build the same entry
one wins, and the other uses its result.
"""

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.atomic import make_folder, new_folder, remove_leftovers, write_atomically
from unet3d.config import Spacing
from unet3d.errors import CacheError, VolumeError, reason_of
from unet3d.records import recall, remember, writing_cache
from unet3d.volumes.files import members

logger = logging.getLogger(__name__)

LEFTOVER_SECONDS = 24 * 3600
"""Age from which a temporary file belongs to a process that was killed."""

MAX_FOREGROUND_VOXELS = 10_000
"""Coordinates kept of each class: enough to sample from, few where it fills half a volume."""


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case on disk, resampled and normalised; its arrays are mapped, not read."""

    name: str
    folder: Path
    """Its entry in the cache."""
    spacing_mm: Spacing
    class_counts: tuple[int, ...]
    """How many coordinates :meth:`foreground` has of each class; 0 for the background."""

    def image(self) -> npt.NDArray[np.float32]:
        """Return the normalised image, a read-only map of shape (C, X, Y, Z).

        Raises:
            CacheError: The file is gone or damaged.
        """
        return _mapped(self.folder / "image.npy")

    def label(self) -> npt.NDArray[np.unsignedinteger]:
        """Return the class indices, a read-only map of shape (X, Y, Z).

        Raises:
            CacheError: The file is gone or damaged.
        """
        return _mapped(self.folder / "label.npy")

    def foreground(self) -> tuple[npt.NDArray[np.int32], ...]:
        """Return voxel coordinates (N, 3) for each class; of a class with many, a random choice.

        Raises:
            CacheError: The file is gone or damaged.
        """
        if not any(self.class_counts):
            return tuple(np.empty((0, 3), np.int32) for _ in self.class_counts)
        coordinates = _mapped(self.folder / "foreground.npy")
        ends = np.cumsum(self.class_counts)
        return tuple(
            coordinates[end - count : end]
            for end, count in zip(ends, self.class_counts, strict=True)
        )


class Cache:
    """A cache folder."""

    def __init__(self, folder: Path | None) -> None:
        """Open the folder, and make it where there is none.

        Args:
            folder: The folder; None: ``unet3d`` in the user's cache folder.

        Raises:
            CacheError: It cannot be written to.
        """
        if folder is None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unet3d"
        self.folder = folder.absolute()
        with writing_cache(self.folder):
            for name in ("", "digests", "intensities", "prepared"):
                make_folder(self.folder / name)
                remove_leftovers(self.folder / name, LEFTOVER_SECONDS)
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
        known: dict[str, Any] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        note = self.folder / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
        remembered = recall(note, dict)
        if remembered is not None and known.items() <= remembered.items():
            return str(remembered["sha256"])
        with path.open("rb") as file:
            known["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        remember(note, known)
        return str(known["sha256"])

    def load_intensities(self, key: str) -> npt.NDArray[np.float32] | None:
        """Return what :meth:`save_intensities` put there, or None."""
        path = self.folder / "intensities" / f"{key}.npy"
        try:
            array: npt.NDArray[np.float32] = np.load(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError):
            logger.warning("%s is damaged and not used; a new one replaces it", path)
            return None
        return array

    def save_intensities(self, key: str, array: npt.NDArray[np.float32]) -> None:
        """Keep an array (N, C) under a key.

        Raises:
            CacheError: The cache folder cannot be written to.
        """
        path = self.folder / "intensities" / f"{key}.npy"
        with writing_cache(self.folder):
            write_atomically(path, lambda file: np.save(file, array))

    def load_case(self, key: str, name: str) -> PreparedCase | None:
        """Return a prepared case, or None where there is none or it is damaged."""
        folder = self.folder / "prepared" / key

        def read(entry: Any) -> PreparedCase:
            sizes = {file: (folder / file).stat().st_size for file in entry["sizes"]}
            if sizes != entry["sizes"]:
                raise ValueError("a file is not of the size that it was written with")
            x, y, z = entry["spacing_mm"]
            return PreparedCase(
                name=name,
                folder=folder,
                spacing_mm=(x, y, z),
                class_counts=tuple(entry["class_counts"]),
            )

        return recall(folder / "entry.json", read)

    def save_case(
        self,
        key: str,
        image: npt.NDArray[np.float32],
        label: npt.NDArray[np.unsignedinteger],
        spacing_mm: Spacing,
        num_classes: int,
    ) -> None:
        """Write a prepared case under a key.

        Args:
            key: Hash of the case's files and of the settings.
            image: Normalised, shape (C, X, Y, Z).
            label: Class indices, shape (X, Y, Z).
            spacing_mm: Their spacing.
            num_classes: Number of classes, the background included.

        Raises:
            CacheError: The folder is full or cannot be written to.
        """
        final = self.folder / "prepared" / key
        coordinates = foreground_coordinates(label, num_classes)
        with writing_cache(self.folder):
            try:
                with new_folder(final) as unfinished:
                    np.save(unfinished / "image.npy", image)
                    np.save(unfinished / "label.npy", label)
                    np.save(unfinished / "foreground.npy", np.concatenate(coordinates))
                    entry = {
                        "sizes": {file.name: file.stat().st_size for file in unfinished.iterdir()},
                        "spacing_mm": spacing_mm,
                        "class_counts": [len(array) for array in coordinates],
                    }
                    (unfinished / "entry.json").write_text(json.dumps(entry))
                    if final.exists() and self.load_case(key, "") is None:  # it is damaged
                        shutil.rmtree(final, ignore_errors=True)
            except OSError:
                if self.load_case(key, "") is None:  # else another process was faster
                    raise


def foreground_coordinates(
    label: npt.NDArray[np.unsignedinteger], num_classes: int
) -> list[npt.NDArray[np.int32]]:
    """Return some voxel coordinates of each class; none of the background.

    The choice is random but the same for the same label map.

    Args:
        label: Class indices, shape (X, Y, Z).
        num_classes: Number of classes, the background included.

    Returns:
        For each class an array (N, 3) with N of at most ``MAX_FOREGROUND_VOXELS``.
    """
    inside = np.flatnonzero(label)
    classes = label.reshape(-1)[inside]
    order = np.argsort(classes, kind="stable")
    inside, classes = inside[order], classes[order]
    bounds = np.searchsorted(classes, np.arange(num_classes + 1))
    rng = np.random.default_rng(0)
    coordinates = [np.empty((0, 3), np.int32)]
    for index in range(1, num_classes):
        voxels = inside[bounds[index] : bounds[index + 1]]
        if len(voxels) > MAX_FOREGROUND_VOXELS:
            voxels = np.sort(rng.choice(voxels, MAX_FOREGROUND_VOXELS, replace=False))
        coordinates.append(np.stack(np.unravel_index(voxels, label.shape), axis=1).astype(np.int32))
    return coordinates


def _mapped(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise CacheError(
            f"{path} is gone or damaged since training began; run again to prepare it anew, and "
            "leave the folder of data.cache alone during a run"
        ) from error
    return array
