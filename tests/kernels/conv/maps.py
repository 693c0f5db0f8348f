"""Feature maps and weights for the tests of the convolutions."""

import torch
from torch import Tensor


def tensor(*shape: int, seed: int = 0) -> Tensor:
    """Return noise in float64; a map, of five axes, with its channels last in memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.contiguous(memory_format=torch.channels_last_3d) if len(shape) == 5 else x
