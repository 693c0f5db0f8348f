"""Reads files of ``torch.save`` that anyone may have made, without taking more than their size.

``torch.load`` with ``weights_only`` runs no code, but makes whatever a file asks for: compressed
entries of gigabytes, tensors whose every number is the same one, values that hold themselves. Here
nothing is unpacked or called. A file is a ZIP archive, of one pickle and an entry for each tensor:

* The archive is taken if its entries are stored as they are, one behind the other.
* Of the pickle's language only what plain values and tensors need is understood
  (:mod:`unet3d.runs.plain_pickle`).
* A tensor must have numbers of its own in the file, each of them once. Where other programs' files
  are read, several names may be of one tensor.
"""

import math
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.inputs.plain_data import printable
from unet3d.inputs.zip_files import open_zip
from unet3d.runs.plain_pickle import MAX_STEPS, Storage, plain_values

MAX_PICKLE_BYTES = 8 * 2**20
FOREIGN_SHARE = 4
"""So many times what our own files hold may others: nnU-Net keeps the scores of thousands of epochs
of a hundred classes."""
MAX_AXES = 8


class TensorFile:
    """What a file holds, its tensors without memory at first."""

    def __init__(self, entries: "_Entries") -> None:
        self._entries = entries
        steps = MAX_STEPS * (FOREIGN_SHARE if entries.is_foreign else 1)
        self.content = plain_values(entries.pickle(), entries.describe, steps)
        """Plain values, and tensors on the meta device."""

    @property
    def num_bytes(self) -> int:
        """Memory that all tensors of the file take."""
        return self._entries.num_bytes

    def bytes_of(self, value: Any) -> int:
        """Return the memory that :meth:`filled` takes for a part of the content.

        All numbers are read that a tensor has some of, and once for each of its names.

        Args:
            value: Of :attr:`content`.
        """
        if isinstance(value, Tensor):
            return self._entries.bytes_of(value)
        items = value.values() if isinstance(value, dict) else value
        return sum(map(self.bytes_of, items)) if isinstance(value, dict | list | tuple) else 0

    def filled(self, value: Any) -> Any:
        """Return a part of the content with tensors on the CPU, read from the file.

        Args:
            value: Of :attr:`content`.

        Raises:
            ValueError: The numbers are damaged.
        """
        if isinstance(value, Tensor):
            return self._entries.read_tensor(value)
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.filled(item) for item in value)
        return value


@contextmanager
def open_tensor_file(path: Path, *, foreign: bool = False) -> Iterator[TensorFile]:
    """Open a file of ``torch.save``; while it is open its tensors can be read.

    Args:
        path: The file.
        foreign: Whether another program wrote it: a tensor may have several names, for each of
            which :meth:`TensorFile.filled` reads it anew, and there may be more plain values.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        pickle.UnpicklingError: It holds more than plain values and tensors.
        ValueError: It is no such file, or is damaged; one line that says how.
    """
    with open_zip(path) as archive:
        yield TensorFile(_Entries(archive, is_foreign=foreign))


class _Entries:
    """The entries of the archive: the pickle, and numbers by their keys."""

    def __init__(self, archive: zipfile.ZipFile, *, is_foreign: bool) -> None:
        self.is_foreign = is_foreign
        self._archive = archive
        self._shared: dict[str, Tensor] = {}
        """Tensors that may have other names, by their key."""
        ordered = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        ends = [entry.header_offset for entry in ordered[1:]] + [archive.start_dir]
        for entry, end in zip(ordered, ends, strict=True):
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise ValueError("its entries are compressed; torch.save stores them as they are")
            if entry.header_offset + zipfile.sizeFileHeader + entry.file_size > end:  # type: ignore[attr-defined]
                raise ValueError("its entries overlap")
        self._by_name = {entry.filename: entry for entry in ordered}
        pickles = [name for name in self._by_name if name.endswith("/data.pkl")]
        if len(self._by_name) < len(ordered) or len(pickles) != 1:
            raise ValueError("it is no archive of torch.save")
        self._folder = pickles[0].removesuffix("data.pkl")
        self._described: dict[int, tuple[Tensor, zipfile.ZipInfo, int]] = {}
        order = self._by_name.get(f"{self._folder}byteorder")
        if order is not None and self._read(order, 10) != sys.byteorder.encode():
            raise ValueError("it was written on a machine with another order of bytes")

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that were described."""
        return sum(entry.file_size for _, entry, _ in self._described.values())

    def pickle(self) -> bytes:
        """Return the pickle."""
        most = MAX_PICKLE_BYTES * (FOREIGN_SHARE if self.is_foreign else 1)
        return self._read(self._by_name[f"{self._folder}data.pkl"], most)

    def describe(
        self, storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Tensor:
        """Return a tensor without memory for an entry, which no other can have after it."""
        key, dtype, length = storage
        if len(shape) > MAX_AXES:
            raise ValueError(f"a tensor has {len(shape):,} axes")
        known = self._shared.get(key)
        if known is not None:
            _, _, first = self._described[id(known)]
            if (known.dtype, first, *known.shape) == (dtype, offset, *shape) and (
                known.stride() == strides
            ):
                return known
        entry = self._by_name.pop(f"{self._folder}data/{key}", None)
        if entry is None:
            raise ValueError(f"the numbers of a tensor are missing, or those of two: {key[:40]!a}")
        axes = [*shape, *strides, offset]
        if any(type(n) is not int or not 0 <= n < 2**48 for n in axes):
            raise ValueError("a tensor has no usable shape")
        num_bytes = length * dtype.itemsize
        if entry.file_size != num_bytes or offset + math.prod(shape) > length or 0 in shape:
            raise ValueError(f"a tensor of {len(shape)} axes has other numbers than it says")
        if not _is_dense(shape, strides):
            raise ValueError("a tensor repeats its numbers, or leaves some out")
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        self._described[id(tensor)] = (tensor, entry, offset)
        if self.is_foreign:
            self._shared[key] = tensor
        return tensor

    def bytes_of(self, described: Tensor) -> int:
        """Return how many bytes :meth:`read_tensor` reads."""
        _, entry, _ = self._described[id(described)]
        return entry.file_size

    def read_tensor(self, described: Tensor) -> Tensor:
        """Return a tensor that was described, with its numbers."""
        _, entry, offset = self._described[id(described)]
        content = np.frombuffer(self._archive.read(entry), np.uint8)
        numbers = torch.from_numpy(content.copy()).view(described.dtype)  # one that can be written
        return numbers.as_strided(described.shape, described.stride(), offset)

    def _read(self, entry: zipfile.ZipInfo, max_bytes: int) -> bytes:
        if entry.file_size > max_bytes:
            raise ValueError(f"{printable(entry.filename)} has more than {max_bytes:,} bytes")
        return self._archive.read(entry)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether each number within a tensor's reach is its own, in any order of the axes."""
    reach = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != reach:
            return False
        reach *= length
    return True
