"""The effect of a bias of the upsampling at the border, against a convolution with the bias."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import LAYOUTS, assert_near, assert_same, padded, tensor
from tests.kernels.comparison import results as results_of
from tests.products import each_value
from unet3d.kernels import add_border
from unet3d.kernels.maps import is_padded, mark_folded, was_folded
from unet3d.kernels.sharding import sharded

SIZES = [(5, 4, 6), (3, 3, 3), (2, 2, 2), (2, 5, 3), (1, 4, 5), (4, 1, 2), (3, 2, 1), (1, 1, 4)]
SIZES.append((1, 1, 1))
KERNELS = [(3, 3, 3), (1, 3, 3), (3, 1, 3), (3, 3, 1), (1, 1, 3), (1, 1, 1)]


def padding_of(weight):
    return tuple(taps // 2 for taps in weight.shape[2:])


def values(size, kernel, num_samples=2):
    """Return a map, a convolution's weight and a bias before it."""
    x = tensor(num_samples, 3, *size)
    return x, tensor(5, 3, *kernel, seed=1), tensor(3, seed=2)


def with_border(x, weight, bias):
    return add_border(F.conv3d(x, weight, padding=padding_of(weight)), weight, bias)


def plain(x, weight, bias):
    return F.conv3d(x + bias.view(-1, 1, 1, 1), weight, padding=padding_of(weight))


def centred(y):
    """Return a result without its mean per channel, as an instance normalisation removes it."""
    return y - y.mean((2, 3, 4), keepdim=True)


def results(function, given):
    return results_of(lambda *values: centred(function(*values)), given)


@each_value(size=SIZES, kernel=KERNELS, memory=LAYOUTS)
def test_it_is_the_bias_but_for_a_constant(size, kernel, memory):
    x, weight, bias = values(size, kernel)
    given = x.contiguous(memory_format=memory), weight.contiguous(memory_format=memory), bias
    assert_same(results(with_border, given), results(plain, given))


def test_a_map_with_room_around_keeps_it_and_its_mark_and_nothing_is_added_inside():
    x, weight, bias = values((4, 3, 4), (3, 3, 3))
    whole = torch.zeros(2, 4, 3, 6, 5, dtype=torch.float64)
    y = whole.permute(0, 4, 1, 2, 3)[..., 1:-1]
    y.copy_(F.conv3d(x, weight, padding=1))
    before = y.clone()
    made = add_border(mark_folded(y), weight, bias)
    assert was_folded(made) and made.stride() == y.stride()
    assert made.data_ptr() == y.data_ptr()  # in place
    torch.testing.assert_close(centred(made), centred(plain(x, weight, bias)))
    assert not whole[:, :, :, (0, -1)].any()
    inside = (..., *[slice(1, -1)] * 3)
    assert torch.equal(made[inside], before[inside])
    is_other = (made != before).all(0).all(0)
    is_other[inside] = True
    assert is_other.all()


def test_a_gradient_with_zeros_around_reaches_the_convolution_as_it_is():
    seen = []
    y, weight, bias = tensor(1, 5, 4, 3, 2), *values((4, 3, 2), (3, 3, 3))[1:]
    convolved = y.requires_grad_().clone()
    convolved.register_hook(lambda dy: seen.append(is_padded(dy)))
    made = add_border(convolved, weight.requires_grad_(), bias)
    torch.autograd.grad(made, y, padded(tensor(*y.shape, seed=9)))
    assert seen == [True]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("bounds", [(0, 3, 5), (0, 2, 4, 7), (0, 1, 2, 3), (0, 1, 2), (0, 4)])
def test_slabs_have_the_border_of_the_volume(bounds, kernel):
    slabs = list(zip(bounds[:-1], bounds[1:], strict=True))

    def in_slabs(x, weight, bias):
        y = F.conv3d(x, weight, padding=padding_of(weight))
        parts = []
        for index, (start, stop) in enumerate(slabs):
            with sharded(SimpleNamespace(index=index, count=len(slabs))):
                parts.append(add_border(y[:, :, start:stop].clone(), weight, bias))
        return torch.cat(parts, 2)

    given = values((bounds[-1], 3, 4), kernel)
    assert_same(results(in_slabs, given), results(plain, given))
    # An inner slab has a gradient of the bias, too: ranks exchange the gradients of all parameters.
    x, weight, bias = given
    bias.requires_grad_()
    with sharded(SimpleNamespace(index=1, count=3)):
        y = with_border(x, weight[..., :1, :1], bias)
    assert not torch.autograd.grad(y.sum(), bias)[0].any()


def test_no_number_is_read():
    """The host would wait for a GPU; and steps are also run on fake tensors, and captured."""
    with FakeTensorMode():
        x, *given = (torch.empty(s) for s in ((1, 3, 4, 5, 6), (5, 3, 3, 3, 3), (3,)))
        y = with_border(x, *(value.requires_grad_() for value in given))
        assert y.shape == (1, 5, 4, 5, 6)
        gradients = torch.autograd.grad(y.sum(), given)
    assert [g.shape for g in gradients] == [value.shape for value in given]


def test_autocast_lowers_the_map_and_not_the_border():
    x, weight, bias = (value.float() for value in values((6, 5, 7), (3, 3, 3)))
    y = torch.zeros(2, 5, 6, 5, 7)
    expected = add_border(y.clone(), weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(add_border(y.clone(), weight, bias), expected)
        lowered = add_border(y.bfloat16(), weight, bias)
        assert torch.equal(lowered, expected.bfloat16())
        actual = results_of(with_border, (x, weight, bias))
    assert [value.dtype for value in actual] == [torch.bfloat16, *[torch.float32] * 3]
    exact = [value.double() for value in (x, weight, bias)]
    dy = tensor(2, 5, 6, 5, 7, seed=9).bfloat16().double()
    assert_near(actual, results_of(with_border, exact, dy), 1e-2)
