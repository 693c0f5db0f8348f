"""How the matrix of voxels by channels is divided among a GPU's programs; needs no Triton."""

import functools
from typing import NamedTuple

BLOCK_ELEMENTS = 4096
"""Elements of the matrix in one program at a time: 32 values a thread with 4 warps."""
MAX_BLOCK_CHANNELS = 64
WANTED_PROGRAMS = 528
"""Four for each of an H200's 132 processors, which is how many of eight warps find place there at a
time. With 1056 the statistics of 256 channels at 16 x 32 x 32 take 24 us instead of 15, with 264
those of 32 channels at 256^3 half as long again."""


class Grid(NamedTuple):
    """Sizes of blocks and runs, and the grids of programs over them."""

    block_voxels: int
    """Voxels of a block."""
    block_channels: int
    """Channels of a block, a power of two."""
    run: int
    """Voxels of a run, which one program sums up."""
    runs: int
    """Runs of a sample, of which the last may be shorter."""
    over_runs: tuple[int, int, int]
    """A program for each run, block of channels and sample."""
    over_blocks: tuple[int, int, int]
    """A program for each block of voxels, block of channels and sample."""


@functools.cache  # its arithmetic takes longer than a launch
def grid_of(samples: int, channels: int, voxels: int) -> Grid:
    """Return how a map is divided.

    Args:
        samples: N.
        channels: C.
        voxels: X * Y * Z.
    """
    block_channels = min(MAX_BLOCK_CHANNELS, 1 << (channels - 1).bit_length())
    block_voxels = BLOCK_ELEMENTS // block_channels
    channel_blocks = -(-channels // block_channels)
    blocks = -(-voxels // block_voxels)
    wanted = -(-WANTED_PROGRAMS // (samples * channel_blocks))
    run = -(-blocks // wanted) * block_voxels
    runs = -(-voxels // run)
    return Grid(
        block_voxels=block_voxels,
        block_channels=block_channels,
        run=run,
        runs=runs,
        over_runs=(runs, channel_blocks, samples),
        over_blocks=(blocks, channel_blocks, samples),
    )
