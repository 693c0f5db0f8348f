"""Entries of the cache: folders of arrays in which every byte is checked before it is trusted.

::

    <key>/image.npy, ...    the arrays
          entry.json        key, size and checksum of each array, notes, and its own checksum

An entry appears whole or not at all. The checksums are CRC-32: one core reads and checks 3 GB/s,
where SHA-256 alone does 2. They find what disks, interrupted copies and other programs do by
accident; who may write to the cache folder may also write what is trained on.
"""

import errno
import json
import mmap
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from unet3d.atomic import publish_folder, unfinished_folder
from unet3d.errors import CacheError, reason_of
from unet3d.inputs.reading import open_regular, read_bytes

RECORD = "entry.json"

MAX_RECORD_BYTES = 2**24
"""More than the notes of a case with ``MAX_CLASSES`` classes take."""

CHUNK_BYTES = 2**18

MAX_ATTEMPTS = 5
"""How often the name of an entry is tried, where something damages entries all the time."""


class DamagedError(Exception):
    """An entry is not what was written; the message is the reason."""


class StoredFile(BaseModel):
    """What a file contained when it was written."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    size: NonNegativeInt
    crc32: NonNegativeInt


class EntryRecord(BaseModel):
    """What ``entry.json`` holds; each kind of entry adds its notes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    arrays: ClassVar[tuple[str, ...]]
    """Names of the arrays."""

    key: str
    files: dict[str, StoredFile]
    """By the names of the arrays."""
    checksum: NonNegativeInt = 0
    """CRC-32 of everything else in the record."""

    def own_checksum(self) -> int:
        """Return what ``checksum`` must be."""
        return json_checksum(self.model_dump(mode="json", exclude={"checksum"}))


Record = TypeVar("Record", bound=EntryRecord)


def read_entry(folder: Path, kind: type[Record]) -> Record | None:
    """Return the record of an entry, once every byte of the entry has been checked.

    Args:
        folder: The entry's, named by its key.
        kind: What is in it.

    Returns:
        The record; None where nothing has the folder's name.

    Raises:
        DamagedError: The entry is not what was written.
    """
    try:
        if not os.path.lexists(folder):
            return None
        record = _read_record(folder / RECORD, kind)
        if record.key != folder.name or record.files.keys() != set(kind.arrays):
            raise DamagedError(f"{RECORD} is of another entry")
        for name, file in record.files.items():
            path = array_path(folder, name)
            if path.stat().st_size != file.size:
                raise DamagedError(f"{path.name} has another size")
            if _crc32(path) != file.crc32:
                raise DamagedError(f"{path.name} has another checksum")
    except OSError as error:
        raise DamagedError(reason_of(error)) from error
    return record


def write_entry(
    folder: Path,
    kind: type[EntryRecord],
    arrays: Mapping[str, npt.NDArray[Any]],
    notes: Mapping[str, object],
) -> None:
    """Write an entry, unless a sound one is there: then another process was faster.

    Args:
        folder: Named by the key.
        kind: What is in it.
        arrays: The arrays by their names.
        notes: The other fields of the record.

    Raises:
        OSError: It cannot be written.
    """
    try:
        with unfinished_folder(folder) as unfinished:
            files = {}
            for name, array in arrays.items():
                path = array_path(unfinished, name)
                _write_array(path, array)
                files[name] = StoredFile(size=path.stat().st_size, crc32=_crc32(path))
            record = kind.model_validate({"key": folder.name, "files": files, **notes})
            record = record.model_copy(update={"checksum": record.own_checksum()})
            (unfinished / RECORD).write_text(record.model_dump_json(indent=1))
            _publish(unfinished, folder, kind)
    except OSError:
        if not _is_sound(folder, kind):
            raise


def _write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a file as ``np.save`` does, which says of a full disk only how much it has written."""
    array = np.ascontiguousarray(array)
    with path.open("xb") as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)


def array_path(folder: Path, name: str) -> Path:
    """Return the file of an array of an entry."""
    return folder / f"{name}.npy"


def map_array(path: Path) -> npt.NDArray[Any]:
    """Return a read-only map of an array of an entry.

    Args:
        path: Its file.

    Raises:
        CacheError: The file is gone or damaged.
    """
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # np.load opens the file three times, which takes a tenth of a patch's time.
            if is_fortran or dtype.hasobject:
                raise ValueError("no array of this package")
            return np.ndarray(shape, dtype, content, file.tell())
    except Exception as error:  # a damaged header can raise anything in NumPy
        raise gone_error(path) from error


def gone_error(path: Path) -> CacheError:
    """Return the error for a file that was sound when the run began, and is not any more.

    Args:
        path: The file.
    """
    return CacheError(
        f"{path} is gone or damaged since training began; run again to prepare it anew, and "
        "leave the folder of data.cache alone during a run"
    )


def json_checksum(tree: Any) -> int:
    """Return the CRC-32 of plain values."""
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())


def _publish(unfinished: Path, folder: Path, kind: type[EntryRecord]) -> None:
    """Give an entry its name, unless a sound one has it; other processes may do the same."""
    for attempt in range(MAX_ATTEMPTS):
        if os.path.lexists(folder):
            if _is_sound(folder, kind):
                return
            with unfinished_folder(folder) as removed, suppress(FileNotFoundError):
                os.rename(folder, removed / "damaged")  # at once, so nobody sees half of it
        try:
            publish_folder(unfinished, folder)
        except OSError as error:
            is_there = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
            if not is_there or attempt + 1 == MAX_ATTEMPTS:
                raise
        else:
            return


def _is_sound(folder: Path, kind: type[EntryRecord]) -> bool:
    try:
        return read_entry(folder, kind) is not None
    except DamagedError:
        return False


def _read_record(path: Path, kind: type[Record]) -> Record:
    try:
        record = kind.model_validate_json(read_bytes(path, MAX_RECORD_BYTES))
    except ValidationError as error:
        raise DamagedError(f"{path.name} is not what this version writes") from error
    if record.checksum != record.own_checksum():
        raise DamagedError(f"{path.name} has another checksum")
    return record


def _crc32(path: Path) -> int:
    checksum = 0
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
