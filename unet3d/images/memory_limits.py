"""Memory of the host for one volume: counted before it is taken, explained where it runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

from unet3d.errors import VolumeError
from unet3d.memory.host import available_bytes, is_out_of_memory, readable, shortage

FLOAT32_BYTES = 4
"""Of a voxel, a weight or a logit that is computed with."""


def refuse_beyond_memory(needed_bytes: int, what: str, remedy: str) -> None:
    """Refuse what takes more memory than the host has available, before any of it is taken.

    ``what`` begins the message, and ``remedy`` ends it.
    """
    lacking = shortage(needed_bytes)
    if lacking is not None:
        raise VolumeError(f"{what} {lacking}; {remedy}")


@contextmanager
def explaining_memory(what: str) -> Iterator[None]:
    """Explain an allocation that fails all the same, of NumPy or of PyTorch on the CPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise VolumeError(
            f"{what}: too little memory, {readable(available_bytes())} are available; close other "
            "programs, use fewer processes, or use a machine with more"
        ) from error
