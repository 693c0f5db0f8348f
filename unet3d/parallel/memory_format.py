"""The memory format of a network's weights and features: decided here, from measurements.

A whole network has one, so that no map is copied from one to the other inside it: what a
convolution makes has the format of its weights.

* GPU, 16 bits: channels-last, which tensor cores read. Float32: channels-first, cuDNN's default.
* CPU with oneDNN, up to float32: channels-last, at every width. On two cores with AVX512-BF16, a
  step of 32 to 320 channels at 96^3 takes 0.85 of the time that it takes channels-first in bfloat16
  and 0.81 in float32; one of 4 and 8 channels at 64^3 0.44 and 0.64 (docs/benchmarks.md).
* CPU, float64, or without oneDNN: channels-first, which PyTorch's own convolutions unfold.
"""

import torch
from torch import Tensor

from unet3d.memory.fake_devices import is_gpu


def memory_format(device: torch.device, dtype: torch.dtype) -> torch.memory_format:
    """Return the format that is fastest for convolutions of a type on a device."""
    if is_gpu(device):
        is_last = dtype in (torch.bfloat16, torch.float16)
    else:
        is_last = dtype != torch.float64 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return torch.channels_last_3d if is_last else torch.contiguous_format


def laid_out(tensor: Tensor, format_: torch.memory_format) -> Tensor:
    """Return a map or a kernel in a format, and anything else as it is."""
    return tensor.contiguous(memory_format=format_) if tensor.dim() == 5 else tensor
