import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.kernels.pad import pad_z

SHAPES = [(2, 8, 3, 4, 6), (1, 70, 2, 3, 5), (1, 1, 4, 4, 1)]


def volume(shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    return x.contiguous(memory_format=torch.channels_last_3d)


def check(x: Tensor, before: int, after: int) -> None:
    made = pad_z(x, before, after)
    assert torch.equal(made, F.pad(x, (before, after)))
    assert made.is_contiguous(memory_format=torch.channels_last_3d)
    with FakeTensorMode():
        fake = pad_z(torch.empty(x.shape, dtype=x.dtype, device=x.device), before, after)
    assert (fake.shape, fake.stride(), fake.dtype) == (made.shape, made.stride(), made.dtype)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 1), (2, 0), (0, 0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_planes_of_zeros_are_added(shape, before, after):
    check(volume(shape), before, after)


@pytest.mark.gpu
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 1), (2, 0)])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 64, 40, 40, 33)], ids=str)
def test_planes_of_zeros_are_added_on_a_gpu(shape, before, after):
    x = volume(shape, "cuda")
    torch.empty(2 * x.numel(), device="cuda").fill_(7)  # what the allocator gives back
    for layout in (torch.channels_last_3d, torch.contiguous_format):
        check(x.contiguous(memory_format=layout), before, after)
    check(x.bfloat16(), before, after)
