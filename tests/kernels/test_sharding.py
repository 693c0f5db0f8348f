"""Planes that neighbouring slabs exchange."""

import pytest
import torch

from unet3d.kernels.maps import with_padding
from unet3d.kernels.norm import op
from unet3d.kernels.norm.volume import VolumeNorm
from unet3d.kernels.sharding import _WithHalo, inner
from unet3d.torch_private import is_held_elsewhere


class Neighbour:
    """A slab whose neighbours send ones."""

    def exchange(self, first, last):
        return torch.ones_like(first), torch.ones_like(last)


@pytest.mark.gpu
def test_a_halo_is_normalised_and_gets_zeros_of_its_own():
    """Other slabs need not have zeros around Z, so only the planes themselves are exchanged."""
    like = torch.randn(2, 16, 8, 32, 32, device="cuda", dtype=torch.bfloat16)
    x = like.contiguous(memory_format=torch.channels_last_3d)
    norm = VolumeNorm(stages=op, eps=0.0, slope=0.5, shard=None, halo_of=Neighbour(), pads=True)
    weight, bias = torch.full((16,), 3.0, device="cuda"), torch.full((16,), -1.0, device="cuda")
    mean, rstd = torch.zeros(2, 16, 2, device="cuda"), torch.full((2, 16), 2.0, device="cuda")
    made, halo = norm.normalized(x, weight, bias, mean, rstd)
    assert [plane.shape for plane in halo] == [(2, 16, 1, 32, 32)] * 2
    around = with_padding(made)[:, :, [0, -1]].float()
    expected = torch.nn.functional.pad(torch.full((2, 16, 2, 32, 32), 5.0), (1, 1))
    assert torch.equal(around.cpu(), expected)
    whole = norm._replace(halo_of=None).normalized(x, weight, bias, mean, rstd)[0]
    assert torch.equal(inner(made), whole)


def test_a_gradient_that_two_maps_share_is_not_overwritten():
    maps = [torch.zeros(1, 2, 4, 3, 3, requires_grad=True) for _ in range(2)]
    extended = [_WithHalo.apply(one, Neighbour()) for one in maps]
    gradient = torch.full((1, 2, 6, 3, 3), 2.0).to(memory_format=torch.channels_last_3d)
    (extended[0] + extended[1]).backward(gradient)
    expected = torch.full((1, 2, 4, 3, 3), 2.0)
    expected[:, :, [0, -1]] += 1  # once for each map
    for one in maps:
        assert torch.equal(one.grad, expected)


class Asking(torch.autograd.Function):
    """Records in backward whether its gradient is held elsewhere, too."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(is_held_elsewhere(gradient))
        return gradient, None


def test_a_gradient_that_nobody_else_has_is_not_copied():
    """In all supported versions of PyTorch; a copy would be as large as the map."""
    x, seen = torch.ones(3, requires_grad=True), []
    (Asking.apply(x, seen) * 2).sum().backward()
    assert seen == [False]
    (Asking.apply(x, seen) + Asking.apply(x * 2, seen)).sin().sum().backward()
    assert seen[1:] == [True, False]  # only the last holder has it alone
