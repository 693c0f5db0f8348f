"""Settings of CUDA's caching allocator. PyTorch reads them at its start, so it is not imported."""

import os

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments() -> None:
    """Have CUDA's allocator grow what it has reserved, instead of adding pieces of fixed size.

    Feature maps with and without padding differ by about a percent in size, so neither fits into
    the gap that the other leaves. Much less is lost where gaps can grow together with the memory
    after them. What a user has set is kept. Call it before CUDA is first used.
    """
    if not any(variable in os.environ for variable in VARIABLES):
        os.environ[VARIABLES[0]] = "expandable_segments:True"
