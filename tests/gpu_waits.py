"""Work on GPUs that must not make the host wait."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def refused_waits() -> Iterator[None]:
    """Make PyTorch raise an error if the host waits for a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this mode does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
