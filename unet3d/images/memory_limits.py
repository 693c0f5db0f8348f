"""Host memory for one volume: checked before allocation, and errors explained if it runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

from unet3d.errors import VolumeError
from unet3d.memory.host import available_bytes, is_out_of_memory, readable, shortage

FLOAT32_BYTES = 4
"""Bytes of a voxel, a weight or a logit in float32."""

KEPT_BYTES = 2**27
"""Most bytes of unpacked chunks to keep for the next planes of a volume that is read in thin slabs:
enough for planes of 1000x1000 voxels of a byte in chunks of 128."""


def refuse_beyond_memory(needed_bytes: int, what: str, remedy: str) -> None:
    """Raise VolumeError if more memory is needed than the host has available.

    The message begins with ``what`` and ends with ``remedy``.
    """
    lacking = shortage(needed_bytes)
    if lacking is not None:
        raise VolumeError(f"{what} {lacking}; {remedy}")


@contextmanager
def explaining_memory(what: str) -> Iterator[None]:
    """Turn a failed allocation of NumPy, or of PyTorch on the CPU, into a VolumeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise VolumeError(
            f"{what}: too little memory, {readable(available_bytes())} are available; close other "
            "programs, use fewer processes, or use a machine with more"
        ) from error
