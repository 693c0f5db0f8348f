"""Arithmetic whose bits do not depend on how many threads there are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def independent_of_threads(device: torch.device) -> Iterator[None]:
    """Compute in one thread on a CPU.

    How work is divided over threads changes the bits of matrix products, of sums to one number and
    of powers, whose last voxels in each thread go through other code than the rest. A loading
    process has one thread, the training process several, and both make the same batches.

    Args:
        device: Where the tensors are.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
