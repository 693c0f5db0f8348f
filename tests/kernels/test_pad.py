from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import LAYOUTS
from unet3d.kernels.conv.folded import pad_z


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 1), (2, 0), (0, 0)])
@pytest.mark.parametrize(
    "shape", [(2, 8, 3, 4, 6), (1, 70, 2, 3, 5), (1, 1, 4, 4, 1), (1, 64, 20, 20, 33)], ids=str
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_planes_of_zeros_are_added(device, shape, before, after):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    torch.empty(2 * noise.numel(), device=device).fill_(7)  # memory that the allocator gives back
    for layout, dtype in product(LAYOUTS, (torch.float32, torch.bfloat16)):
        x = noise.to(dtype, memory_format=layout)
        made = pad_z(x, before, after)
        assert torch.equal(made, F.pad(x, (before, after)))
        assert made.is_contiguous(memory_format=torch.channels_last_3d)
        with FakeTensorMode():
            fake = pad_z(torch.empty(shape, dtype=dtype, device=device), before, after)
        assert (fake.shape, fake.stride(), fake.dtype) == (made.shape, made.stride(), dtype)
