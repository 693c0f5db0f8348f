"""Which convolutions use the hand-written kernels, and that results stay the same.

Here the kernels are replaced by their plain versions; other modules test the kernels themselves.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import (
    LAYOUTS,
    assert_same,
    between,
    channels_last,
    padded,
    results,
    tensor,
)
from unet3d.kernels import (
    conv3x3x3,
    conv3x3x3_instance_norm,
    instance_norm,
    recomputed_in_backward,
    sum_with_conv3x3x3,
)
from unet3d.kernels.conv import slabs
from unet3d.kernels.conv.hopper import api, op
from unet3d.kernels.maps import MOMENTS, SUMS, deferred_of, is_padded, take, was_folded
from unet3d.kernels.norm import reference
from unet3d.kernels.sharding import sharded

FIRST, LAST = LAYOUTS
EPS, SLOPE = 1e-5, 0.01


@pytest.fixture
def everywhere(monkeypatch):
    """Use the convolutions for every map of any type and device."""
    monkeypatch.setattr(api, "suits", lambda x, inputs, outputs: True)


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which operations add their names when they run."""
    names = []
    for name in ("convolve", "input_gradient", "weight_gradient"):
        function = getattr(op, name)

        def watched(*tensors, of=function, name=name, **options):
            names.append(name)
            return of(*tensors, **options)

        monkeypatch.setattr(op, name, watched)
    return names


def plain(x, weight, x_padding=1):
    return F.conv3d(x, weight, padding=(x_padding, 1, 1))


def plain_norm(y, weight, bias):
    return F.leaky_relu(F.instance_norm(y, weight=weight, bias=bias, eps=EPS), SLOPE)


@pytest.mark.parametrize(
    ("shape", "outputs", "dtype", "layout", "device", "suits"),
    [
        ((1, 32, 32, 32, 32), 32, torch.bfloat16, LAST, "cpu:0", True),
        ((2, 64, 32, 32, 33), 32, torch.float16, LAST, "cpu:0", True),
        ((1, 32, 32, 32, 31), 32, torch.bfloat16, LAST, "cpu:0", False),  # too small
        ((2, 32, 32, 32, 31), 64, torch.bfloat16, LAST, "cpu:0", False),
        ((1, 16, 32, 32, 32), 32, torch.bfloat16, LAST, "cpu:0", False),
        ((1, 32, 32, 32, 32), 128, torch.bfloat16, LAST, "cpu:0", False),
        ((1, 32, 32, 32, 32), 32, torch.float32, LAST, "cpu:0", False),
        ((1, 32, 32, 32, 32), 32, torch.bfloat16, FIRST, "cpu:0", False),
        ((1, 32, 32, 32, 32), 32, torch.bfloat16, LAST, "cpu", False),
    ],
)
def test_which_convolutions_are_written_by_hand(
    shape, outputs, dtype, layout, device, suits, monkeypatch
):
    monkeypatch.setattr(api, "available", lambda device: True)
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        assert api.suits(x, shape[1], outputs) == suits
        weight = torch.empty(outputs, shape[1], 3, 3, 3, device=device, dtype=dtype)
        y = conv3x3x3(x, weight, moments=True)
        assert y.shape == (shape[0], outputs, *shape[2:])
        assert (take(y, MOMENTS) is not None) == suits
        monkeypatch.setattr(api, "available", lambda device: False)
        assert not api.suits(x, shape[1], outputs)


@pytest.mark.parametrize("is_available", [False, True])
def test_nothing_is_padded_for_a_reader_that_is_written_by_hand(is_available, monkeypatch):
    monkeypatch.setattr(api, "available", lambda device: is_available)
    with FakeTensorMode():
        options = {"dtype": torch.bfloat16, "device": "cpu:0", "memory_format": LAST}
        x = torch.empty(1, 32, 64, 64, 64, **options).requires_grad_()
        kernel = torch.empty(32, 32, 3, 3, 3, device="cpu:0", requires_grad=True)
        y = conv3x3x3(x, kernel)
        seen = []
        y.register_hook(lambda gradient: seen.append(is_padded(gradient)))
        weight, bias = (torch.empty(32, device="cpu:0", requires_grad=True) for _ in range(2))
        made = instance_norm(y, weight, bias, EPS, SLOPE, pads_output=True)
        assert was_folded(y) == is_padded(made) == (not is_available)
        made.sum().backward()
        assert seen == [not is_available]
        narrow = torch.empty(1, 16, 64, 64, 128, **options)
        assert api.wants_padding(narrow)


@pytest.mark.parametrize("x_padding", [0, 1])
@pytest.mark.parametrize("has_room", [False, True])
def test_values_and_gradients(x_padding, has_room, everywhere, calls):
    """Also for maps with room around Z, and for slabs with their neighbours' planes."""
    values = [tensor(2, 3, 5, 4, 6), tensor(4, 3, 3, 3, 3, seed=1)]
    expected = results(lambda x, w: plain(x, w, x_padding), values)
    dy = tensor(*expected[0].shape, seed=9)
    given = [padded(values[0]) if has_room else values[0], values[1]]
    given.append(padded(dy) if has_room else dy.contiguous())

    def convolved(x, weight):
        with nullcontext() if x_padding else between():
            return conv3x3x3(x, weight)

    actual = results(convolved, given[:2], given[2])
    assert_same(actual, expected)
    assert calls == ["convolve", "weight_gradient", "input_gradient"]


@pytest.mark.parametrize("needed", [0, 1])
def test_only_gradients_that_are_wanted_are_computed(needed, everywhere, calls):
    values = [tensor(1, 2, 5, 4, 6), tensor(3, 2, 3, 3, 3, seed=1)]
    leaf = values[needed].requires_grad_()
    y, expected = conv3x3x3(*values), plain(*values)
    assert_same(*([torch.autograd.grad(value.sum(), leaf)[0]] for value in (y, expected)))
    assert calls[1:] == [("input_gradient", "weight_gradient")[needed]]


def test_weights_keep_their_type(everywhere):
    x = tensor(1, 2, 5, 4, 6).bfloat16()
    weight = tensor(3, 2, 3, 3, 3, seed=1).float().requires_grad_()
    y = conv3x3x3(x, weight)
    y.sum().backward()
    assert (y.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())  # nor is it rounded


def test_a_result_goes_on_with_its_moments(everywhere):
    values = tensor(2, 3, 5, 4, 6), tensor(4, 3, 3, 3, 3, seed=1)
    assert take(conv3x3x3(*values), MOMENTS) is None
    y = conv3x3x3(*values, moments=True)
    count, variance, mean, rest = take(y, MOMENTS)[0]
    exact = torch.var_mean(plain(*values), (2, 3, 4), correction=0)
    assert_same([variance, mean + rest], exact)
    assert (count == 120).all()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_normalisation_takes_them_over(recomputes, everywhere, monkeypatch):
    """The normalisation uses a convolution's moments, except where another map is added first."""
    values = [tensor(2, 3, 6, 4, 6), tensor(4, 3, 3, 3, 3, seed=1)]
    values += [tensor(4, seed=2), tensor(4, seed=3)]
    added = tensor(2, 4, 6, 4, 6, seed=4)
    asked = []
    monkeypatch.setattr(reference, "moments", asked.append)

    def joined(x, kernel, weight, bias):
        return conv3x3x3_instance_norm(x, kernel, weight, bias, EPS, SLOPE)

    def with_sum(x, kernel, weight, bias):
        y = conv3x3x3(x, kernel, moments=True)
        return instance_norm(y, weight, bias, EPS, SLOPE, added=added)

    expected = results(lambda x, k, *affine: plain_norm(plain(x, k), *affine), values)
    if recomputes:
        monkeypatch.setattr("unet3d.kernels.recompute.MIN_ELEMENTS", 1)
        with recomputed_in_backward():
            actual = results(joined, values)
    else:
        actual = results(joined, values)
    assert_same(actual, expected)
    assert not asked
    expected = results(lambda x, k, *affine: plain_norm(plain(x, k) + added, *affine), values)
    assert_same(results(with_sum, values), expected)


def test_moments_in_parts_of_which_some_are_empty():
    """The mean may be a sum of any number of summands."""
    x = tensor(2, 3, 6, 4, 6) + 5
    moments = torch.zeros(3, 4, 2, 3, dtype=torch.float64)  # the first part is empty
    for at, part in ((1, x[..., :1]), (2, x[..., 1:])):
        variance, mean = torch.var_mean(part, (2, 3, 4), correction=0)
        moments[at, 0] = part[0, 0].numel()
        moments[at, 1:] = torch.stack([variance, mean - 1, torch.ones_like(mean)])
    mean, rstd, merged = reference.merge(moments, x[0, 0].numel(), 0.0)
    variance, exact = torch.var_mean(x, (2, 3, 4), correction=0)
    assert_same([mean.squeeze(-1), rstd], [exact, variance.rsqrt()])
    assert_same(merged[0], [torch.full_like(exact, 144), variance, exact])


class Chain:
    """Two convolutions and the normalisation between them, in PyTorch and by this package."""

    values = [tensor(2, 3, 6, 4, 6), tensor(4, 3, 3, 3, 3, seed=1), tensor(4, seed=2)]
    values += [tensor(4, seed=3), tensor(5, 4, 3, 3, 3, seed=4)]
    added = tensor(2, 4, 6, 4, 6, seed=5)

    def __init__(self, adds=False, reads=True):
        self.adds, self.outputs = adds, 5 if reads else None

    def plain(self, x, kernel, weight, bias, second):
        y = plain(x, kernel) + self.added if self.adds else plain(x, kernel)
        return plain(plain_norm(y, weight, bias), second)

    def between(self, x, kernel, weight, bias):
        """Return the input of the second convolution."""
        given = weight, bias, EPS, SLOPE
        if not self.adds:
            return conv3x3x3_instance_norm(x, kernel, *given, outputs_of_reader=self.outputs)
        y, added = conv3x3x3(x, kernel), self.added
        return instance_norm(y, *given, added=added, outputs_of_reader=self.outputs)

    def __call__(self, *values):
        return conv3x3x3(self.between(*values[:4]), values[4], moments=True)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_map_with_one_reader_is_never_normalised(adds, recomputes, everywhere, monkeypatch):
    """Separate passes: forward at most one over a sum, backward only the gradient's."""
    monkeypatch.setattr("unet3d.kernels.recompute.MIN_ELEMENTS", 1)
    chain, passes = Chain(adds), []
    for name in ("moments", "normalize", "sums", "gradient"):
        function = getattr(reference, name)

        def watched(*tensors, of=function, name=name, **options):
            passes.append(name)
            return of(*tensors, **options)

        monkeypatch.setattr(reference, name, watched)
    with recomputed_in_backward() if recomputes else nullcontext():
        actual = results(chain, chain.values)
    assert passes == ["moments", "gradient"] if adds else passes == ["gradient"]
    assert_same(actual, results(chain.plain, chain.values))
    assert_same(results(Chain(adds, reads=False), chain.values), actual)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_convolution_is_added_to_a_map(recomputes, everywhere, monkeypatch):
    """Its input is normalised a second time only for the weight's gradient, while it is loaded."""
    monkeypatch.setattr("unet3d.kernels.recompute.MIN_ELEMENTS", 1)
    values = [tensor(2, 4, 6, 4, 6), tensor(4, seed=1), tensor(4, seed=2)]
    values += [tensor(4, 4, 3, 3, 3, seed=n) for n in (3, 5)] + [tensor(2, 4, 6, 4, 6, seed=4)]
    loads, gradient = [], op.weight_gradient

    def watched(dy, x, weight, *more, **options):
        loads.append(weight is not None)
        return gradient(dy, x, weight, *more, **options)

    monkeypatch.setattr(op, "weight_gradient", watched)

    def added(x, weight, bias, first, kernel, other):
        made = conv3x3x3_instance_norm(x, first, weight, bias, EPS, SLOPE)
        y, rest = sum_with_conv3x3x3(other * 1, made, kernel)
        assert rest is None and take(y, MOMENTS) is not None
        return instance_norm(y, weight, bias, EPS, SLOPE)

    def wanted(x, weight, bias, first, kernel, other):
        y = other + plain(plain_norm(plain(x, first), weight, bias), kernel)
        return plain_norm(y, weight, bias)

    with recomputed_in_backward() if recomputes else nullcontext():
        actual = results(added, values)
    assert_same(actual, results(wanted, values))
    assert loads == [recomputes, False]


def test_moments_of_values_that_were_changed_are_forgotten(everywhere):
    """A module's hook may change them."""
    x, kernel, weight, bias, _ = Chain.values
    with torch.inference_mode():
        y = conv3x3x3(x, kernel, moments=True)
        assert take(y, MOMENTS) is not None
    y = conv3x3x3(x, kernel, moments=True).mul_(2)
    made = instance_norm(y, weight, bias, EPS, SLOPE)
    assert_same([made], [plain_norm(2 * plain(x, kernel), weight, bias)])


@pytest.mark.parametrize("by", ["a hook", "autograd"])
def test_sums_of_a_gradient_that_was_changed_are_forgotten(by, everywhere):
    """Autograd adds to a gradient in place if nothing else holds it."""
    chain = Chain()
    other = tensor(2, 4, 6, 4, 6, seed=6)

    def double(gradient):
        gradient.mul_(2)

    def read(made, convolve, second):
        if by == "a hook":
            made.register_hook(double)
            return convolve(made, second)
        more = (made * other).sum()  # the value differs if the map is not normalised
        return convolve(made, second) + more - more.detach()

    def chained(*values):
        return read(chain.between(*values[:4]), conv3x3x3, values[4])

    def plainly(x, kernel, weight, bias, second):
        return read(plain_norm(plain(x, kernel), weight, bias), plain, second)

    assert_same(results(chained, chain.values), results(plainly, chain.values))


def test_what_its_reader_gets_takes_no_memory(everywhere):
    chain = Chain()
    x, kernel, weight, bias, second = (value.clone().requires_grad_() for value in chain.values)
    saved = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: saved.add(kept.untyped_storage().data_ptr()) or kept, lambda kept: kept
    ):
        made = chain.between(x, kernel, weight, bias)
        before = set(saved)
        y = conv3x3x3(made, second)
    assert deferred_of(made).slope == SLOPE
    assert_same([made], [plain(x, kernel)])  # the map before normalisation
    # Everything but the kernel is kept anyway.
    assert len(saved - before) == 1 and second.untyped_storage().data_ptr() in saved
    seen = []
    made.register_hook(lambda gradient: seen.append(take(gradient, SUMS)))
    y.sum().backward()
    assert seen[0].shape == (1, 2, 2, 4)


def test_without_a_graph_it_is_the_same(everywhere):
    chain = Chain()
    with torch.no_grad():
        assert_same([chain(*chain.values)], [chain.plain(*chain.values)])


def test_frozen_parts(everywhere, calls):
    """No gradient is computed that is not needed, on either side of the normalisation."""
    chain = Chain()
    for needed in range(5):
        leaves = [value.clone().requires_grad_(i == needed) for i, value in enumerate(chain.values)]
        calls.clear()
        actual, exact = (
            torch.autograd.grad(function(*leaves).sin().sum(), leaves[needed])
            for function in (chain, chain.plain)
        )
        assert_same(actual, exact)
        assert calls.count("weight_gradient") == (needed in (1, 4))
        assert calls.count("input_gradient") == (needed < 4) + (needed == 0)


def test_who_normalises_what_it_loads(everywhere, monkeypatch):
    x = tensor(1, 4, 5, 4, 6)
    assert api.normalizes(x, 32)
    assert not api.normalizes(x, None)
    monkeypatch.setattr(api, "suits", lambda x, inputs, outputs: (inputs, outputs) == (4, 32))
    assert api.normalizes(x, 32)
    assert not api.normalizes(x, 33)


@pytest.mark.parametrize(("planes", "suits"), [(32, True), (31, False)])
def test_all_slabs_do_as_the_largest(planes, suits, monkeypatch):
    """Slabs whose convolutions normalise exchange planes that are not normalised."""
    monkeypatch.setattr(api, "available", lambda device: True)
    with FakeTensorMode(), sharded(SimpleNamespace(of_largest=lambda n: n * planes // 8)):
        x = torch.empty(1, 32, 8, 32, 32, device="cpu:0", dtype=torch.bfloat16)
        assert api.normalizes(channels_last(x), 32) == suits


def test_the_first_unit_leaves_it_to_its_reader_too(monkeypatch):
    """On a fake GPU."""
    monkeypatch.setattr(api, "available", lambda device: True)
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        image = torch.empty(1, 1, 32, 32, 64, device="cpu:0")
        kernel, second, weight, bias = (
            torch.empty(shape, device="cpu:0", requires_grad=True)
            for shape in ((32, 1, 3, 3, 3), (64, 32, 3, 3, 3), (32,), (32,))
        )
        made = conv3x3x3_instance_norm(
            image, kernel, weight, bias, EPS, SLOPE, pads_output=True, outputs_of_reader=64
        )
        assert deferred_of(made) is not None and not is_padded(made)
        seen = []
        made.register_hook(lambda gradient: seen.append(take(gradient, SUMS)))
        y = conv3x3x3(made, second, moments=True)
        assert take(y, MOMENTS).shape[1:] == (4, 1, 64)
        y.sum().backward()
        assert seen[0].shape[1:] == (2, 1, 32)
        assert all(leaf.grad is not None for leaf in (kernel, second, weight, bias))


def test_autocast_lowers_weights_only_where_maps_are_low(everywhere):
    x, weight = tensor(1, 3, 5, 4, 6).bfloat16(), tensor(4, 3, 3, 3, 3, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert slabs.lowered(x) == torch.bfloat16
        assert conv3x3x3(x, weight).dtype == torch.bfloat16
