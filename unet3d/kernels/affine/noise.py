"""Gaussian noise without a generator: a function of a voxel's index and a seed.

So any part of a patch can be made alone, on any device, with the same noise;
:mod:`unet3d.kernels.affine.kernel` has the same formulas.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unet3d.kernels.affine.plain import Voxel

CHUNK_VOXELS = 2**21
"""Voxels whose noise is made at a time; each takes several numbers in memory."""


@contextmanager
def independent_of_threads(device: torch.device) -> Iterator[None]:
    """Compute in one thread on a CPU, so that bits do not depend on the number of threads.

    The division over threads changes trailing bits of matrix products, of full reductions, and of
    powers, because the last voxels of each thread run through different code. A loading process has
    one thread, the training process several, and both must make the same batches.
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


def add_noise(
    channel: Tensor, std: float, start: Voxel, size: Voxel, seed: tuple[int, int]
) -> None:
    """Add Gaussian noise to a box (X, Y, Z) of a channel, which begins at a voxel of the patch."""
    x, y, z = channel.shape
    planes = max(1, CHUNK_VOXELS // (y * z))
    for first in range(0, x, planes):
        part = channel[first : first + planes]
        at = (start[0] + first, start[1], start[2])
        noise = gaussian_noise(at, (len(part), y, z), size, seed, channel.device)
        part.add_(noise, alpha=std)


def gaussian_noise(
    start: Voxel, shape: Voxel, size: Voxel, seed: tuple[int, int], device: torch.device
) -> Tensor:
    """Return independent normally distributed numbers with deviation 1 for a box of a patch.

    The hash is "lowbias32" (Wellons, Hash Prospector, 2018), applied to the index of a voxel in the
    patch, and again to its own result, each time with a key. The Box-Muller transform turns both
    hashes into one number. A seed is two numbers below 2^32.
    """
    x, y, z = (
        torch.arange(first, first + length, dtype=torch.int32, device=device)
        for first, length in zip(start, shape, strict=True)
    )
    # Beyond 2^31 voxels the index wraps around; the hash takes any 32 bits.
    index = ((x[:, None] * size[1] + y)[:, :, None] * size[2]).add(z)
    first = _hash(index.bitwise_xor_(_signed(seed[0])))
    radius = _uniform(first).log_().mul_(-2).sqrt_()
    second = _hash(first.add_(_signed(seed[1])))
    return radius.mul_(_uniform(second).mul_(2 * math.pi).cos_())


def _hash(bits: Tensor) -> Tensor:
    """Mix the bits of 32-bit numbers, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        # Shifting a signed number copies the sign bit, which has to be masked.
        bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        if factor != 1:
            bits *= _signed(factor)
    return bits


def _uniform(bits: Tensor) -> Tensor:
    """Return the middle of one of 2^23 intervals of (0, 1) for each 32-bit number."""
    return (bits >> 9).bitwise_and_(2**23 - 1).float().add_(0.5).mul_(2.0**-23)


def _signed(number: int) -> int:
    """Return the signed 32-bit number with the same bits."""
    return number - 2**32 if number >= 2**31 else number
