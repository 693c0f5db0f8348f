"""Objects that hold tensors, with the bytes of all tensors in one piece of memory.

A tensor from another process is an open file that the receiver has to request, which takes 0.5 ms,
and each tensor is copied to a GPU separately. Each patch has several tensors.
"""

import io
import math
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; the alignment of the largest type."""

Place = tuple[int, torch.dtype, tuple[int, ...]]
"""First byte, type and shape of a tensor in the memory."""


class Packed(NamedTuple):
    """An object without its tensors' bytes, and the range of those bytes in memory."""

    pickled: bytes
    begin: int
    end: int

    def on(self, memory: Tensor, device: torch.device) -> Any:
        """Return the object with its tensors on a device, copied there at once.

        The host does not wait for copies from page-locked memory.
        """
        unpickler = _Unpickler(io.BytesIO(self.pickled))
        unpickler.begin = self.begin
        unpickler.memory = memory[self.begin : self.end].to(device, non_blocking=True)
        return unpickler.load()


class Packer(pickle.Pickler):
    """Packs objects one after another; their tensors keep their memory until :meth:`fill`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._tensors: list[tuple[int, Tensor]] = []
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)

    def packed(self, thing: Any) -> Packed:
        """Pack an object."""
        first, begin = self._file.tell(), self.num_bytes
        self.clear_memo()
        self.dump(thing)
        return Packed(self._file.getvalue()[first:], begin, self.num_bytes)

    def fill(self, memory: Tensor) -> Tensor:
        """Write the bytes of all tensors into memory (num_bytes), and return it."""
        for first, tensor in self._tensors:
            own = memory[first : first + tensor.nbytes]
            own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return memory

    def persistent_id(self, thing: Any) -> Place | None:
        """Keep a tensor, and pickle only its place."""
        if not isinstance(thing, Tensor):
            return None
        first = self.num_bytes
        self._tensors.append((first, thing))
        self.num_bytes += -(-thing.nbytes // ALIGNMENT) * ALIGNMENT
        return first, thing.dtype, tuple(thing.shape)


class _Unpickler(pickle.Unpickler):
    memory: Tensor
    begin: int
    """Offset of the first byte in :attr:`memory`."""

    def persistent_load(self, place: Place) -> Tensor:
        first, dtype, shape = place[0] - self.begin, *place[1:]
        own = self.memory[first : first + math.prod(shape) * dtype.itemsize]
        return own.view(dtype).view(shape)
