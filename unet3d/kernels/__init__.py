"""Operations that are slow in PyTorch, each with a plain reference and a fast version."""

from unet3d.kernels.affine.api import sample_affine
from unet3d.kernels.affine.boxes import Boxes
from unet3d.kernels.conv.api import (
    conv1x1x1,
    conv3x3x3,
    flat_conv,
    strided_conv3x3x3,
    sum_with_conv3x3x3,
    upsample,
    upsample_with_halo,
    upsampled_conv3x3x3,
)
from unet3d.kernels.conv.border import add_border
from unet3d.kernels.conv.hopper.api import CHANNELS as CHANNELS_BY_HAND
from unet3d.kernels.conv.hopper.api import are_on as convolves_by_hand
from unet3d.kernels.conv.slabs import convolve
from unet3d.kernels.loss_sums import dice_ce_sums, region_sums
from unet3d.kernels.norm.api import instance_norm, sum_of
from unet3d.kernels.norm.head import instance_norm_head
from unet3d.kernels.norm.stem import conv3x3x3_instance_norm
from unet3d.kernels.recompute import is_recomputed, kept_for, recomputed_in_backward
from unet3d.kernels.reductions import average_pool, strongest_class, written_regions
from unet3d.kernels.sharding import own_planes, with_halo

__all__ = [
    "CHANNELS_BY_HAND",
    "Boxes",
    "add_border",
    "average_pool",
    "conv1x1x1",
    "conv3x3x3",
    "conv3x3x3_instance_norm",
    "convolve",
    "convolves_by_hand",
    "flat_conv",
    "instance_norm",
    "instance_norm_head",
    "is_recomputed",
    "kept_for",
    "dice_ce_sums",
    "own_planes",
    "recomputed_in_backward",
    "region_sums",
    "sample_affine",
    "strided_conv3x3x3",
    "strongest_class",
    "sum_of",
    "sum_with_conv3x3x3",
    "upsample",
    "upsample_with_halo",
    "upsampled_conv3x3x3",
    "with_halo",
    "written_regions",
]
