"""The stages of an instance normalisation, as PyTorch operations that Triton runs on a GPU.

Forward they are moments, merge and normalize; backward sums, total and gradient. The data between
stages are small, so parts of a volume, such as slabs on several devices, do the first stage
separately, exchange the results, and do the last stage with the statistics of the whole volume.
Fake versions are here, plain ones in :mod:`unet3d.kernels.norm.reference`::

    moments      (P, 2 + M, N, C) of a map in P parts of any sizes: the number of voxels, the
                 variance (biased), and M numbers whose sum is the mean
    sum_moments  adds a map to x in x's memory, and returns the moments of the sum
    merge        from the moments of all parts: the mean (N, C, M), 1 / deviation (N, C), and the
                 merged moments (1, 2 + M, N, C), which devices exchange
    normalize    writes x normalised, with LeakyReLU, to a map, or to planes of a larger one
    sums         (P, 2, N, C): the sums of g, the gradient before LeakyReLU, and of g * normalised
    total        (R, N, C): the sums (P, R, N, C) added up over all parts; added up over N, the
                 first two are the gradients of bias and weight
    gradient     (N, C, X, Y, Z), from the total of the volume; with the matrix (K, C) of a head,
                 dy is the gradient of its logits

Values per sample and channel are float32 at least. Several stages take an ``affine``: the weight
(C,), the bias (C,), the mean and 1 / deviation of the volume. A ``slope`` of 1 leaves LeakyReLU
out, and with ``pads`` the result is stored with zeros around Z (:mod:`unet3d.kernels.maps`). Maps
are channels-last here, and x may have room around Z.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.kernels.maps import empty_map
from unet3d.kernels.operations import operation

BLOCK_ELEMENTS = 4096
"""Elements of the matrix that a program holds at a time: 32 per thread with 4 warps."""
MAX_BLOCK_CHANNELS = 64
WANTED_PROGRAMS = 528
"""Four programs of eight warps for each of an H200's 132 multiprocessors, as many as run there at a
time. With 1056 programs the statistics of 256 channels at 16 x 32 x 32 take 24 us instead of 15;
with 264 programs, the statistics of 32 channels at 256^3 take 50 % longer."""


class Grid(NamedTuple):
    """Division of a map's matrix of voxels by channels among a GPU's programs."""

    block_voxels: int
    """Voxels of a block."""
    block_channels: int
    """Channels of a block, a power of two."""
    run: int
    """Voxels of a run, which one program sums up."""
    runs: int
    """Runs of a sample; the last may be shorter."""
    over_runs: tuple[int, int, int]
    """Launch grid with a program for each run, block of channels and sample."""
    over_blocks: tuple[int, int, int]
    """Launch grid with a program for each block of voxels, block of channels and sample."""


@functools.cache  # its arithmetic takes longer than a launch
def grid_of(samples: int, channels: int, voxels: int) -> Grid:
    """Return the division of a map, from its sizes."""
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


def per_run(x: Tensor, numbers: int) -> Tensor:
    """Return memory for ``numbers`` values per run, sample and channel of a map."""
    n, c, *space = x.shape
    runs = grid_of(n, c, space[0] * space[1] * space[2]).runs
    return x.new_empty((runs, numbers, n, c), dtype=torch.float32)


def merged_memory(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the results of :data:`merge`."""
    _, numbers, n, c = moments.shape
    new = moments.new_empty
    return new((n, c, 2)), new((n, c)), new((1, numbers, n, c))


_AFFINE = "Tensor weight, Tensor bias, Tensor mean, Tensor rstd"

moments = operation(
    "norm_moments", "(Tensor x) -> Tensor", "norm.launch.moments", lambda x: per_run(x, 4)
)
sum_moments = operation(
    "norm_sum_moments",
    "(Tensor(a!) x, Tensor added) -> Tensor",
    "norm.launch.moments",
    lambda x, added: per_run(x, 4),
)
merge = operation(
    "norm_merge",
    "(Tensor moments, int voxels, float eps) -> (Tensor, Tensor, Tensor)",
    "norm.launch.merge",
    lambda moments, voxels, eps: merged_memory(moments),
)
normalize = operation(
    "norm_normalize",
    f"(Tensor(a!) y, Tensor x, {_AFFINE}, *, float slope, bool pads) -> ()",
    "norm.launch.normalize",
    lambda y, x, *affine, slope, pads: None,
)
sums = operation(
    "norm_sums",
    f"(Tensor dy, Tensor x, {_AFFINE}, *, float slope) -> Tensor",
    "norm.launch.sums",
    lambda dy, x, *affine, slope: per_run(x, 2),
)
total = operation(
    "norm_total",
    "(Tensor sums) -> Tensor",
    "norm.launch.total",
    lambda sums: sums.new_empty(sums.shape[1:]),
)
gradient = operation(
    "norm_gradient",
    f"(Tensor dy, Tensor x, {_AFFINE}, Tensor? head=None, *, Tensor total, int voxels,"
    " float slope, bool pads) -> Tensor",
    "norm.launch.gradient",
    lambda dy, x, *affine, total, voxels, slope, pads: empty_map(x, pads),
)
