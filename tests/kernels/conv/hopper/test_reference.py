"""The plain versions of the hand-written convolutions, against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.comparison import assert_same, tensor
from tests.products import each_value
from unet3d.kernels.conv.hopper import reference

NO_HALO = (None,) * 2
CHANNELS = [(3, 5), (4, 2)]
SIDES = [(1, 1), (0, 0), (0, 2), (2, 0)]
"""Planes of zeros before and behind X, which are padded."""


def maps(channels, sides):
    """Return two samples of a map, a kernel, and the gradient of the convolution."""
    inputs, outputs = channels
    x = 2 + tensor(2, inputs, 6, 4, 5)
    dy = tensor(2, outputs, 4 + sum(sides), 4, 5, seed=1)
    return x, tensor(outputs, inputs, 3, 3, 3, seed=2), dy


def affine_for(x):
    """Return any affine: a slab's statistics are those of its volume, not its own."""
    n, c = x.shape[:2]
    rstd = 0.5 + tensor(n, c, seed=5).abs()
    return tensor(c, seed=3), tensor(c, seed=4), tensor(n, c, 2, seed=6), rstd


def normalized(x, weight, bias, mean, rstd, slope):
    """Return a normalised map by the formula; weight and bias may differ between samples."""
    rows = (-1, x.shape[1], 1, 1, 1)
    y = (x - mean.sum(-1).view(rows)) * rstd.view(rows) * weight.view(rows) + bias.view(rows)
    return F.leaky_relu(y, slope)


def convolved(z, kernel, sides):
    return F.conv3d(F.pad(z, (0, 0, 0, 0, *sides)), kernel, padding=(0, 1, 1))


@each_value(channels=CHANNELS, sides=SIDES, slope=[0.01, 1.0])
def test_operations_are_those_of_a_normalised_map(channels, sides, slope):
    x, kernel, dy = maps(channels, sides)
    weight, bias, *statistics = affine = affine_for(x)
    sides = dict(zip(("before", "after"), sides, strict=True))
    # Each sample has its own affine, so that gradients are sums over the sample.
    leaves = [one.expand(2, -1).clone().requires_grad_() for one in (weight, bias)]
    z = normalized(x, *leaves, *statistics, slope)
    z.retain_grad()
    expected = convolved(z, kernel.requires_grad_(), sides.values())
    expected.backward(dy)
    kernel, of_kernel = kernel.detach(), kernel.grad

    y, moments = reference.convolve(
        x, kernel, *affine, *NO_HALO, slope=slope, **sides, moments=True
    )
    dx, sums = reference.input_gradient(dy, kernel, x, *affine, slope=slope, **sides)
    dweight = reference.weight_gradient(
        dy, x, *affine, *NO_HALO, slope=slope, before=sides["before"]
    )
    of_weight, of_bias = (leaf.grad for leaf in leaves)
    assert_same(
        [y, dx, dweight, *sums[0]], [expected.detach(), z.grad, of_kernel, of_bias, of_weight]
    )
    variance, mean = torch.var_mean(expected.detach(), (2, 3, 4), correction=0)
    count = torch.full_like(mean, y[0, 0].numel())
    assert_same([moments], [torch.stack((count, variance, mean, 0 * mean))[None]])
    assert y.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("ends", [(2, 6), (0, 4), (1, 5)], ids=str)
def test_slabs_with_planes_of_their_neighbours_are_parts_of_a_map(ends):
    whole, kernel, dy = maps((3, 5), (1, 1))
    affine, options, slab = affine_for(whole), {"slope": 0.01, "before": 1}, slice(*ends)
    halo = [
        whole[:, :, plane : plane + 1] if 0 <= plane < 6 else None
        for plane in (ends[0] - 1, ends[1])
    ]
    x, given = whole[:, :, slab], {**options, "after": 1, "moments": True}
    y, _ = reference.convolve(x, kernel, *affine, *halo, **given)
    expected, _ = reference.convolve(whole, kernel, *affine, *NO_HALO, **given)
    assert_same([y], [expected[:, :, slab]])
    # The result's gradient is 0 outside of a part, so only the map near that part counts.
    dy, around = dy[:, :, slab], torch.zeros_like(dy)
    around[:, :, slab] = dy
    dweight = reference.weight_gradient(dy, x, *affine, *halo, **options)
    assert_same([dweight], [reference.weight_gradient(around, whole, *affine, *NO_HALO, **options)])


def test_low_types_keep_their_maps_and_sum_in_float32():
    x, kernel, dy = (value.bfloat16() for value in maps((3, 5), (1, 1)))
    affine = [value.float() for value in affine_for(x)]
    sides = {"slope": 0.01, "before": 1, "after": 1}
    y, moments = reference.convolve(x, kernel, *affine, *NO_HALO, **sides, moments=True)
    dx, sums = reference.input_gradient(dy, kernel, x, *affine, **sides)
    dweight = reference.weight_gradient(dy, x, *affine, *NO_HALO, slope=0.01, before=1)
    assert {y.dtype, dx.dtype} == {torch.bfloat16}
    assert {moments.dtype, sums.dtype, dweight.dtype} == {torch.float32}
