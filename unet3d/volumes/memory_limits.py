"""Memory of the host for one volume: counted before it is taken, explained where it runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

from unet3d.errors import VolumeError
from unet3d.memory.host import available_bytes, is_out_of_memory

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

SMALL_BYTES = 2**26
"""So much is tried even where nothing seems to be left: other programs may be about to end."""


def refuse_beyond_memory(needed_bytes: int, what: str, remedy: str) -> None:
    """Refuse what takes more memory than the host has available, before any of it is taken.

    Args:
        needed_bytes: What will be allocated at the same time.
        what: Begins the message: which volume, and what is to be done with it.
        remedy: Ends the message: what the user can do.

    Raises:
        VolumeError: It takes more than there is.
    """
    available = available_bytes()
    if needed_bytes > max(available, SMALL_BYTES):
        raise VolumeError(
            f"{what} takes {readable(needed_bytes)} of memory, but this machine has "
            f"{readable(available)} available; {remedy}"
        )


@contextmanager
def explaining_memory(what: str) -> Iterator[None]:
    """Explain an allocation that fails all the same, of NumPy or of PyTorch on the CPU.

    Args:
        what: Begins the message: which volume.

    Raises:
        VolumeError: Memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise VolumeError(
            f"{what}: too little memory, {readable(available_bytes())} are available; close other "
            "programs, use fewer processes, or use a machine with more"
        ) from error


def readable(num_bytes: int) -> str:
    """Return an amount of memory in the unit that suits it.

    Args:
        num_bytes: The amount, however large.
    """
    unit = min(max(0, num_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
    return f"{num_bytes / 1024**unit:.4g} {UNITS[unit]}"
