"""Settings of the allocators of GPU and host memory, made before they are first used.

PyTorch reads some of them at its start, so it is not imported here.
"""

import ctypes
import os
import sys

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_MALLOC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def use_expandable_segments() -> None:
    """Have CUDA's allocator grow its reserved segments instead of adding segments of fixed size.

    Feature maps with and without padding differ by about a percent in size, so one does not fit
    into the freed memory of the other. Expandable segments reduce this fragmentation. Settings of
    the user are kept. Call it before CUDA is first used.
    """
    if not any(variable in os.environ for variable in VARIABLES):
        os.environ[VARIABLES[0]] = "expandable_segments:True"


def keep_host_memory() -> None:
    """Have this process keep the host memory that it frees, for its next tensors.

    By default glibc takes every large tensor from the system and gives it back when it is freed,
    and the system fills each new page with zeros: on a CPU that takes as long as several passes
    over the tensor, and up to half of a training step. Settings of the user are kept, and other C
    libraries are not changed.
    """
    if sys.platform != "linux" or any(variable in os.environ for variable in _MALLOC_VARIABLES):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # musl has none
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, -1)
