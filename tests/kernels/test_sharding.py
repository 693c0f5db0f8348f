"""Planes that neighbouring slabs exchange."""

import torch

from unet3d.kernels.maps import empty_map, with_padding
from unet3d.kernels.sharding import _WithHalo, fill_halo, inner
from unet3d.torch_private import is_held_elsewhere


class Neighbour:
    """A slab whose neighbours send ones."""

    def exchange(self, first, last):
        return torch.ones_like(first), torch.ones_like(last)


def test_a_halo_gets_zeros_of_its_own():
    """Other slabs need not have zeros around Z, so only the planes themselves are exchanged."""
    like = torch.zeros(2, 3, 4, 5, 6)
    x = empty_map(like, pads=True, has_halo=True)
    with_padding(x).zero_()
    x.fill_(2)
    for plane in (0, -1):
        with_padding(x)[:, :, plane] = 7
    halo = fill_halo(x, Neighbour(), pads=True)
    assert all(plane.shape == (2, 5, 6, 3) for plane in halo)
    assert (inner(x) == 2).all()
    expected = torch.nn.functional.pad(torch.ones(2, 3, 2, 5, 6), (1, 1))
    around = with_padding(x)[:, :, [0, -1]]
    assert torch.equal(around, expected)


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
