"""Convolutions that are faster than cuDNN's where channels are few.

Each function here picks the fastest way for its arguments: convolutions written by hand
(:mod:`unet3d.kernels.conv.hopper.api`), two voxels computed as one
(:mod:`unet3d.kernels.conv.folded`), Triton for an image of few channels
(:mod:`unet3d.kernels.conv.stem_kernel`), slabs for maps that are too large for cuDNN, or that are
small and in float32 on a CPU (:mod:`unet3d.kernels.conv.slabs`), and PyTorch's own operation for
everything else. The results are equal up to rounding.

A slab of a volume along X includes its neighbours' planes, or zeros where the volume ends
(:mod:`unet3d.kernels.sharding`), so a convolution does not pad it along X.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels.conv import slabs
from unet3d.kernels.conv.folded import (
    ComposedUpsampling,
    FoldedConvolution,
    StridedConvolution,
    composed_kernel,
    strides_in_pairs,
)
from unet3d.kernels.conv.hopper import api as hopper
from unet3d.kernels.conv.stem_op import stem
from unet3d.kernels.maps import (
    MAX_CHANNELS,
    can_fold,
    deferred_of,
    is_laid_out,
    is_padded,
    mark_folded,
)
from unet3d.kernels.recompute import kept_for, offer, recomputing
from unet3d.kernels.sharding import own_planes, x_padding
from unet3d.kernels.triton_support import triton_available
from unet3d.memory.fake_devices import is_gpu

MAX_HEAD_COLUMNS = 128
"""Most outputs of eight voxels together; with more, too much of the matrix is zero."""

MIN_COMPOSED_ELEMENTS = 2**20
"""Smaller maps are upsampled and convolved separately: the normalisation's kernels do not suit
them."""
MIN_COMPOSED_VOXELS = 512
"""Fewest voxels of the result per input channel: below, making the kernel takes longer than it
saves."""
MIN_COMPOSED_VOXELS_CPU = 256
"""The same limit on a CPU, where making the kernel takes as long as computing 130 voxels per
channel."""

MAX_STEM_ROWS = 128
"""Largest product of the number of a voxel's neighbours and the number of image channels."""
MAX_STEM_CHANNELS = 64

_PLAIN = (1, 1, 1)
_NONE = (0, 0, 0)


def conv3x3x3(x: Tensor, weight: Tensor, *, moments: bool = False) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, 3, 3, 3), with stride 1 and zeros around.

    So a whole volume keeps its size, and a slab loses its halo. With ``moments``, the result is
    marked with its moments, for the normalisation that reads it, if the kernel gets them for free.
    """
    if is_stem(x, weight):
        x = x.to(slabs.lowered(x))
        y: Tensor = stem(x, weight.to(x.dtype), x_padding())
        return y
    # Only these convolutions normalise a deferred map, which has no halo yet.
    if deferred_of(x) is not None:
        return hopper.convolve(x, weight, 1, moments)
    if hopper.suits(x, x.shape[1], weight.shape[0]):
        return hopper.convolve(x, weight, x_padding(), moments)
    if max(weight.shape[:2]) <= MAX_CHANNELS and can_fold(x, min(weight.shape[:2])):
        y = FoldedConvolution.apply(x, weight.to(x.dtype), x_padding())  # type: ignore[no-untyped-call]
        return mark_folded(y)
    return slabs.convolve(x, weight, _PLAIN, (x_padding(), 1, 1))


def sum_with_conv3x3x3(y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Convolve x as :func:`conv3x3x3` does, and add it to a result y, which is overwritten.

    Returns ``x`` and ``added`` of a normalisation (:func:`unet3d.kernels.instance_norm`): the sum
    and None, or both terms if no kernel adds while it convolves.
    """
    suits = hopper.suits(x, *reversed(weight.shape[:2]))
    if suits and x.dtype == y.dtype and is_laid_out(y):
        return hopper.add_convolution(y, x, weight, x_padding()), None
    return y, conv3x3x3(x, weight)


def strided_conv3x3x3(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, 3, 3, 3), strides along X, Y, Z and zeros around."""
    folds = can_fold(x, min(weight.shape[:2])) and strides_in_pairs(x.shape, weight, stride)
    if folds or is_padded(x):
        given = (x, weight.to(x.dtype), tuple(stride), x_padding())
        y: Tensor = StridedConvolution.apply(*given)  # type: ignore[no-untyped-call]
        return y
    return slabs.convolve(x, weight, stride, (x_padding(), 1, 1))


def flat_conv(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Convolve with a kernel of one voxel along some axes, such as across thick slices.

    A slab must include its halo; the result has only its own planes.
    """
    along_x, *in_plane = weight.shape[2:]
    y, z = (taps // 2 for taps in in_plane)
    if along_x == 1:  # the neighbours' planes are not read
        return slabs.convolve(own_planes(x), weight, stride, (0, y, z))
    return slabs.convolve(x, weight, stride, (x_padding(), y, z))


def upsampled_conv3x3x3(x: Tensor, up: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Upsample each voxel to a block with (I, C, *stride), then convolve as :func:`conv3x3x3` does.

    For a large map, both are one transposed convolution, with a kernel that is composed of both
    weights (:class:`~unet3d.kernels.conv.folded.ComposedUpsampling`); composing takes little time.
    Values and gradients are equal up to rounding. A neighbour's plane in x (N, I, X, Y, Z) is read
    but not upsampled. The result may be stored with room around Z (:mod:`unet3d.kernels.maps`).
    """
    if _composes(x, up, weight):
        x = x.to(slabs.lowered(x))
        kernel = composed_kernel(up, weight).to(x.dtype)
        # Result planes that only a neighbour's plane reaches are left out.
        left_out = 1 + (1 - x_padding()) * stride[0]
        if _is_cpu(x):
            return slabs.upsample(x, kernel, stride, (left_out, 1, 1))
        y: Tensor = ComposedUpsampling.apply(x, kernel, tuple(stride), left_out)  # type: ignore[no-untyped-call]
        return mark_folded(y) if weight.shape[0] <= MAX_CHANNELS else y
    return conv3x3x3(upsample_with_halo(x, up, stride), weight)


def upsample_with_halo(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Upsample a slab with its halo, and cut the result's halo to the planes next to the slab."""
    full = upsample(x, weight, stride)
    left_out = (1 - x_padding()) * (stride[0] - 1)
    return full.narrow(2, left_out, full.shape[2] - 2 * left_out) if left_out else full


def upsample(x: Tensor, weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Upsample each voxel of (N, I, X, Y, Z) to a block, with a kernel (I, O, *stride).

    Inside :mod:`unet3d.kernels.recompute`'s context, backward recomputes the result: that takes a
    few percent of the time of the convolution that reads it, and saves half of its memory.
    """
    y = slabs.upsample(x, weight, stride)
    input_again, weight, dtype = recomputing(x), weight.detach(), y.dtype

    def recompute() -> Tensor:
        # Autocast lowered them in forward, but is not active in backward.
        return slabs.upsample(input_again().to(dtype), weight.to(dtype), stride)

    offer(y, recompute, kept_for(x))
    return y


def conv1x1x1(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Mix the channels of each voxel of (N, I, X, Y, Z), for few outputs.

    cuDNN pads the outputs to a multiple of eight; here eight voxels along Z are multiplied as one
    with a block-diagonal matrix. Measured on an H100 at 256^3 from 32 to 3 channels, forward and
    backward: 1.4 ms instead of 6.6.
    """
    together = 8
    outputs, inputs = weight.shape[:2]
    n, _, i, j, k = x.shape
    is_worth_it = outputs * together <= MAX_HEAD_COLUMNS and k % together == 0
    is_one_call = slabs.is_one_call(x, weight, _PLAIN, _NONE)
    if not (is_worth_it and is_one_call and can_fold(x, inputs)):
        if is_one_call:
            return F.conv3d(x, weight, bias)
        return slabs.convolve(x, weight, _PLAIN, _NONE).add_(bias.view(1, -1, 1, 1, 1))
    one = torch.eye(together, dtype=weight.dtype, device=weight.device)
    matrix = torch.kron(one, weight.reshape(outputs, inputs))
    folded = x.permute(0, 2, 3, 4, 1).reshape(n, i, j, k // together, together * inputs)
    y = F.linear(folded.flatten(0, 3), matrix, bias.repeat(together))
    return y.reshape(n, i, j, k, outputs).permute(0, 4, 1, 2, 3)


def is_stem(x: Tensor, weight: Tensor) -> bool:
    """Return whether x is an image (few channels, no gradient), which Triton convolves."""
    return (
        is_gpu(x.device)
        and 27 * x.shape[1] <= MAX_STEM_ROWS
        and weight.shape[0] <= MAX_STEM_CHANNELS
        and math.prod(x.shape[1:]) <= slabs.MAX_ELEMENTS
        and slabs.lowered(x) in (torch.bfloat16, torch.float16)
        and not x.requires_grad
        and triton_available(x)
    )


def _composes(x: Tensor, up: Tensor, weight: Tensor) -> bool:
    """Return whether upsampling and the next convolution should be composed.

    On the meta device, where operations are only counted, a 16-bit type stands for a GPU. On a CPU
    the composed kernel must have four voxels along Y and Z: then PyTorch always uses oneDNN.
    """
    stride, outputs = up.shape[2:], weight.shape[0]
    voxels = len(x) * math.prod(x.shape[2:]) * math.prod(stride)
    if _is_cpu(x):
        return tuple(stride[1:]) == (2, 2) and voxels >= MIN_COMPOSED_VOXELS_CPU * x.shape[1]
    return (
        (is_gpu(x.device) or x.is_meta)
        and stride[2] == 2
        and outputs >= 8
        and slabs.lowered(x) in (torch.bfloat16, torch.float16)
        and voxels >= MIN_COMPOSED_VOXELS * x.shape[1]
        and voxels * outputs >= MIN_COMPOSED_ELEMENTS
    )


def _is_cpu(x: Tensor) -> bool:
    """Return whether a map is on a CPU, and not on a fake GPU or the meta device."""
    return not is_gpu(x.device) and not x.is_meta
