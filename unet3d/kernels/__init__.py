"""Operations that PyTorch is slow at: one plain reference and one fast version of each."""

from unet3d.kernels.convolution import conv1x1x1, conv3x3x3, strided_conv3x3x3, upsample
from unet3d.kernels.norm import instance_norm
from unet3d.kernels.overlap import overlap
from unet3d.kernels.padding import was_folded
from unet3d.kernels.remake import kept_for, remade_in_backward
from unet3d.kernels.slabs import convolve

__all__ = [
    "conv1x1x1",
    "conv3x3x3",
    "convolve",
    "instance_norm",
    "kept_for",
    "overlap",
    "remade_in_backward",
    "strided_conv3x3x3",
    "upsample",
    "was_folded",
]
