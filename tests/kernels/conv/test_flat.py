"""Convolutions with kernels of one voxel along some axes: as exact as PyTorch's own."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.comparison import assert_near, assert_same, between, results, tensor
from unet3d.kernels import flat_conv, recomputed_in_backward
from unet3d.kernels import recompute as recomputing
from unet3d.kernels.conv import cpu, slabs
from unet3d.kernels.sharding import inner

KERNELS = [kernel for kernel in product((1, 3), repeat=3) if kernel != (1, 1, 1)]


def plain(x, weight, stride):
    i, j, k = (taps // 2 for taps in weight.shape[2:])
    return F.conv3d(x, weight, None, stride, (i, j, k))


def strides_of(kernel):
    i, j, k = (2 if taps == 3 else 1 for taps in kernel)
    return [(1, 1, 1), (i, j, k)]


@pytest.mark.parametrize("limit", [100, 400, 10**9])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_values_and_gradients(kernel, limit, monkeypatch):
    """As a whole and in slabs, which read planes beside them only if the kernel does."""
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    for stride, samples in product(strides_of(kernel), (1, 2)):
        values = [tensor(samples, 3, 8, 5, 6), tensor(4, 3, *kernel, seed=1)]
        expected = results(lambda x, w, s=stride: plain(x, w, s), values)
        assert_same(results(lambda x, w, s=stride: flat_conv(x, w, s), values), expected, 1e-12)
        low = [value.float() for value in values]
        # With a single sample, float32 has its own code.
        assert cpu.is_slow(*low, stride) == (samples == 1 and torch.backends.mkldnn.is_available())
        assert_near(results(lambda x, w, s=stride: flat_conv(x, w, s), low), expected, 2e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_slab_with_its_halo_is_convolved_to_its_own_planes(kernel):
    whole, weight = tensor(2, 3, 12, 5, 6), tensor(4, 3, *kernel, seed=1)
    for stride in strides_of(kernel):
        step = stride[0]
        with between():
            made = flat_conv(whole[:, :, 3:9], weight, stride)  # planes 4 to 7 and their neighbours
        expected = plain(whole, weight, stride)[:, :, 4 // step : 8 // step]
        assert_same([made], [expected], 1e-12)


def test_what_is_recomputed_is_not_kept_for_a_slab(monkeypatch):
    """Also if a kernel of one plane along X reads only a part of the map."""
    monkeypatch.setattr(recomputing, "MIN_ELEMENTS", 0)
    source, weight = tensor(1, 3, 6, 4, 4), tensor(4, 3, 1, 3, 3, seed=1).requires_grad_()
    times = 0

    def again():
        nonlocal times
        times += 1
        return 2 * source

    with between(), recomputed_in_backward():
        x = 2 * source
        recomputing.offer(x, again, source)
        y = flat_conv(x, weight, (1, 1, 1))
        x.zero_()  # its values are not needed any more
    (gradient,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert times == 1
    expected = plain(inner(2 * source), weight, (1, 1, 1)).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0])
