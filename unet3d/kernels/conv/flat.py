"""Convolutions whose kernel has a single voxel along some axes, as across thick slices.

They are PyTorch's own, in slabs where a map is too large for it: the faster convolutions of
:mod:`unet3d.kernels.conv.api` are made for 3x3x3.
"""

from collections.abc import Sequence

from torch import Tensor

from unet3d.kernels.conv import slabs
from unet3d.kernels.halo import own_planes
from unet3d.kernels.sharding import x_padding


def flat_conv(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Convolve with zero padding, so that with stride 1 the size of a whole volume stays.

    Args:
        x: (N, I, X, Y, Z); a slab with its halo.
        weight: (O, I, kernel) with 1 or 3 voxels along each axis; autocast may lower it.
        stride: Along X, Y, Z; 1 where the kernel has one voxel.

    Returns:
        (N, O, X', Y', Z'), of a slab its own planes.
    """
    along_x, *in_plane = weight.shape[2:]
    y, z = (taps // 2 for taps in in_plane)
    if along_x == 1:  # nothing of the neighbours' planes is read
        return slabs.convolve(own_planes(x), weight, stride, (0, y, z))
    return slabs.convolve(x, weight, stride, (x_padding(), y, z))
