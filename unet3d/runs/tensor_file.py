"""Files of ``torch.save`` that anyone may have made: plain values and tensors, and no code."""

import pickle
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular
from unet3d.memory.host import is_out_of_memory, shortage


def write_tensors(content: Any, file: IO[bytes]) -> None:
    """Write plain values and tensors to an open file, and raise OSError where that is not possible.

    Of a path, torch.save would not say why it cannot be written.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch.save hides an error of the file, such as a full disk, behind one of its own.
        if not isinstance(error.__context__, OSError):
            raise
        raise error.__context__ from None


def read_tensors(path: Path, *, described: bool = False) -> Any:
    """Return the content of a file: tensors are mapped, or where only described, without memory.

    Scalars of NumPy, of which nnU-Net writes some, become numbers. Raises OSError,
    ``pickle.UnpicklingError`` for what could run code, and ValueError for what is damaged.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its entries are compressed; torch.save stores them as they are")
            damaged = None if described else archive.testzip()  # mapped tensors are not checked
            if damaged is not None:
                raise ValueError(f"the sum of its entry {damaged} is wrong")
        with _scalars_of_numpy():
            where = "meta" if described else "cpu"
            return torch.load(path, map_location=where, weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # of the many that a damaged file leads to, none is documented
        if is_out_of_memory(error):
            raise
        said = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
        function = re.search(r"GLOBAL (\S+)", said)
        if isinstance(error, pickle.UnpicklingError) and function is not None:
            raise pickle.UnpicklingError(function[1]) from error
        reason = said.partition("\n")[0] or type(error).__name__
        raise ValueError(printable(reason, 200)) from error


def own_tensors(value: Any, num_bytes: int) -> Any:
    """Return values with tensors in memory of their own, which stay when the file changes.

    Raises ValueError where they are larger than the file, of ``num_bytes``, as tensors are that
    repeat their numbers, or larger than what this machine has available.
    """
    sizes: list[int] = []
    on_tensors(lambda tensor: sizes.append(tensor.numel() * tensor.element_size()), value)
    needed = sum(sizes)
    if needed > num_bytes:
        raise ValueError("its tensors are larger than the file")
    lacking = shortage(needed)  # a file may have holes, which take no disk
    if lacking is not None:
        raise ValueError(f"what it holds {lacking}")
    return on_tensors(_clone, value)


def on_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested values with each tensor replaced by what a function returns of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: on_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_tensors(function, item) for item in value)
    return value


def _clone(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError("one of its tensors does not hold plain numbers")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class _DType:
    """Stands for ``numpy.dtype`` of a number."""

    def __init__(self, name: str, *_: object) -> None:
        if re.fullmatch("[bfiu][1248]", name) is None:
            raise ValueError(f"it holds numbers of the type {printable(name)}")
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Ignore the order of bytes, which is that of all machines that run PyTorch."""


def _number(dtype: _DType, content: bytes) -> Any:
    """Return a scalar of NumPy as a number of Python."""
    return np.frombuffer(content, dtype.name, count=1)[0].item()


_SCALARS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_DType, "numpy.dtype"),
    (_number, "numpy.core.multiarray.scalar"),
    (_number, "numpy._core.multiarray.scalar"),
]
_one_at_a_time = threading.Lock()


@contextmanager
def _scalars_of_numpy() -> Iterator[None]:
    """Let torch.load make numbers of scalars of NumPy, whose own types can take any memory."""
    with _one_at_a_time, torch.serialization.safe_globals(_SCALARS):
        yield
