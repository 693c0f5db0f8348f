"""The cache of prepared cases: one folder per case, memory-mapped, shared by every process.

::

    digests/<sha256 of the path>.json       what a volume file contained when it was last hashed
    intensities/<key>.npy                   intensities inside the labels of one case
    prepared/<key>/image.npy                float32 (C, X, Y, Z)
                   label.npy                class indices (X, Y, Z)
                   foreground.npy           voxel coordinates, class after class, (N, 3)
                   entry.json               written last: shapes, spacing, size of each file

A key is a hash of what the files *contain* and of everything that was done to them, so an entry
is never stale. Entries are built in a hidden folder and renamed into place: a reader sees all or
nothing, and of two processes that build the same entry one wins and the other uses its result.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import DatasetError, VolumeError

logger = logging.getLogger(__name__)


UNFINISHED = ".unfinished-"

LEFTOVER_SECONDS = 24 * 3600

MAX_FOREGROUND_VOXELS = 10_000
"""Coordinates kept per class: enough to sample from, few where a label fills half a volume."""


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case on disk, resampled and normalised; its arrays are mapped, not read."""

    name: str
    folder: Path
    spacing_mm: tuple[float, float, float]
    class_counts: tuple[int, ...]
    """How many coordinates :meth:`foreground` has of each class; 0 for the background."""

    def image(self) -> npt.NDArray[np.float32]:
        """Return the normalised image, a read-only map of shape (C, X, Y, Z)."""
        return _mapped(self.folder / "image.npy")

    def label(self) -> npt.NDArray[np.unsignedinteger]:
        """Return the class indices, a read-only map of shape (X, Y, Z)."""
        return _mapped(self.folder / "label.npy")

    def foreground(self) -> tuple[npt.NDArray[np.int32], ...]:
        """Return voxel coordinates (N, 3) per class; a random choice where a class has many."""
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
        """Open the folder, creating it if need be.

        Args:
            folder: Where it is; None: ``unet3d`` in the user's cache folder.

        Raises:
            DatasetError: It cannot be written to.
        """
        if folder is None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unet3d"
        self.folder = folder.absolute()
        with self._writing():
            for name in ("digests", "intensities", "prepared"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
                self._remove_leftovers(self.folder / name)
            with self._replacing(self.folder / "writable") as unfinished:
                unfinished.touch()

    @staticmethod
    def _remove_leftovers(folder: Path) -> None:
        """Remove what processes left that were killed while they wrote."""
        for path in folder.glob(f"{UNFINISHED}*"):
            try:
                if time.time() - path.stat().st_mtime < LEFTOVER_SECONDS:
                    continue
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except FileNotFoundError:  # another process cleans too
                continue

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a volume file's bytes, hashing them only once.

        A file that keeps its path, size and time of modification is taken to be unchanged.

        Raises:
            VolumeError: The file cannot be read.
        """
        files = [path]
        if path.suffix in (".hdr", ".img"):
            # The header and the voxels of one volume.
            other = path.with_suffix(".img" if path.suffix == ".hdr" else ".hdr")
            files += [other] if other.is_file() else []
        try:
            return "-".join(self._digest(file.absolute()) for file in files)
        except OSError as error:
            raise VolumeError(f"cannot read {error.filename or path}: {error.strerror}") from error

    def _digest(self, path: Path) -> str:
        status = path.stat()
        known: dict[str, Any] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        note = self.folder / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
        remembered = _read_note(note)
        if remembered is not None and known.items() <= remembered.items():
            return str(remembered["sha256"])
        with path.open("rb") as file:
            known["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        with self._writing(), self._replacing(note) as unfinished:
            unfinished.write_text(json.dumps(known))
        return str(known["sha256"])

    def load_intensities(self, key: str) -> npt.NDArray[np.float32] | None:
        """Return what :meth:`save_intensities` put there, or None."""
        path = self.folder / "intensities" / f"{key}.npy"
        try:
            array: npt.NDArray[np.float32] = np.load(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError):
            logger.warning("%s is damaged and is made again", path)
            return None
        return array

    def save_intensities(self, key: str, array: npt.NDArray[np.float32]) -> None:
        """Keep an array (N, C) under a key."""
        path = self.folder / "intensities" / f"{key}.npy"
        with self._writing(), self._replacing(path) as unfinished, unfinished.open("wb") as file:
            np.save(file, array)

    def load_case(self, key: str, name: str) -> PreparedCase | None:
        """Return a prepared case, or None where there is none or it is damaged."""
        folder = self.folder / "prepared" / key
        entry = _read_note(folder / "entry.json")
        if entry is None:
            return None
        try:
            sizes = {file: (folder / file).stat().st_size for file in entry["sizes"]}
            if sizes != entry["sizes"]:
                return None
            x, y, z = entry["spacing_mm"]
            return PreparedCase(
                name=name,
                folder=folder,
                spacing_mm=(x, y, z),
                class_counts=tuple(entry["class_counts"]),
            )
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def save_case(
        self,
        key: str,
        image: npt.NDArray[np.float32],
        label: npt.NDArray[np.unsignedinteger],
        spacing_mm: tuple[float, float, float],
        num_classes: int,
    ) -> None:
        """Write a prepared case under a key.

        Args:
            key: Hash of the case's files and of the settings.
            image: Normalised, shape (C, X, Y, Z).
            label: Class indices, shape (X, Y, Z).
            spacing_mm: Their spacing.
            num_classes: The background included.

        Raises:
            DatasetError: The folder is full or cannot be written to.
        """
        final = self.folder / "prepared" / key
        unfinished = final.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
        coordinates = foreground_coordinates(label, num_classes)
        with self._writing():
            try:
                unfinished.mkdir()
                np.save(unfinished / "image.npy", image)
                np.save(unfinished / "label.npy", label)
                np.save(unfinished / "foreground.npy", np.concatenate(coordinates))
                entry = {
                    "sizes": {file.name: file.stat().st_size for file in unfinished.iterdir()},
                    "spacing_mm": spacing_mm,
                    "class_counts": [len(array) for array in coordinates],
                }
                (unfinished / "entry.json").write_text(json.dumps(entry))
                self._publish(key, unfinished, final)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)  # it is gone if all went well

    def _publish(self, key: str, unfinished: Path, final: Path) -> None:
        if final.exists():
            if self.load_case(key, "") is not None:
                return  # another process was faster
            logger.warning("%s is damaged and is made again", final)
            shutil.rmtree(final, ignore_errors=True)
        try:
            unfinished.rename(final)
        except OSError:
            if self.load_case(key, "") is None:  # not the race that it looks like
                raise

    @contextmanager
    def _replacing(self, final: Path) -> Iterator[Path]:
        unfinished = final.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
        try:
            yield unfinished
            unfinished.replace(final)
        finally:
            unfinished.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DatasetError(
                f"cannot write the cache folder {self.folder}: {error.strerror}; set data.cache "
                "to a folder with space that you can write to"
            ) from error


def foreground_coordinates(
    label: npt.NDArray[np.unsignedinteger], num_classes: int
) -> list[npt.NDArray[np.int32]]:
    """Return coordinates (N, 3) of each class but the background, at most 10,000 of a class.

    The choice is random but the same for the same label map.
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
        raise DatasetError(
            f"{path} is gone or damaged since training began; run again to prepare it anew"
        ) from error
    return array


def _read_note(path: Path) -> dict[str, Any] | None:
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError):  # absent, or half written before a power cut
        return None
    return tree if isinstance(tree, dict) else None
