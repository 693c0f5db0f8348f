"""Objects that hold tensors, with the bytes of all tensors in one piece of memory.

A tensor that comes from another process is an open file that the receiver has to ask for, 0.5 ms,
and each takes a copy of its own to a GPU. There are several for each patch.
"""

import io
import math
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; that of the largest type."""


class Packed(NamedTuple):
    """An object without the bytes of its tensors, which begin and end in memory somewhere."""

    pickled: bytes
    begin: int
    end: int

    def on(self, memory: Tensor, device: torch.device) -> Any:
        """Return the object with its tensors on a device, copied there at once.

        From page-locked memory nobody waits for it.
        """
        own = memory[self.begin : self.end].to(device, non_blocking=True)
        return _Unpickler(io.BytesIO(self.pickled), own).load()


class Packer:
    """Packs objects one after another."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._tensors: list[tuple[int, Tensor]] = []

    def packed(self, thing: Any) -> Packed:
        """Pack an object; its tensors keep their memory until :meth:`fill`."""
        file, begin = io.BytesIO(), self.num_bytes
        pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.dump(thing)
        for first, tensor in pickler.tensors:
            self._tensors.append((begin + first, tensor))
        self.num_bytes += pickler.num_bytes
        return Packed(file.getvalue(), begin, self.num_bytes)

    def fill(self, memory: Tensor) -> Tensor:
        """Write the bytes of all tensors into memory (num_bytes), and return it."""
        for first, tensor in self._tensors:
            own = memory[first : first + tensor.nbytes]
            own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return memory


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.num_bytes = 0
        self.tensors: list[tuple[int, Tensor]] = []

    def persistent_id(self, thing: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        if not isinstance(thing, Tensor):
            return None
        first = self.num_bytes
        self.tensors.append((first, thing))
        self.num_bytes += -(-thing.nbytes // ALIGNMENT) * ALIGNMENT
        return first, thing.dtype, tuple(thing.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        first, dtype, shape = place
        own = self._memory[first : first + math.prod(shape) * dtype.itemsize]
        return own.view(dtype).view(shape)
