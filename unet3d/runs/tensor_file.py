"""Reads files of ``torch.save`` that anyone may have made, without taking more than their size.

``torch.load`` with ``weights_only`` runs no code, but makes whatever a file asks for: compressed
entries of gigabytes, tensors whose every number is the same one, values that hold themselves. Here
nothing is unpacked or called. A file is a ZIP archive, of one pickle and an entry for each tensor:

* The archive is taken if its entries are stored as they are, one behind the other.
* Of the pickle's language only what plain values and tensors need is understood
  (:mod:`pickletools` reads it); names of functions are compared, never looked up.
* A tensor must have numbers of its own in the file, each of them once.
"""

import io
import math
import os
import pickle
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

MAX_DIRECTORY_BYTES = 4 * 2**20
"""Of the archive's list of entries; one takes about a hundred bytes."""
MAX_PICKLE_BYTES = 8 * 2**20
MAX_STEPS = 1_000_000
"""Of the pickle, and of the values that it makes; a network of a hundred layers has 30,000."""
MAX_DEPTH = 32
MAX_NUMBER_AS_KEY = 2**32
MAX_AXES = 8

DTYPES = {
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_DICTIONARY = "collections OrderedDict"


class _Name(str):
    """Name of a function or class, which is never looked up."""


class _Storage(tuple[str, torch.dtype, int]):
    """Key, type and length of the numbers of a tensor, which are not read yet."""


class TensorFile:
    """What a file holds, its tensors without memory at first."""

    def __init__(self, entries: "_Entries") -> None:
        self._entries = entries
        self.content = _checked(_values(entries.pickle(), entries.describe))
        """Plain values, and tensors on the meta device."""

    @property
    def num_bytes(self) -> int:
        """Memory that all tensors of the file take."""
        return self._entries.num_bytes

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
def open_tensor_file(path: Path) -> Iterator[TensorFile]:
    """Open a file of ``torch.save``; while it is open its tensors can be read.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        pickle.UnpicklingError: It holds more than plain values and tensors.
        ValueError: It is no such file, or is damaged; one line that says how.
    """
    with _BoundedFile(open_regular(path).detach()) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                file.limit = None
                yield TensorFile(_Entries(archive, os.fstat(file.fileno()).st_size))
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise ValueError(printable(str(error), 200) or "it ends too early") from error
        except (struct.error, LookupError, OverflowError, TypeError) as error:
            raise ValueError(f"its parts do not agree: {printable(str(error), 200)}") from error


class _BoundedFile(io.BufferedReader):
    """A file of which no more than a limit is read at once, while the archive is opened."""

    limit: int | None = MAX_DIRECTORY_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if self.limit is None:
            return super().read(size)
        is_bounded = size is not None and 0 <= size <= self.limit
        content = super().read(size if is_bounded else self.limit + 1)
        if len(content) > self.limit:
            raise ValueError(f"its list of entries is larger than {self.limit:,} bytes")
        return content


class _Entries:
    """The entries of the archive: the pickle, and numbers by their keys."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive = archive
        ordered = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        ends = [entry.header_offset for entry in ordered[1:]] + [size]
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
        return self._read(self._by_name[f"{self._folder}data.pkl"], MAX_PICKLE_BYTES)

    def describe(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Tensor:
        """Return a tensor without memory for an entry, which no other tensor can have after it."""
        key, dtype, length = storage
        entry = self._by_name.pop(f"{self._folder}data/{key}", None)
        if entry is None:
            raise ValueError(f"the numbers of a tensor are missing, or those of two: {key[:40]!a}")
        axes = [*shape, *strides, offset]
        if len(shape) > MAX_AXES or any(type(n) is not int or not 0 <= n < 2**48 for n in axes):
            raise ValueError("a tensor has no usable shape")
        num_bytes = length * dtype.itemsize
        if entry.file_size != num_bytes or offset + math.prod(shape) > length or 0 in shape:
            raise ValueError(f"a tensor of {len(shape)} axes has other numbers than it says")
        if not _is_dense(shape, strides):
            raise ValueError("a tensor repeats its numbers, or leaves some out")
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        self._described[id(tensor)] = (tensor, entry, offset)
        return tensor

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


def _values(content: bytes, describe: Callable[..., Tensor]) -> Any:
    """Carry out a pickle's steps on plain values.

    Raises:
        pickle.UnpicklingError: A step needs more than plain values and tensors.
        ValueError, LookupError, TypeError: The steps make no sense.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop(count: int) -> list[Any]:
        taken = stack[len(stack) - count :]
        if len(taken) < count:
            raise ValueError("its pickle takes more values than there are")
        del stack[len(stack) - count :]
        return taken

    def above_mark() -> list[Any]:
        return pop(len(stack) - marks.pop())

    for number, (step, argument, _) in enumerate(pickletools.genops(content)):
        if number > MAX_STEPS:
            raise ValueError(f"its pickle has more than {MAX_STEPS:,} steps")
        name = step.name
        if name in _ARGUMENT_IS_VALUE:
            stack.append(argument)
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[_as_int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[_as_int(argument)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(above_mark()))
        elif name in _TUPLES:
            stack.append(tuple(pop(_TUPLES[name])))
        elif name in ("APPEND", "APPENDS"):
            items = pop(1) if name == "APPEND" else above_mark()
            _last(stack, list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = pop(2) if name == "SETITEM" else above_mark()
            _put(_last(stack, dict), items)
        elif name == "GLOBAL":
            stack.append(_Name(argument))
        elif name == "BINPERSID":
            stack.append(_storage(*pop(1)))
        elif name == "REDUCE":
            function, arguments = pop(2)
            stack.append(_made(function, arguments, describe))
        elif name == "BUILD":  # attributes of a state_dict, which hold nothing that we read
            pop(1)
        elif name == "STOP":
            break
        elif name != "PROTO":
            raise pickle.UnpicklingError(name)
    if len(stack) != 1:
        raise ValueError(f"its pickle makes {len(stack):,} values instead of one")
    return stack[0]


_ARGUMENT_IS_VALUE = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_NEW: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _as_int(argument: Any) -> int:
    return int(argument)


def _last(stack: list[Any], kind: type[Any]) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError("its pickle puts values into what takes none")
    return stack[-1]


def _put(target: dict[Any, Any], items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Numbers that differ by multiples of 2^61 - 1 have one hash, and a dictionary of them takes
        # hours; those of parameters are small.
        if type(key) is not str and (type(key) is not int or not 0 <= key < MAX_NUMBER_AS_KEY):
            raise ValueError("its pickle has keys that are neither text nor small numbers")
        target[key] = value


def _storage(description: Any) -> _Storage:
    """Return what torch.save says of a tensor's numbers: kind, type, key, device, length."""
    kind, dtype, key, _, length = description
    if kind != "storage" or type(dtype) is not _Name or not isinstance(key, str):
        raise ValueError("its pickle refers to something that is no tensor")
    if dtype not in DTYPES:
        raise ValueError(f"it holds numbers of the type {printable(dtype)}")
    if type(length) is not int:
        raise ValueError("a tensor has no usable length")
    return _Storage((key, DTYPES[dtype], length))


def _made(function: Any, arguments: Any, describe: Callable[..., Tensor]) -> Any:
    """Return what a function would make, if it is one of the two that torch.save calls."""
    if function == _DICTIONARY and type(function) is _Name and arguments == ():
        return {}
    if function == _REBUILD and type(function) is _Name and type(arguments) is tuple:
        storage, offset, shape, strides, *_ = arguments
        if type(storage) is _Storage and type(shape) is tuple and type(strides) is tuple:
            return describe(storage, offset, shape, strides)
        raise ValueError("its pickle makes a tensor of something else")
    raise pickle.UnpicklingError(function)


def _checked(value: Any) -> Any:
    """Return values if they are few and flat: a list may hold another one many times, or itself."""
    num_values = 0

    def visit(value: Any, depth: int) -> None:
        nonlocal num_values
        num_values += 1
        if num_values > MAX_STEPS or depth > MAX_DEPTH:
            raise ValueError(f"its values are more than {MAX_STEPS:,}, or too deep")
        if type(value) in (_Name, _Storage):
            raise pickle.UnpicklingError(value)
        if isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item, depth + 1)

    visit(value, 0)
    return value
