"""Untrusted files of ``torch.save``: plain values and tensors, but no code."""

import pickle
import re
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular
from unet3d.memory.host import is_out_of_memory, shortage


def write_tensors(content: Any, file: IO[bytes]) -> None:
    """Write plain values and tensors to an open file, and raise OSError if writing fails.

    Given a path instead, torch.save would not say why it failed.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch.save replaces the file's error, such as a full disk, by one of its own.
        if not isinstance(error.__context__, OSError):
            raise
        raise error.__context__ from None


class _Ignored:
    """A placeholder for NumPy's numbers and types, which occur in the logs of nnU-Net.

    NumPy's own types could allocate any amount of memory. No field of a checkpoint needs such
    numbers.
    """

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


_NUMPY: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Ignored, f"numpy{name}")
    for name in (".dtype", ".core.multiarray.scalar", "._core.multiarray.scalar")
]
_one_at_a_time = threading.Lock()


def read_tensors(path: Path, *, described: bool = False) -> Any:
    """Return the content of a file; its tensors are memory-mapped, or on the meta device.

    Raises OSError, and ValueError if the file is damaged or could run code.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its entries are compressed; torch.save stores them as they are")
            damaged = None if described else archive.testzip()  # mapped tensors are not checked
            if damaged is not None:
                raise ValueError(f"the checksum of its entry {damaged} is wrong")
        with _one_at_a_time, torch.serialization.safe_globals(_NUMPY):
            where = "meta" if described else "cpu"
            return torch.load(path, map_location=where, weights_only=True, mmap=True)
    except OSError:
        raise
    except zipfile.BadZipFile as error:
        raise ValueError("it is not a file of torch.save, or only a part of one") from error
    except Exception as error:  # damaged files raise many kinds of errors, none of them documented
        if is_out_of_memory(error):
            raise
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        function = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and function is not None:
            what = f"it holds more than tensors, numbers and strings ({function[1]})"
            reason = f"{what}, and so could run code"
        raise ValueError(printable(reason or type(error).__name__, 200)) from error


def own_tensors(value: Any, num_bytes: int) -> Any:
    """Return nested values with copies of the tensors in memory, independent of the file.

    Raises ValueError if the tensors are larger than the file (``num_bytes``), as tensors with
    stride 0 can be, or than the available memory.
    """
    sizes: list[int] = []
    on_tensors(lambda tensor: sizes.append(tensor.numel() * tensor.element_size()), value)
    needed = sum(sizes)
    if needed > num_bytes:
        raise ValueError("its tensors are larger than the file")
    lacking = shortage(needed)  # a sparse file may be larger than memory and disk
    if lacking is not None:
        raise ValueError(f"its content {lacking}")
    return on_tensors(own, value)


def on_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested values with a function applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: on_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_tensors(function, item) for item in value)
    return value


def own(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, without an autograd graph."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError("one of its tensors does not hold plain numbers")
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
