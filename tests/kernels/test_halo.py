"""Planes that neighbouring slabs exchange."""

import torch

from unet3d.kernels.halo import _WithHalo


class Neighbour:
    """A slab whose neighbours tell it ones."""

    def exchange(self, first, last):
        return torch.ones_like(first), torch.ones_like(last)


def test_a_gradient_that_two_maps_share_is_not_overwritten():
    maps = [torch.zeros(1, 2, 4, 3, 3, requires_grad=True) for _ in range(2)]
    extended = [_WithHalo.apply(one, Neighbour()) for one in maps]
    gradient = torch.full((1, 2, 6, 3, 3), 2.0).to(memory_format=torch.channels_last_3d)
    (extended[0] + extended[1]).backward(gradient)
    expected = torch.full((1, 2, 4, 3, 3), 2.0)
    expected[:, :, [0, -1]] += 1  # once, in each of them
    for one in maps:
        assert torch.equal(one.grad, expected)
