"""Operations that PyTorch is slow at: one plain reference and one Triton version of each."""

from unet3d.kernels.norm import instance_norm

__all__ = ["instance_norm"]
