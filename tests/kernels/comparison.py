"""Feature maps, and comparisons of an operation on them with the expected results."""

from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from unet3d.kernels.conv.folded import pad_z
from unet3d.kernels.maps import detached, mark_padded
from unet3d.kernels.sharding import sharded

LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]


def tensor(*shape, seed=0):
    """Return noise in float64; with five axes it is a map, in channels-last memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return channels_last(x) if len(shape) == 5 else x


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last_3d)


def padded(x):
    """Return a copy of a map, stored with zeros around Z."""
    return mark_padded(pad_z(x, 1, 1)[..., 1:-1])


def between():
    """Compute on a slab with its halo, between two other slabs; no messages are sent."""
    return sharded(SimpleNamespace(index=1, count=3, of_largest=lambda number: number))


def in_slabs(function, x, bounds):
    """Apply a function to slabs of a map with their halos, and join the results."""
    around = F.pad(x, (0, 0, 0, 0, 1, 1))
    with between():
        return torch.cat([function(around[:, :, a : b + 2]) for a, b in pairwise(bounds)], 2)


def results(function, values, dy=None):
    """Return the value of a function, and its gradients with respect to all arguments.

    The function must not overwrite its arguments, which keep their marks of zeros around Z. ``dy``
    is noise by default.
    """
    leaves = [detached(value).requires_grad_() for value in values]
    y = function(*leaves)
    dy = tensor(*y.shape, seed=9).to(y) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_same(actual, expected, tolerance=1e-11):
    """Compare a value and its gradients, all in float64, element by element."""
    torch.testing.assert_close(list(actual), list(expected), rtol=tolerance, atol=tolerance)


def assert_near(actual, expected, tolerance):
    """Compare a value and its gradients with float64 ones, by the norm of each difference."""
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        error = (a.detach().cpu().double() - b.detach().cpu()).norm() / b.detach().norm().cpu()
        assert error <= tolerance, f"{number}: {error:.1e}"
