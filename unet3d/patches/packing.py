"""Tensors in one piece of memory, so that they pass between processes as one open file.

Each tensor that a process receives from another costs it several messages, about 0.5 ms: with one
for each tensor of a batch of small patches, receiving takes longer than the training step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; that of the largest type."""


def packed(tensors: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> Tensor:
    """Copy tensors of a CPU, one after another, into one of as many bytes as they take."""
    memory = allocate(sum(_place(tensor) for tensor in tensors))
    taken = unpacking(memory)
    for tensor in tensors:
        taken(tensor).copy_(tensor)
    return memory


def unpacking(memory: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what gives the packed tensors, one after another, which share the memory.

    It is called with tensors of their shapes and types, in their order, on any device.
    """
    end = 0

    def taken(like: Tensor) -> Tensor:
        nonlocal end
        begin, end = end, end + _place(like)
        return memory[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    return taken


def shared_memory(num_bytes: int) -> Tensor:
    """Return memory that goes to another process without a copy."""
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def page_locked_memory(num_bytes: int) -> Tensor:
    """Return memory from which copies to a GPU are asynchronous."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _place(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes with those to the next one."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
