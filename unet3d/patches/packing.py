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
    """Copy tensors into one, one after another.

    Args:
        tensors: Of any shapes and types, on a CPU.
        allocate: Returns as many bytes, uint8.
    """
    memory = allocate(sum(_place(tensor) for tensor in tensors))
    taken = unpacking(memory)
    for tensor in tensors:
        taken(tensor).copy_(tensor)
    return memory


def unpacking(memory: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what returns the tensors that were packed, one after another; they share the memory.

    It is called with tensors of the same shapes and types, in the same order, on any device.

    Args:
        memory: What :func:`packed` returned.
    """
    end = 0

    def taken(like: Tensor) -> Tensor:
        nonlocal end
        begin, end = end, end + _place(like)
        return memory[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    return taken


def shared_memory(num_bytes: int) -> Tensor:
    """Return memory that goes to another process without a copy.

    Args:
        num_bytes: Its size.
    """
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def page_locked_memory(num_bytes: int) -> Tensor:
    """Return memory from which copies to a GPU are asynchronous.

    Args:
        num_bytes: Its size.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _place(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes with those to the next one."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
